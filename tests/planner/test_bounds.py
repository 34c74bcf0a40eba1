"""The lower bound against simulation, and the parts of a bound against the bound."""

import random
from collections import Counter

import pytest

from autopar.ownership import Replicas
from autopar.planner import PlanOptions
from autopar.planner.bounds import binding, candidate_bound_s, least_s
from autopar.planner.candidate import Candidate, Family, place
from autopar.planner.costs.model import CostModel
from autopar.planner.simulator.simulate import Simulator
from chunked import OTHERS, random_chunked, random_costs
from drawn import random_candidate
from random_problems import gpt_profile, hierarchy, launched, local_cluster, random_cluster, random_profile, two_kinds


def _drawn(seed: int) -> tuple[random.Random, CostModel]:
    """Prices on one or two kinds of devices; some on uneven nodes, in racks."""
    rng = random.Random(seed)
    devices = rng.randint(1, 8)
    profile, cluster = random_profile(seed, most_layers=9, batches=(1, 4, 6, 12)), random_cluster(seed, devices)
    if seed % 3 == 0:
        cluster = hierarchy(seed, [rng.randint(1, 3) for _ in range(3)], racks=1 + seed % 2, more_links=seed % 4 == 0)
    if seed % 2:
        profile, cluster = two_kinds(profile, cluster, seed)
    if seed % 5 == 0:
        profile = launched(profile, seed)
    return rng, CostModel(profile, cluster, PlanOptions(gpus=len(cluster.devices)))


def _busiest_s(costs: CostModel, candidate: Candidate) -> float:
    """What the busiest replica of any stage computes: of unequal shares or kinds of device not always the last one."""
    return max(
        (costs.forward_s(stage, replica) + costs.backward_s(stage, replica, turns)) * turns
        for stage in candidate.stages
        for replica, samples in enumerate(stage.samples)
        if (turns := len(samples.of(candidate.micro_batches)))
    )


def test_no_step_is_below_its_bound_and_what_binds_is_said() -> None:
    tight = 0
    for seed in range(140):
        rng, costs = _drawn(seed)
        simulator = Simulator(costs)
        for _ in range(12):
            candidate = random_candidate(rng, costs)
            step_s, least_s = simulator.step_s(candidate), candidate_bound_s(costs, candidate)
            assert least_s <= step_s * (1 + 1e-9), f"seed {seed}: {candidate}"
            assert least_s >= _busiest_s(costs, candidate) * (1 - 1e-9), f"seed {seed}: {candidate}"
            tight += least_s >= step_s * (1 - 1e-9)
    assert tight >= 1_100
    largest: Counter[str] = Counter()
    for seed in range(150):
        rng, costs = _drawn(seed)
        for _ in range(6):
            candidate = random_candidate(rng, costs)
            parts = binding(costs, candidate)
            assert sum(part.seconds for part in parts) == pytest.approx(candidate_bound_s(costs, candidate), rel=1e-12)
            assert [part.seconds for part in parts] == sorted((part.seconds for part in parts), reverse=True)
            largest.update(part.term for part in parts[:1])
    assert set(largest) == {"compute", "round trip", "link", "filling", "synchronisation", "update", "overhead"}
    costs, candidate = _gpt((2, 1))
    compute = binding(costs, candidate)[0]
    assert (compute.term, compute.stage) == ("compute", 1)
    slowest = candidate.stages[1]
    assert compute.seconds == pytest.approx(8 * (costs.forward_s(slowest, 0) + costs.backward_s(slowest, 0, 8)))
    assert binding(*_gpt((8, 8), bytes_per_s=1e6))[0].term == "link"
    trip = binding(*_gpt((1, 1)))[0]
    assert (trip.term, trip.stage, trip.full) == ("round trip", 0, False)
    limited, shallow = _gpt((1, 1), memory_bytes=costs.peak_bytes(candidate)[0] - 1)
    assert limited.shortfalls(shallow)[0] <= 0 < limited.shortfalls(candidate)[0]
    assert binding(limited, shallow)[0].full


def _gpt(depths: tuple[int, int], gpus: int = 2, **asked: float) -> tuple[CostModel, Candidate]:
    costs = CostModel(gpt_profile(), local_cluster(gpus), PlanOptions(gpus=gpus, **asked))  # type: ignore[arg-type]
    stages = place(Family(8, 2, "1f1b"), (7, 14), [Replicas()] * 2)
    deep = tuple(stage._replace(warmup=depth) for stage, depth in zip(stages, depths, strict=True))
    return costs, Candidate(8, 2, "1f1b", deep)


@pytest.mark.parametrize("schedule", OTHERS)
def test_no_candidate_is_faster_than_its_own_bound(schedule: str) -> None:
    closest = []
    for seed in range(30):
        rng, costs = random.Random(seed), random_costs(seed)
        simulator = Simulator(costs)
        for candidate in filter(None, (random_chunked(rng, costs, schedule) for _ in range(6))):
            bound_s, step_s = least_s(costs, candidate), simulator.step_s(candidate)
            assert bound_s <= step_s * (1 + 1e-9), f"seed {seed}: {candidate}"
            closest.append(bound_s / step_s)
    assert max(closest) > 0.99
