"""Families that are too large to tell every stage apart, on small instances: against the oracle."""

import math

import numpy as np
import pytest

from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions
from autopar.planner.bounds import candidate_bound_s
from autopar.planner.candidate import families
from autopar.planner.costs.model import CostModel
from autopar.planner.placement import Places
from autopar.planner.pool import pool_of
from autopar.planner.search.configs import FINE, ROUGH, Fineness
from autopar.planner.search.stages import StageTables
from autopar.planner.search.tables import CappedStages, SuffixTables
from oracles.exhaustive import everything
from random_problems import problem


def _instance(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    devices = seed % 3 + 2
    profile, cluster = problem(seed, devices, 3, most_layers=5, batches=(2, 3, 4))
    memory = None if seed % 2 else 3_000_000
    return profile, cluster, PlanOptions(gpus=devices, memory_bytes=memory, shard="auto" if seed % 5 == 0 else "none")


@pytest.mark.some(1)
@pytest.mark.parametrize("fineness", [ROUGH, FINE, Fineness(2, 2, 1, 1.5)])
def test_tables_of_stages_taken_together_are_below_every_bound_under_every_cap(fineness: Fineness) -> None:
    compared = 0
    for seed in range(7):
        profile, cluster, options = _instance(seed)
        costs = CostModel(profile, cluster, options)
        pool = pool_of(costs, exact=True)
        bounds: dict[int, list[float]] = {}
        for candidate in everything(costs, options):
            if max(costs.shortfalls(candidate)) <= 0:
                bounds.setdefault(candidate.micro_batches, []).append(candidate_bound_s(costs, candidate))
        for family in families(costs.batch, options):
            least = min(bounds.get(family.micro_batches, ()), default=float("inf"))
            stages = StageTables(costs, Places(costs, pool), family, options, fineness)
            free = SuffixTables(stages, options).least_s + costs.profile.step_overhead_s
            assert free <= least * (1 + 1e-9), f"seed {seed}"
            for cap_s in (0.9 * least, 1.1 * least) if least < float("inf") else ():
                capped = SuffixTables(stages, options, CappedStages(stages, cap_s)).least_s
                assert min(cap_s, capped + costs.profile.step_overhead_s) <= least * (1 + 1e-9), f"seed {seed}"
                compared += 1
    assert compared >= 9


def test_the_fewest_devices_under_a_cap_are_those_of_one_stage_after_the_other() -> None:
    compared = 0
    for seed in range(16):
        profile, cluster, options = _instance(seed)
        costs = CostModel(profile, cluster, options)
        pool = pool_of(costs, exact=True)
        for family in families(costs.batch, options):
            stages = StageTables(costs, Places(costs, pool), family, options, None if seed % 2 else FINE)
            alone = np.concatenate([stages.next(first).alone_s.min(axis=0) for first in range(stages.layers)])
            for cap_s in np.quantile(alone, [0.2, 0.6]) if len(alone) else ():
                capped = CappedStages(stages, float(cap_s) + costs.profile.step_overhead_s)
                before, behind = [0.0] + [math.inf] * stages.layers, [math.inf] * stages.layers + [0.0]
                for first in range(stages.layers):
                    for way, shortest, longest in zip(*capped.next(first)[:3], strict=True):
                        for stop in range(first + shortest, first + longest + 1):
                            before[stop] = min(before[stop], before[first] + stages.ways[way].replicas.width)
                for first in reversed(range(stages.layers)):
                    for way, shortest, longest in zip(*capped.next(first)[:3], strict=True):
                        for stop in range(first + shortest, first + longest + 1):
                            behind[first] = min(behind[first], behind[stop] + stages.ways[way].replicas.width)
                assert capped.fewest.tolist() == [before, behind], f"seed {seed}"
                compared += 1
    assert compared >= 24
