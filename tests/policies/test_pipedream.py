"""PipeDream's policies see the versions of their papers, and keep as many."""

from __future__ import annotations

import random

import pytest

from autopar.formats.program import BEGIN_SUM, FORWARD, UPDATE, Action
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.simulator.simulate import skeleton
from autopar.policies import POLICIES, StageDepths, kept_versions, stage_depths
from autopar.schedules.continuing import Repetition, lead, repetition


@pytest.mark.parametrize("depth", range(1, 5))
@pytest.mark.parametrize("micro_batches", range(3, 7))
def test_every_policy_sees_the_version_of_its_papers_formula(depth: int, micro_batches: int) -> None:
    names = ("stash", "vertical-sync", "2bw")
    stash, synced, buffered = (stage_depths(POLICIES[name], [4, depth], micro_batches)[1] for name in names)
    for micro_batch in range(40):
        # Weights are updated once the backward of a mini-batch's last micro-batch is done.
        done = max(0, micro_batch - depth + 1)
        assert max(0, POLICIES["stash"].forward_version(stash, micro_batch)) == done // micro_batches
        done = max(0, micro_batch - 4 + 1)
        assert max(0, POLICIES["vertical-sync"].forward_version(synced, micro_batch)) == done // micro_batches
        assert POLICIES["2bw"].forward_version(buffered, micro_batch) == micro_batch // micro_batches - 1
        for name, stage in (("stash", stash), ("vertical-sync", synced), ("2bw", buffered)):
            rule = POLICIES[name]
            assert rule.backward_version(stage, micro_batch) == rule.forward_version(stage, micro_batch)
    assert kept_versions(POLICIES["stash"], stash) == 1 + -(-(depth - 1) // micro_batches)
    assert kept_versions(POLICIES["2bw"], buffered) == 1 + (depth > 1)


def test_the_late_update_of_two_buffers_is_there_before_the_next_but_one_mini_batch() -> None:
    """By counting what a stage does: forwards run ``depth`` micro-batches ahead of backwards."""
    for depth, micro_batches in ((each, count) for count in range(2, 7) for each in range(1, count + 2)):
        lag = POLICIES["2bw"].lag(StageDepths(depth, depth, micro_batches))
        last_backward, next_but_one = micro_batches - 1, 2 * micro_batches
        # The forward of micro-batch m comes behind the backward of m - depth.
        assert 0 <= lag <= max(0, next_but_one - depth - last_backward)


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
