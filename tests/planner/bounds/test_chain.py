"""The lower bound against simulation."""

from __future__ import annotations

import random

import pytest

from autopar.planner.bounds.chain import candidate_bound_s
from autopar.planner.candidate import Candidate, Family, place
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules import SCHEDULES
from drawn import random_candidate
from random_problems import random_cluster, random_profile, two_kinds


def test_no_simulated_step_is_shorter_than_its_bound() -> None:
    tight = 0
    for seed in range(700):
        rng = random.Random(seed)
        devices = rng.randint(1, 8)
        profile, cluster = random_profile(seed, most_layers=9, batches=(1, 4, 6, 12)), random_cluster(seed, devices)
        if seed % 2:
            profile, cluster = two_kinds(profile, cluster, seed)
        costs = CostModel(profile, cluster, PlanOptions(gpus=devices))
        simulator = Simulator(costs)
        for _ in range(15):
            candidate = random_candidate(rng, costs)
            step_s, least_s = simulator.step_s(candidate), candidate_bound_s(costs, candidate)
            assert least_s <= step_s * (1 + 1e-9), f"seed {seed}: {candidate}"
            tight += least_s >= step_s * (1 - 1e-9)
    assert tight >= 1000


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_named_depths_stay_above_the_bound_too(schedule: str) -> None:
    for seed in range(100):
        rng = random.Random(seed)
        profile = random_profile(seed, most_layers=8, batches=(4, 8))
        costs = CostModel(profile, random_cluster(seed, 6), PlanOptions(gpus=6))
        count = rng.randint(1, min(6, costs.layer_count))
        cuts = (*sorted(rng.sample(range(1, costs.layer_count), count - 1)), costs.layer_count)
        for depths in SCHEDULES[schedule].warmups(count, 1, 4).values():
            stages = place(Family(4, costs.batch // 4, schedule), cuts, (1,) * count)
            deep = tuple(stage._replace(warmup=depth) for stage, depth in zip(stages, depths, strict=True))
            candidate = Candidate(4, costs.batch // 4, schedule, deep)
            assert candidate_bound_s(costs, candidate) <= Simulator(costs).step_s(candidate) * (1 + 1e-9)


def test_a_single_device_meets_its_bound_exactly() -> None:
    for seed in range(50):
        costs = CostModel(random_profile(seed), random_cluster(seed, 1), PlanOptions(gpus=1))
        stages = place(Family(1, costs.batch, "1f1b"), (costs.layer_count,), (1,))
        candidate = Candidate(1, costs.batch, "1f1b", stages)
        assert candidate_bound_s(costs, candidate) == pytest.approx(Simulator(costs).step_s(candidate), rel=1e-12)
