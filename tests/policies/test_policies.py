"""Programs count versions back from the newest weights, so that every action sees what its policy's rule says."""

from __future__ import annotations

import random
from typing import get_args

import pytest

from autopar.formats.plan import WeightPolicy
from autopar.formats.program import BACKWARD, BEGIN_SUM, FORWARD, UPDATE, Action
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.simulator.simulate import skeleton
from autopar.policies import POLICIES, kept_versions
from autopar.schedules.continuing import Repetition, depths_of, lead, repetition
from oracles.unflushed import RULES, SAME_BACKWARD, Question


def test_plans_and_rules_know_the_same_policies() -> None:
    assert set(get_args(WeightPolicy)) - {"sync"} == set(POLICIES) == set(RULES)


@pytest.mark.parametrize("seed", range(30))
def test_replicas_in_turn_see_the_rules_version(seed: int) -> None:
    draw = random.Random(seed)
    stages, first = [], 0
    for at in range(draw.randint(1, 3)):
        width, turning = draw.randint(1, 4), draw.random() < 0.7
        devices, division = tuple(range(first, first + width)), "round-robin" if turning else "split"
        shares = (1.0,) * width if turning else (1 / width,) * width
        stages.append(CandidateStage(at, at + 1, devices, shares, draw.randint(1, 4), division=division))  # type: ignore[arg-type]
        first += width
    plan = skeleton(Candidate(1, 1, "1f1b", tuple(stages)), (), ()).model_copy(update={"weight_policy": "stash"})
    start, stop = draw.randint(0, 3), draw.randint(8, 20)
    for stage, (placed, replica) in enumerate((each, replica) for each in stages for replica in range(each.turning)):
        index, updates, met, seen = stages.index(placed), 0, set(), {}
        for number in range(start - lead(plan), stop, plan.span):
            here = Repetition(number, 1, stop, start, plan.span)
            for kind, micro_batch, distance in repetition(plan, index, replica):
                action = Action(kind, index, micro_batch, version=distance)
                if not here.has(action) or kind == BEGIN_SUM:
                    continue
                step, count = here.step_of(action), (here.step_of(action) - start) // placed.turning
                if kind == UPDATE:
                    assert updates == count
                    met |= set(here.mini_batches_of(action, placed.turning))
                    updates += 1
                    continue
                assert (step - start) % placed.turning == replica, stage
                version = max(0, updates - distance)
                assert version == max(0, count - placed.warmup + 1)
                assert kind == FORWARD or seen.pop(step) == version
                if kind == FORWARD:
                    seen[step] = version
        assert (met, seen) == (set(range(start, stop)), {})


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
