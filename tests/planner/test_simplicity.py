"""The simplest of plans that are about as fast, and plans of equal widths."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.plan import Plan
from autopar.planner import PlanOptions, plan
from autopar.planner.alternatives import simplicity, straddling
from autopar.planner.assemble import candidate_of
from autopar.planner.candidate import Candidate, Family, place
from autopar.planner.costs.model import CostModel
from autopar.planner.simulator.simulate import Simulator
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile


def _widths(made: Plan) -> set[tuple[object, ...]]:
    return {(len(stage.devices), stage.division, stage.shard, stage.shares) for stage in made.stages}


def test_the_plan_is_within_one_percent_of_the_fastest_and_no_harder_to_use() -> None:
    simpler = 0
    for seed in range(40):
        profile, cluster = random_profile(seed, most_layers=8), random_cluster(seed, seed % 4 + 2)
        options = PlanOptions(gpus=seed % 4 + 2)
        costs = CostModel(profile, cluster, options)
        made, exact = plan(profile, cluster, options), plan(profile, cluster, replace(options, exact=True))
        assert exact.predicted.step_s <= made.predicted.step_s <= exact.predicted.step_s * 1.01 * (1 + 1e-9)
        own, other = (simplicity(costs, candidate_of(each, profile)) for each in (made, exact))
        assert own <= other, f"seed {seed}"
        if own < other:
            simpler += 1
            assert (
                any("`exact=True` plans it" in note for note in made.notes)
                or made.predicted.step_s == exact.predicted.step_s
            )
    assert simpler >= 5


@pytest.mark.parametrize("exact", [False, True])
def test_no_stage_keeps_more_in_flight_than_the_plan_needs(exact: bool) -> None:
    slower = 0
    for seed in range(24):
        rng = random.Random(seed)
        devices, count = rng.randint(1, 4), rng.choice([4, 8, 12])
        profile = random_profile(seed, most_layers=8, batches=(24,))
        fewest = min(len(profile.layers), rng.randint(1, devices))
        options = PlanOptions(schedule="1f1b", micro_batches=count, min_stages=fewest, exact=exact)
        cluster = random_cluster(seed, devices)
        made = plan(profile, cluster, options)
        simulator, candidate = Simulator(CostModel(profile, cluster, options)), candidate_of(made, profile)
        for index, stage in enumerate(candidate.stages):
            other = stage._replace(warmup=stage.warmup - 1)
            behind = candidate.stages[index + 1 : index + 2]
            if other.warmup == 0 or any(other.in_flight < min(each.in_flight, count) for each in behind):
                continue
            slower += 1
            shallower = candidate._replace(stages=(*candidate.stages[:index], other, *candidate.stages[index + 1 :]))
            assert simulator.step_s(shallower) > made.predicted.step_s * (1 + 1e-9), f"seed {seed}, stage {index}"
    assert slower >= 8


def test_the_best_plan_of_equal_widths_is_a_row_and_is_planned_when_asked_for() -> None:
    compared = 0
    for seed in range(40):
        profile, cluster = random_profile(seed, most_layers=8), random_cluster(seed, seed % 4 + 2)
        options = PlanOptions(gpus=seed % 4 + 2)
        equal = plan(profile, cluster, replace(options, equal_widths=True))
        assert len(_widths(equal)) == 1, f"seed {seed}"
        made = plan(profile, cluster, options)
        if len(_widths(made)) > 1:
            row = next(each for each in made.alternatives if each.name == "equal widths")
            assert row.step_s is not None
            assert any("`equal_widths=True` plans them" in note for note in made.notes)
            compared += 1
        assert equal.predicted.step_s >= equal.predicted.lower_bound_s
    assert compared >= 3


def test_what_equal_widths_contradict_is_refused_and_what_does_not_fit_is_said() -> None:
    for asked in ({"stages": "0-6:1,7-13:1"}, {"gap": 0.0}, {"solver": "milp"}):
        with pytest.raises(UsageError, match="`equal_widths` does not go with"):
            PlanOptions(equal_widths=True, **asked)  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError):
        plan(gpt_profile(), local_cluster(2), PlanOptions(gpus=2, memory_bytes=2**20, equal_widths=True))


def test_stages_within_a_node_or_on_whole_nodes_do_not_straddle() -> None:
    cluster = local_cluster(2)
    device = cluster.devices[0]
    nodes = tuple(device.model_copy(update={"node": at // 2}) for at in range(6))
    costs = CostModel(gpt_profile(), cluster.model_copy(update={"devices": nodes}), PlanOptions(gpus=6))
    family = Family(2, 8, "1f1b")
    for widths, expected in (((2, 2, 2), []), ((2, 4), []), ((1, 2, 3), [1, 2]), ((3, 3), [0, 1]), ((1, 1, 4), [])):
        cuts = (*range(1, len(widths)), 14)
        stages = place(family, cuts, widths)
        assert straddling(costs, stages) == expected, widths
        assert simplicity(costs, Candidate(*family, stages))[0] == len(expected)
