"""Depths that do not deadlock, and plans that fit only with the least in flight."""

from __future__ import annotations

import random

import pytest

from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import CandidateStage, Family
from autopar.planner.costs.layers import Levels, Span
from autopar.planner.costs.model import CostModel
from autopar.planner.search.depths import depth_choices
from oracles.exhaustive import everything
from random_problems import random_cluster, random_profile


def test_no_choice_of_depths_lets_more_in_flight_than_the_stage_before_has() -> None:
    turning = 0
    for seed in range(150):
        rng = random.Random(seed)
        profile = random_profile(seed, most_layers=6, batches=(4, 6, 8))
        costs = CostModel(profile, random_cluster(seed, 8), PlanOptions(gpus=8))
        layers, micro_batches = costs.layer_count, rng.choice([2, costs.batch])
        rows = costs.batch // micro_batches
        stages = []
        for first in range(layers):
            width = rng.choice([1, 2, 3])
            turns = 1 < width <= micro_batches
            shares = (rows,) * (width if turns else 1)
            stage = CandidateStage(first, first + 1, tuple(range(len(shares))), shares, 1)
            stage = stage._replace(division="round-robin" if turns else "split")
            stages.append(stage._replace(warmup=rng.randint(1, stage.turns(0, micro_batches))))
            turning += turns
        spans = [Span(Levels([]))] * layers
        found = depth_choices(costs, Family(micro_batches, rows, "1f1b"), stages, spans, exact=False)
        for candidate in found.candidates:
            flying = [min(micro_batches, stage.in_flight) for stage in candidate.stages]
            assert flying == sorted(flying, reverse=True), f"seed {seed}"
    assert turning >= 100


@pytest.mark.parametrize("shard", ["none", "auto"])
def test_a_plan_is_found_with_the_least_memory_that_any_plan_needs(shard: str) -> None:
    for seed in range(40):
        profile = random_profile(seed, most_layers=4, batches=(2, 4), skips=0.0)
        cluster = random_cluster(seed, 3)
        options = PlanOptions(gpus=3, shard=shard)  # type: ignore[arg-type]
        costs = CostModel(profile, cluster, options)
        least = min(max(costs.peak_bytes(candidate)) for candidate in everything(costs, options))
        made = plan(profile, cluster, PlanOptions(gpus=3, shard=shard, memory_bytes=max(1, least)))  # type: ignore[arg-type]
        assert max(made.predicted.peak_bytes) <= max(1, least), f"seed {seed}"
