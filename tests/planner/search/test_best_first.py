"""The search, its stack of bounds and its prefixes of stages, against the oracle that simulates every plan."""

import random
from dataclasses import replace

import pytest

from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions
from autopar.planner.bounds import candidate_bound_s
from autopar.planner.candidate import families
from autopar.planner.costs.model import CostModel
from autopar.planner.search.best_first import bounds_of_families, least_bound_s, search
from autopar.planner.search.judge import Best
from autopar.planner.simulator.simulate import Simulator
from drawn import random_candidate
from oracles.exhaustive import everything, exhaust
from random_problems import launched, problem, random_cluster, random_profile, small_question
from searched import agreed, exhausted, searched


def _limited(seed: int) -> tuple[Profile, Cluster, PlanOptions, float]:
    """An instance whose memory the best plan without a limit mostly does not fit, and that plan's step time."""
    profile, cluster, options = small_question(seed)
    free, _ = searched(profile, cluster, options)
    if seed % 5 == 0:
        return profile, cluster, options, free.step_s
    peak = max(CostModel(profile, cluster, options).peak_bytes(free.fastest.candidate))
    limit = max(1, int(peak * (0.999, 0.95, 0.9, 0.8)[seed % 4]))
    return profile, cluster, replace(options, memory_bytes=limit), free.step_s


@pytest.mark.some(1)
@pytest.mark.parametrize("part", range(23))
def test_an_exact_search_finds_the_oracles_step_time_and_least_bound_with_memory_limits_that_bind(part: int) -> None:
    binding = compared = 0
    for seed in range(20 * part, 20 * (part + 1)):
        profile, cluster, options, free_s = _limited(seed)
        best = agreed(profile, cluster, options, seed)
        compared += best.fastest is not None
        binding += best.fastest is not None and best.step_s > free_s * (1 + 1e-9)
    assert binding >= compared / 4 >= 2


@pytest.mark.some(1)
@pytest.mark.parametrize("part", range(15))
def test_where_hosts_launch_what_devices_compute_the_search_finds_the_oracles_step_time(part: int) -> None:
    for seed in range(10 * part, 10 * (part + 1)):
        profile, cluster, options = small_question(seed)
        profile = launched(profile, seed)
        peak = max(
            CostModel(profile, cluster, options).peak_bytes(searched(profile, cluster, options)[0].fastest.candidate)
        )
        options = replace(options, memory_bytes=max(1, int(peak * (0.999, 0.9, 2.0)[seed % 3])))
        agreed(profile, cluster, options, seed)


ASKED = ({"use_all": True}, {"divisible": True}, {"schedule": "gpipe"}, {"micro_batches": 2}, {"bytes_per_s": 3e7})


@pytest.mark.parametrize("asked", [*ASKED, {"min_stages": 2}], ids=str)
def test_an_exact_search_finds_the_oracles_step_time_under_constraints(asked: dict[str, object]) -> None:
    compared = 0
    for seed in range(1000, 1004):
        profile = random_profile(seed, most_layers=3, batches=(2, 4))
        devices = seed % 2 + 2
        options = PlanOptions(gpus=devices, gap=0.0, shard="auto", **asked)  # type: ignore[arg-type]
        compared += agreed(profile, random_cluster(seed, devices), options, seed).fastest is not None
    assert compared >= 2


