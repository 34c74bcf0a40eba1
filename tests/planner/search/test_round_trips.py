"""The bound by least round trips against the bounds of all plans that it is of."""

from __future__ import annotations

import pytest

from autopar.planner.bounds import candidate_bound_s, round_trips
from autopar.planner.candidate import Candidate, families
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.placement import pool_of
from autopar.planner.search.round_trips import RoundTrips
from autopar.planner.search.stages import StageTables
from autopar.planner.search.tables import States
from autopar.planner.search.variants import FINE
from oracles.exhaustive import everything
from random_problems import random_cluster, random_profile


def _instance(seed: int) -> tuple[CostModel, PlanOptions]:
    devices = seed % 2 + 1
    profile, cluster = random_profile(seed, most_layers=4, batches=(2, 8), skips=0.0), random_cluster(seed, devices)
    options = PlanOptions(gpus=devices, memory_bytes=3_000_000 if seed % 2 else None)
    return CostModel(profile, cluster, options), options


@pytest.mark.parametrize("apart", [True, False])
def test_no_plan_has_a_lower_bound_or_a_shorter_round_trip(apart: bool) -> None:
    compared = close = 0
    for seed in range(24):
        costs, options = _instance(seed)
        overhead_s = costs.profile.step_overhead_s
        plans: dict[int, list[Candidate]] = {}
        for candidate in everything(costs, options):
            if max(costs.shortfalls(candidate)) <= 0:
                plans.setdefault(candidate.micro_batches, []).append(candidate)
        for family in families(costs.batch, options):
            mine = plans.get(family.micro_batches, [])
            pool = pool_of(costs, exact=True, use_all=False)
            stages = StageTables(costs, pool, family, options, fineness=None if apart else FINE)
            if not mine or not stages.chain:
                continue
            trips = RoundTrips(stages, States(stages), options)
            steps = [candidate_bound_s(costs, each) - overhead_s for each in mine]
            whole = [round_trips(costs, each)[0] for each in mine]
            for cap_s in (0.9 * min(steps), 1.2 * min(steps)):
                assert trips.bound_s(cap_s, 9) <= min(steps) * (1 + 1e-9), f"seed {seed}"
            close += trips.bound_s(min(steps), 9) >= 0.8 * min(steps)
            for step_s, trip_s in [*zip(steps, whole, strict=True)][::5]:
                assert trips.least_s(step_s - trip_s, step_s) <= trip_s * (1 + 1e-9), f"seed {seed}"
                compared += 1
    assert compared >= 60
    assert close >= 8
