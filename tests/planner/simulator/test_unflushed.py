"""Pipelines that are never flushed take as long as their order says, from fill to drain."""

from __future__ import annotations

import random
import sys

import pytest

from autopar.formats.program import UPDATE
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.costs.durations import Durations
from autopar.planner.simulator.simulate import skeleton
from autopar.planner.simulator.unflushed import CYCLE, mini_batches, pipeline_times, trace_unflushed
from autopar.schedules.expand import expand
from oracles.timetable import StageTimes, update_ends


def drawn(seed: int) -> tuple[list[StageTimes], list[int], int]:
    draw = random.Random(seed)
    count = draw.randint(1, 4)
    stages = [
        StageTimes(
            *(draw.uniform(0.5, 2.0), draw.uniform(0.5, 4.0), draw.choice([0.0, 0.3])),
            *(draw.choice([0.0, 0.1, 1.5]), draw.choice([0.0, 0.1, 1.5])),
        )
        for _ in range(count)
    ]
    depths = [1]
    for _ in range(count - 1):
        depths.insert(0, depths[0] + draw.randint(0, 2))
    return stages, depths, draw.randint(1, 4)


@pytest.mark.parametrize("seed", range(40))
def test_updates_end_when_the_order_says(seed: int) -> None:
    sys.setrecursionlimit(100_000)
    stages, depths, micro_batches = drawn(seed)
    last = len(stages) - 1
    candidate = Candidate(
        micro_batches,
        1,
        "1f1b",
        tuple(CandidateStage(at, at + 1, (at,), (1,), depth) for at, depth in enumerate(depths)),
    )
    plan = skeleton(candidate, [(at, at + 1, True) for at in range(last)], ())
    plan = plan.model_copy(update={"weight_policy": "stash"})
    messages = {(at, at + 1): stages[at].forth_s for at in range(last)}
    messages |= {(at + 1, at): stages[at + 1].back_s for at in range(last)}
    times = Durations(
        0.25,
        stage=list(range(len(stages))),
        forward_s=[each.forward_s for each in stages],
        backward_s=[each.backward_s for each in stages],
        exposed_s=[0.0] * len(stages),
        reduce_s=[0.0] * len(stages),
        update_s=[each.update_s for each in stages],
        message_s=messages,
    )
    timeline = trace_unflushed(plan, expand(plan), times)
    own = [each._replace(update_s=each.update_s + 0.25) for each in stages]
    expected = update_ends(own, depths, micro_batches, mini_batches(plan))
    for stage, ends in enumerate(expected):
        found = [each.end_s for each in timeline if each.rank == stage and each.action.kind == UPDATE]
        assert found == pytest.approx(ends, rel=1e-12)
    how = pipeline_times(timeline, plan)
    busiest = max(micro_batches * (each.forward_s + each.backward_s) + each.update_s for each in own)
    # What is behind the mean over a cycle is not yet what it will be for ever.
    assert how.period_s >= busiest * (1 - 1e-9)
    assert how.fill_s + how.period_s * (mini_batches(plan) - CYCLE) <= timeline.end_s
