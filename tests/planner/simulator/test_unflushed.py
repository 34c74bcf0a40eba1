"""Pipelines that are never flushed take as long as their order says, from fill to drain."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from math import ceil

import pytest

from autopar.formats.program import UPDATE
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.costs.model import Durations
from autopar.planner.simulator.simulate import skeleton
from autopar.planner.simulator.unflushed import CYCLE, mini_batches, pipeline_times, trace_unflushed
from autopar.schedules.expand import expand
from oracles.timetable import StageTimes, update_ends


@pytest.fixture(autouse=True)
def _deep_recursion() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    yield
    sys.setrecursionlimit(before)


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


@pytest.mark.parametrize("seed", range(60))
def test_updates_end_when_the_order_says(seed: int) -> None:
    stages, depths, micro_batches = drawn(seed)
    last = len(stages) - 1
    policy, lags, shared = "stash", [0] * len(stages), []
    if seed % 3 == 1 and last:
        shared = sorted(random.Random(seed).sample(range(len(stages)), 2))
        lags[shared[1]] = ceil((depths[shared[0]] - depths[shared[1]]) / 2)
    if seed % 3 == 2:
        policy, micro_batches = "2bw", max(micro_batches, depths[0] + 1)
        # As late as can be, and no later than the mini-batch's sums and all micro-batches of the next.
        begins = [micro_batches - depths[0] + (depths[0] - depth) // 2 for depth in depths]
        lags = [
            min(micro_batches - depth + 1, micro_batches - 1 + begun)
            for depth, begun in zip(depths, begins, strict=True)
        ]
    candidate = Candidate(
        micro_batches,
        1,
        "1f1b",
        tuple(CandidateStage(at, at + 1, (at,), (1,), depth) for at, depth in enumerate(depths)),
    )
    plan = skeleton(candidate, [(at, at + 1, True) for at in range(last)], [shared] if shared else [])
    plan = plan.model_copy(update={"weight_policy": policy})
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
        tied_s=[0.7] if shared else [],
    )
    timeline = trace_unflushed(plan, expand(plan), times)
    own = [each._replace(update_s=each.update_s + 0.25) for each in stages]
    expected = update_ends(own, depths, micro_batches, mini_batches(plan), lags, shared, 0.7)
    for stage, ends in enumerate(expected):
        found = [each.end_s for each in timeline if each.rank == stage and each.action.kind == UPDATE]
        assert found == pytest.approx(ends, rel=1e-12)
    how = pipeline_times(timeline, plan)
    busiest = max(micro_batches * (each.forward_s + each.backward_s) + each.update_s for each in own)
    # What is behind the mean over a cycle is not yet what it will be for ever.
    assert how.period_s >= busiest * (1 - 1e-9)
    assert how.fill_s + how.period_s * (mini_batches(plan) - CYCLE) <= timeline.end_s


@pytest.mark.parametrize("policy", ["stash", "2bw"])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("deep", [False, True])
def test_nobody_waits_for_the_sum_of_a_shared_parameter(policy: str, count: int, deep: bool) -> None:
    """Everything takes one slot: with the sums, a mini-batch takes no longer than without."""
    depths = [2 * (count - at) - 1 if deep else count - at for at in range(count)]
    micro_batches = depths[0] if policy == "2bw" else 1
    stages = tuple(CandidateStage(at, at + 1, (at,), (1,), depth) for at, depth in enumerate(depths))
    candidate, period_s = Candidate(micro_batches, 1, "1f1b", stages), {}
    for shared in ([], [[0, count - 1]]):
        plan = skeleton(candidate, [(at, at + 1, True) for at in range(count - 1)], shared)
        plan = plan.model_copy(update={"weight_policy": policy})
        ones, zeros = [1.0] * count, [0.0] * count
        pairs = {pair: 0.0 for at in range(count - 1) for pair in ((at, at + 1), (at + 1, at))}
        times = Durations(
            0.0,
            stage=list(range(count)),
            forward_s=ones,
            backward_s=ones,
            exposed_s=zeros,
            reduce_s=zeros,
            update_s=zeros,
            message_s=pairs,
            tied_s=[0.0] * len(shared),
        )
        period_s[bool(shared)] = pipeline_times(trace_unflushed(plan, expand(plan), times), plan).period_s
    assert period_s[True] == pytest.approx(period_s[False])