def test_a_search_that_stops_early_is_honest() -> None:
    for seed in range(2000, 2010):
        devices = seed % 2 + 2
        profile, cluster = random_profile(seed, most_layers=4, batches=(2, 4)), random_cluster(seed, devices)
        exact = exhausted(profile, cluster, PlanOptions(gpus=devices))[0].step_s
        best, result = searched(profile, cluster, PlanOptions(gpus=devices, gap=0.3))
        assert result.lower_bound_s <= exact * (1 + 1e-9)
        assert exact <= best.step_s * (1 + 1e-9)
        hasty, result = searched(profile, cluster, PlanOptions(gpus=devices, gap=0.0, max_candidates=1))
        assert result.lower_bound_s <= exact * (1 + 1e-9) <= hasty.step_s * (1 + 2e-9)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "limits",
    [
        ("pace.MANY_SWEPT",),
        ("best_first.MOST_APART", "pace.MANY_ELEMENTS"),
        ("best_first.MOST_APART", "pace.MANY_SWEPT"),
        ("best_first.MOST_APART", "best_first.TABLES"),
        ("best_first.MOST_APART", "stages.MOST_TABLED"),
    ],
)
def test_families_are_bounded_whatever_their_size(monkeypatch: pytest.MonkeyPatch, limits: tuple[str, ...]) -> None:
    """What only large problems meet: no tables, stages taken together, bounds by round trips, by a family, by work."""
    for limit in limits:
        monkeypatch.setattr(f"autopar.planner.search.{limit}", 0)
    above = 0
    for seed in range(4, 12):
        profile, cluster, options = small_question(seed)
        optimum, _ = exhausted(profile, cluster, options)
        best = Best()
        simulator = Simulator(CostModel(profile, cluster, options))
        found = search(simulator, families(simulator.costs.batch, options), replace(options, gap=0.02), best)
        assert found.lower_bound_s <= optimum.step_s * (1 + 1e-9), f"seed {seed}"
        above += best.step_s > optimum.step_s * (1 + 1e-9)
    assert above, "else nothing is left out, and nothing tested"


def test_every_bound_of_the_stack_is_below_every_plan_that_fits_and_none_is_below_the_one_before() -> None:
    rising = 0
    for seed in range(18):
        devices = random.Random(seed).randint(1, 3)
        profile, cluster = problem(seed, devices, 3, most_layers=4, batches=(1, 2, 4))
        asked = ({}, {"shard": "auto"}, {"recompute": "full"}, *ASKED[:3])[seed % 6]
        options = PlanOptions(gpus=devices, gap=0.0, **asked)  # type: ignore[arg-type]
        costs = CostModel(profile, cluster, options)
        every = families(costs.batch, options)
        bounds = bounds_of_families(costs, every, least_bound_s(costs, options), float("inf"))
        best = Best()
        step_s = exhaust(Simulator(costs), options, best).step_s
        assert bounds.work_s <= bounds.contiguous_s <= bounds.linked_s <= step_s * (1 + 1e-9), f"seed {seed}"
        rising += bounds.work_s * 1.001 < bounds.contiguous_s * 1.0001 < bounds.linked_s
        if best.fastest is not None:
            clipped = bounds_of_families(costs, every, least_bound_s(costs, options), step_s / 2)
            assert max(clipped.work_s, clipped.contiguous_s, clipped.linked_s) <= step_s / 2
    assert rising >= 3


def test_bounds_are_below_what_they_leave_out_and_free_links_take_no_time() -> None:
    for seed in range(16):
        profile, cluster = random_profile(seed, most_layers=4, batches=(2, 4)), random_cluster(seed, 2)
        options = PlanOptions(gpus=2, shard="auto" if seed % 2 else "none")
        costs = CostModel(profile, cluster, options)
        bounds = bounds_of_families(costs, families(costs.batch, options), least_bound_s(costs, options), float("inf"))
        plans = list(everything(costs, replace(options, recompute="none")))
        for expected, model in (
            (bounds.contiguous_s, costs.without(links=True, memory=True)),
            (bounds.linked_s, costs.without(memory=True)),
        ):
            least_s = min(candidate_bound_s(model, candidate) for candidate in plans)
            assert expected <= least_s * (1 + 1e-9), f"seed {seed}"
    for seed in range(20):
        rng = random.Random(seed)
        profile, cluster = random_profile(seed), random_cluster(seed, 4)
        costs = CostModel(profile, cluster, PlanOptions(gpus=4))
        free = costs.without(links=True)
        for candidate in (random_candidate(rng, costs) for _ in range(5)):
            for stage in candidate.stages:
                assert free.reduce_s(stage) == free.replica_exposed_s(stage, 0) == 0
                assert free.forward_s(stage, 0) <= costs.forward_s(stage, 0)
                if stage.shard == "none":
                    assert free.forward_s(stage, 0) == costs.forward_s(stage, 0)
            assert free.peak_bytes(candidate) == costs.peak_bytes(candidate)
            assert candidate_bound_s(free, candidate) <= candidate_bound_s(costs, candidate) * (1 + 1e-12)
            assert max(costs.without(memory=True).shortfalls(candidate)) < 0
