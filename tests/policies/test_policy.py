"""Programs count versions back from the newest weights, so that every action sees what its policy's rule says."""

from __future__ import annotations

import random
from typing import get_args

import pytest

from autopar.formats.plan import WeightPolicy
from autopar.formats.program import BACKWARD, BEGIN_SUM, FORWARD, UPDATE
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.simulator.simulate import skeleton
from autopar.policies import POLICIES, kept_versions
from autopar.schedules.continuing import Repetition, depths_of, lead, repetition
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
