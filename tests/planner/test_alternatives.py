"""Alternatives near the chosen plan: what the search met, against all plans."""

from __future__ import annotations

import re

import pytest

from autopar.formats.plan import Plan
from autopar.formats.prediction import Alternative
from autopar.planner import PlanOptions, plan
from autopar.planner.costs.model import CostModel
from autopar.planner.search.judge import Best
from autopar.planner.simulator.simulate import Simulator
from oracles.exhaustive import everything
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile

MIB = 2**20


def _numbers(made: Plan) -> dict[int, Alternative]:
    """The alternatives that are the best of a number of stages."""
    found = {}
    for each in made.alternatives:
        match = re.fullmatch(r"(\d+) stages?", each.name)
        if match:
            found[int(match[1])] = each
    return found


@pytest.mark.slow
def test_of_numbers_of_stages_near_the_plans_the_best_are_met() -> None:
    fitting = best_of = 0
    for seed in range(70):
        profile = random_profile(seed, most_layers=4, batches=(2, 4), skips=0.0)
        cluster = random_cluster(seed, 3)
        ample = CostModel(profile, cluster, PlanOptions(gpus=3))
        least = min(max(ample.peak_bytes(candidate)) for candidate in everything(ample, PlanOptions()))
        options = PlanOptions(gpus=3, memory_bytes=max(1, int(least * (1.02, 1.3, 3.0)[seed % 3])), exact=True)
        made = plan(profile, cluster, options)
        simulator = Simulator(CostModel(profile, cluster, options))
        every = list(everything(simulator.costs, options))
        for count, each in _numbers(made).items():
            oracle = Best()
            for candidate in every:
                if len(candidate.stages) == count:
                    oracle.judge(simulator, candidate)
            assert oracle.fastest is not None, f"seed {seed}"
            assert each.step_s is not None
            assert each.step_s >= oracle.step_s * (1 - 1e-9), f"seed {seed}"
            fitting += 1
            best_of += each.step_s <= oracle.step_s * 1.05
    assert fitting >= 10
    # They are what was met, and not looked for.
    assert best_of >= 0.6 * fitting, (best_of, fitting)


def test_a_gpts_neighbours_are_faster_first_and_few() -> None:
    made = plan(gpt_profile(), local_cluster(4), PlanOptions(gpus=4, memory_bytes=60 * MIB, shard="none"))
    found = {each.name: each for each in made.alternatives}
    assert len(found) <= 8
    assert list(found)[:3] == ["pure data parallelism", "sharded data parallelism", "equal split"]
    steps = [each.step_s for each in made.alternatives[3:] if each.step_s is not None]
    assert len(steps) == len(made.alternatives) - 3 >= 3
    assert steps == sorted(steps)


def test_what_an_option_excludes_is_marked() -> None:
    made = plan(gpt_profile(), local_cluster(4), PlanOptions(gpus=4, shard="none"))
    found = {each.name: each.excluded for each in made.alternatives}
    assert found["sharded data parallelism"] == "`shard='none'`"
    assert found["pure data parallelism"] is None


def test_fewer_devices_are_not_offered_where_all_must_be_used() -> None:
    made = plan(gpt_profile(), local_cluster(3), PlanOptions(gpus=3, use_all=True))
    assert not any(re.fullmatch(r"\d devices?", each.name) for each in made.alternatives)
