"""Splits of clusters of several kinds, against every cut of them."""

from itertools import permutations

import numpy as np
import pytest

from autopar.ownership import SINGLE, Replicas
from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import Candidate, CandidateStage, Family
from autopar.planner.constraints import runnable
from autopar.planner.costs.model import CostModel
from autopar.planner.search import moves
from autopar.planner.search.judge import Best
from autopar.planner.search.kinds import judge_splits_by_kind
from autopar.planner.search.local import orders_of
from autopar.planner.simulator.simulate import Simulator
from random_problems import gpt_profile, local_cluster, two_kinds


def _costs(seed: int, others: int) -> tuple[CostModel, PlanOptions]:
    """Six devices, the last ones of another kind whose layers take from 0.4 to 2 times as long."""
    cluster, options = local_cluster(6), PlanOptions(schedule="1f1b", use_all=seed % 2 == 0)
    profile = two_kinds(gpt_profile(), cluster, seed)[0]
    devices = [
        device.model_copy(update={"type": "other" if at >= 6 - others else "test"})
        for at, device in enumerate(cluster.devices)
    ]
    return CostModel(profile, cluster.model_copy(update={"devices": tuple(devices)}), options), options


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(4))
def test_no_cut_between_all_devices_of_two_kinds_is_faster_than_the_plan(seed: int) -> None:
    costs, options = _costs(seed, others=2 + seed % 3)
    simulator, found = Simulator(costs), plan(costs.profile, costs.cluster, options)
    kinds = [tuple(np.flatnonzero(np.equal(costs.kind_of, kind)).tolist()) for kind in set(costs.kind_of)]
    every = (
        Candidate(*family, (_stage(costs, family, 0, cut, first, depth), _stage(costs, family, cut, 14, then, 1)))
        for family in runnable(costs, options)
        for first, then in permutations(kinds)
        if family.micro_batch_size >= max(len(first), len(then))
        for depth in range(1, min(3, family.micro_batches) + 1)
        for cut in range(1, 14)
    )
    least_s = min(simulator.step_s(each) for each in every if max(costs.shortfalls(each)) <= 0)
    assert found.predicted.step_s <= least_s, f"seed {seed}"


def test_groups_of_two_kinds_take_as_many_layers_as_they_are_quick() -> None:
    for seed in range(4):
        costs, options = _costs(seed, others=3)
        simulator, best = Simulator(costs), Best()
        judge_splits_by_kind(simulator, runnable(costs, options), options, best)
        assert best.fastest is not None
        stages = best.fastest.candidate.stages
        assert all(len({costs.kind_of[device] for device in stage.devices}) == 1 for stage in stages)
        if options.use_all:
            assert len(set(best.fastest.candidate.devices)) == 6
        own = [costs.forward_s(stage, -1) + costs.backward_s(stage, -1, 1) for stage in stages]
        most = max(
            float(np.diff(moves.running_s(costs, stage.shares[-1], SINGLE, kind)).max())
            for stage in stages
            for kind in (0, 1)
        )
        assert max(own) <= min(own) + 2 * most, f"seed {seed}"


def _stage(
    costs: CostModel, family: Family, first: int, stop: int, devices: tuple[int, ...], depth: int
) -> CandidateStage:
    replicas = Replicas(len(devices))
    return CandidateStage.of(first, stop, devices, costs.shares(family.micro_batch_size, replicas), depth, replicas)


def test_an_order_gives_every_stage_its_part_of_each_kind_and_keeps_teams_together() -> None:
    costs = _costs(0, others=2)[0]
    assert orders_of(costs)[-1] == (0, 4, 1, 2, 5, 3)
    assert orders_of(costs, 2)[-1] == (0, 1, 4, 5, 2, 3)
    assert all(len(order) == 6 for order in orders_of(costs, 4))
