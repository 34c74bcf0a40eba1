"""Programs count versions back from the newest weights, so that every action sees what its policy's rule says."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import get_args

import pytest

from autopar.formats.plan import WeightPolicy
from autopar.formats.program import BACKWARD, BEGIN_SUM, FORWARD, UPDATE
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.simulator.simulate import skeleton
from autopar.policies import POLICIES, kept_versions, stage_depths
from autopar.policies.predict import updates_ahead
from autopar.schedules.continuing import Repetition, depths_of, lead, repetition
from autopar.schedules.one_forward_one_backward import warmups
from oracles.unflushed import RULES, SAME_BACKWARD, Question


def test_plans_and_rules_know_the_same_policies() -> None:
    assert set(get_args(WeightPolicy)) - {"sync"} == set(POLICIES) == set(RULES)


@pytest.mark.parametrize("policy", SAME_BACKWARD)
@pytest.mark.parametrize("seed", range(20))
def test_every_forward_and_backward_sees_the_rules_version(seed: int, policy: str) -> None:
    draw = random.Random(seed)
    depths = sorted((draw.randint(1, 6) for _ in range(draw.randint(1, 4))), reverse=True)
    micro_batches = max(draw.randint(1, 5), POLICIES[policy].least_micro_batches(depths[0]))
    stages = tuple(CandidateStage(at, at + 1, (at,), (1,), depth) for at, depth in enumerate(depths))
    plan = skeleton(Candidate(micro_batches, 1, "1f1b", stages), (), ())
    plan = plan.model_copy(update={"weight_policy": policy})
    rule = RULES[policy](depths, micro_batches)
    for stage in range(len(depths)):
        updates, most, seen = 0, 0, {}
        for number in range(-lead(plan), 12):
            here = Repetition(number, micro_batches, 12)
            for kind, micro_batch, distance in repetition(plan, stage):
                step, index = here.place(micro_batch) if kind != UPDATE else (number, 0)
                if not 0 <= step < 12 or kind == BEGIN_SUM:
                    continue
                if kind == UPDATE:
                    updates += 1
                    continue
                version = max(0, updates - distance)
                most = max(most, updates - version)
                assert version == rule(Question(step, index, stage))
                if kind == FORWARD:
                    seen[step, index] = version
                else:
                    assert kind == BACKWARD
                    assert seen.pop((step, index)) == version
        assert (updates, seen) == (12, {})
        assert most + 1 == kept_versions(POLICIES[policy], depths_of(plan, stage))


def test_xpipes_constants_are_halves_rounded_up_and_seldom_what_is_counted() -> None:
    agreeing, places = [0, 0], 0
    for stages in range(2, 9):
        for micro_batches in range(1, 9):
            depths = warmups(stages, 1, stages)["PA"]
            counted = stage_depths(POLICIES["predict"], depths, micro_batches)
            given = stage_depths(POLICIES["predict"], depths, micro_batches, ahead="xpipe")
            for stage in range(stages):
                exact = (
                    (stages + micro_batches - Fraction(stage, 2) - 2) / micro_batches,
                    Fraction(micro_batches + stage // 2 - 1, micro_batches),
                )
                own, other = updates_ahead(given[stage]), updates_ahead(counted[stage])
                assert own == tuple(math.floor(each + Fraction(1, 2)) for each in exact)
                assert other == (math.ceil((depths[stage] - 1) / micro_batches), 0)
                assert POLICIES["predict"].buffers(given[stage]) == sum(each > 0 for each in own)
                agreeing = [sum_ + (one == two) for sum_, one, two in zip(agreeing, own, other, strict=True)]
                places += 1
    # The docstring of autopar.policies.predict says so.
    assert [f"{100 * each / places:.0f}" for each in agreeing] == ["34", "5"]


def test_what_backwards_see_is_made_behind_every_update_where_it_is_not_the_newest() -> None:
    stages = tuple(CandidateStage(at, at + 1, (at,), (1,), depth) for at, depth in enumerate((3, 2, 1)))
    plan = skeleton(Candidate(2, 1, "1f1b", stages), (), ()).model_copy(update={"weight_policy": "predict"})
    for ahead, made in (("counted", [["P"], ["P"], []]), ("xpipe", [["C", "P"], ["C", "P"], ["C", "P"]])):
        asked = plan.model_copy(update={"ahead": ahead})
        kinds = [[each.kind for each in repetition(asked, stage)] for stage in range(3)]
        assert [sorted(set(each) & {"P", "C"}) for each in kinds] == made
        assert all(each[each.index("U") + 1] == "C" for each in kinds if "C" in each)
