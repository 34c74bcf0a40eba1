"""Alternatives near the chosen plan, against all plans."""

from __future__ import annotations

import re

import pytest
from instances import gpt_profile, local_cluster, random_cluster, random_profile

from autopar.formats.plan import Plan
from autopar.formats.predicted import Alternative
from autopar.planner import PlanOptions, plan
from autopar.planner.costs.model import CostModel
from autopar.planner.exhaustive import everything
from autopar.planner.search.judge import Best
from autopar.planner.simulator.simulate import Simulator

MIB = 2**20


def _numbers(made: Plan) -> dict[int, Alternative]:
    """The alternatives that are the best of a number of stages."""
    found = {}
    for each in made.alternatives:
        match = re.fullmatch(r"(\d+) stages?", each.name)
        if match:
            found[int(match[1])] = each
    return found


def test_numbers_of_stages_near_the_plans_have_their_best_or_the_least_shortfall() -> None:
    compared = best_of = fitting = short = 0
    for seed in range(70):
        profile = random_profile(seed, most_layers=4, batches=(2, 4), skips=0.0)
        cluster = random_cluster(seed, 3)
        ample = CostModel(profile, cluster, PlanOptions(gpus=3))
        least = min(max(ample.peak_bytes(candidate)) for candidate in everything(ample, PlanOptions()))
        options = PlanOptions(gpus=3, memory_bytes=max(1, int(least * (1.02, 1.3, 3.0)[seed % 3])))
        made = plan(profile, cluster, options)
        simulator = Simulator(CostModel(profile, cluster, options))
        every = list(everything(simulator.costs, options))
        own, known = len(made.stages), _numbers(made)
        for count in {own - 1, own + 1, 1} & set(range(1, min(3, len(profile.layers)) + 1)) - {own}:
            oracle = Best()
            for candidate in every:
                if len(candidate.stages) == count:
                    oracle.judge(simulator, candidate)
            compared += 1
            each = known.get(count)
            if each is None:
                # Said already of a reference: pure data parallelism is a single stage.
                rows = [row for row in made.alternatives if row.name.startswith(("pure", "equal"))]
                assert any(row.infeasible or (row.stages or "").count(",") == count - 1 for row in rows), f"seed {seed}"
            elif each.infeasible is not None:
                assert oracle.found is None, f"seed {seed}"
                assert oracle.closest is not None
                assert f"({oracle.closest[0]} bytes)" in each.infeasible, f"seed {seed}"
                short += 1
            else:
                assert oracle.found is not None, f"seed {seed}"
                assert each.step_s is not None
                assert each.step_s >= oracle.step_s * (1 - 1e-9), f"seed {seed}"
                fitting += 1
                best_of += each.step_s <= oracle.step_s * 1.05
    assert compared >= 70
    assert short >= 10, short
    assert fitting >= 10
    assert best_of >= 0.8 * fitting, (best_of, fitting)


def test_a_gpts_neighbours_are_the_plan_otherwise_run() -> None:
    made = plan(gpt_profile(), local_cluster(4), PlanOptions(gpus=4, memory_bytes=60 * MIB))
    assert (len(made.stages), made.micro_batches, made.predicted.step_s) == (2, 8, pytest.approx(0.3441, rel=1e-3))
    found = {each.name: each for each in made.alternatives}
    assert len(found) <= 8
    assert list(found)[:3] == ["pure data parallelism", "sharded data parallelism", "equal split"]
    assert found["3 stages"].step_s == pytest.approx(0.3540, rel=1e-3)
    assert found["16 micro-batches"].stages == found["gpipe"].stages == "0-6:2,7-13:2"
    assert found["gpipe"].schedule == "gpipe"
    others = [each for each in made.alternatives[3:] if each.schedule in ("gpipe", "1f1b")]
    steps = [each.step_s for each in others if each.step_s is not None]
    assert steps == sorted(steps)
    assert min(steps) >= made.predicted.step_s


def test_without_recomputation_a_plan_that_needs_it_does_not_fit() -> None:
    made = plan(gpt_profile(), local_cluster(2), PlanOptions(gpus=2, memory_bytes=46 * MIB))
    assert any(stage.recompute for stage in made.stages)
    kept = next(each for each in made.alternatives if each.name == "no recomputation")
    assert (kept.infeasible or "").startswith("stage ")


def test_fewer_devices_are_not_offered_where_all_must_be_used() -> None:
    for use_all in (False, True):
        made = plan(gpt_profile(), local_cluster(3), PlanOptions(gpus=3, use_all=use_all))
        assert any(each.name == "2 devices" for each in made.alternatives) != use_all
