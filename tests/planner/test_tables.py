"""The suffix tables against the bounds of all candidates they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from instances import random_cluster, random_profile

from autopar.planner.bounds import bound
from autopar.planner.candidate import Candidate, families
from autopar.planner.costs import CostModel
from autopar.planner.exhaustive import everything
from autopar.planner.options import PlanOptions
from autopar.planner.tables import FlowTables, SizeTables, SuffixTables


def _by_first_stage(costs: CostModel, options: PlanOptions) -> dict[tuple[object, ...], float]:
    """The least bound of all candidates that fit, by family, stages, and the first stage's width and end."""
    least: dict[tuple[object, ...], float] = {}
    for candidate in everything(costs.layer_count, len(costs.devices), costs.batch, options):
        if max(costs.shortfalls(candidate)) > 0:
            continue
        first = candidate.stages[0]
        depths = tuple(stage.warmup for stage in candidate.stages)
        key = (candidate.micro_batches, candidate.schedule, depths, len(first.devices), first.stop)
        least[key] = min(least.get(key, np.inf), bound(costs, candidate))
    return least


def _table_value(tables: SuffixTables, stages: int, width: int, stop: int, overhead_s: float) -> float:
    _, _, done, apart = tables.chosen[stages - 1][:, 0, width - 1, 0, stop]
    return float(max(done, apart)) + overhead_s


def test_a_table_never_exceeds_the_bound_of_any_candidate_and_is_mostly_equal() -> None:
    compared = equal = 0
    for seed in range(120):
        devices = seed % 3 + 2
        profile, cluster = random_profile(seed, batches=(2, 4), skips=0.5), random_cluster(seed, devices)
        options = PlanOptions(gpus=devices, memory_bytes=4_000_000 if seed % 2 else None)
        costs = CostModel(profile, cluster, options)
        most = min(costs.layer_count, devices)
        least = _by_first_stage(costs, options)
        flows = FlowTables(costs)
        for family in families(costs.batch, most, options):
            sizes = SizeTables(costs, flows, family.micro_batches, family.micro_batch_size)
            tables = SuffixTables(sizes, family, most, use_all=False)
            for stages in range(1, most + 1):
                depths = tuple(family.depths[stages - 1 :: -1])
                for width in range(1, sizes.widths + 1):
                    for stop in range(1, costs.layer_count + 1):
                        key = (family.micro_batches, family.schedule, depths, width, stop)
                        if key in least:
                            value = _table_value(tables, stages, width, stop, profile.step_overhead_s)
                            assert value <= least[key] * (1 + 1e-9), f"seed {seed}: {key}"
                            compared += 1
                            equal += value >= least[key] * (1 - 1e-9)
    assert compared >= 2000
    assert equal >= 0.6 * compared


def test_of_unequal_replicas_the_busiest_sets_the_pace() -> None:
    costs = CostModel(random_profile(8, batches=(6,)), random_cluster(8, 2), PlanOptions(gpus=2))
    candidate = next(
        each
        for each in everything(costs.layer_count, 2, 6, PlanOptions(micro_batches=2, use_all=True))
        if len(each.stages) == 1
    )
    uneven = candidate.stages[0]._replace(shares=(1, 2))
    slow = Candidate(2, 3, "1f1b", (uneven._replace(warmup=1),))
    busiest = costs.forward_s(0, costs.layer_count, 2) + costs.backward_s(0, costs.layer_count, 2, 1.0)
    assert busiest > 1e-3
    assert bound(costs, slow) >= 2 * busiest
    assert bound(costs, slow) == pytest.approx(bound(costs, slow._replace(stages=(uneven._replace(shares=(2, 1)),))))
