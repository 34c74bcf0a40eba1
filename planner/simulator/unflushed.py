"""Unflushed: a pipeline that is never flushed, simulated from its fill to its drain; and its period in between."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from autopar.formats.plan import Plan
from autopar.formats.program import BACKWARD, FORWARD, UPDATE, Program
from autopar.formats.timeline import Timeline
from autopar.planner.costs.communication import Traffic
from autopar.planner.costs.model import Durations
from autopar.planner.simulator.simulate import trace
from autopar.schedules.continuing import lead, written_out

CYCLE = 12
"""Mini-batches that the period is the mean of, at least; what repeats after 2, 3, 4 or 6 of them is met."""


class PipelineTimes(NamedTuple):
    """How a pipeline that is never flushed goes on."""

    period_s: float
    """From one mini-batch to the next, once it is filled."""
    fill_s: float
    """From the beginning to the first backward of the last stage."""
    drain_s: float
    """From the end of the first stage's last forward to the end."""


def cycle(plan: Plan) -> int:
    """Return how many mini-batches the period of a plan is the mean of: whole repetitions."""
    return -(-CYCLE // plan.span) * plan.span


def mini_batches(plan: Plan) -> int:
    """Return how many mini-batches are simulated: the pipeline fills, goes on for two cycles, and drains."""
    return 2 * lead(plan) + 2 * cycle(plan)


def trace_unflushed(plan: Plan, program: Program, times: Durations, traffic: Traffic | None = None) -> Timeline:
    """Return the timeline of a plan with a weight policy, from its fill to its drain; micro-batches count through."""
    written = written_out(program, plan.micro_batches, -lead(plan), mini_batches(plan))
    return trace(written, without_flushes(times), traffic, plan.micro_batches)


def without_flushes(times: Durations) -> Durations:
    """Return durations of which every update takes what a step takes beside its actions."""
    update_s = [seconds + times.overhead_s for seconds in times.update_s]
    return replace(times, overhead_s=0.0, update_s=update_s, prepare_s=times.update_s)


def pipeline_times(timeline: Timeline, plan: Plan) -> PipelineTimes:
    """Return the period, fill and drain of what :func:`trace_unflushed` has made."""
    last_stage, updates = len(plan.stages) - 1, defaultdict[tuple[int, int], list[float]](list)
    for event in timeline:
        if event.action.kind == UPDATE:
            updates[event.action.stage, event.rank].append(event.end_s)
    # Behind it, the first stage has fewer forwards than a full pipeline's. Without gradients that go back, a stage may
    # be faster than those behind it for as long as there are samples: the slowest sets the pace.
    ended, several = mini_batches(plan) - lead(plan), cycle(plan)
    period_s = max(
        _between(sorted(ends), ended, several, plan.stages[stage].turning) / several
        for (stage, _), ends in updates.items()
    )
    places = [(event.action.kind, event.action.stage, event) for event in timeline]
    fill_s = min(event.start_s for kind, stage, event in places if (kind, stage) == (BACKWARD, last_stage))
    drained_s = max(event.end_s for kind, stage, event in places if (kind, stage) == (FORWARD, 0))
    return PipelineTimes(period_s, fill_s, timeline.end_s - drained_s)


def _between(updates_s: list[float], count: int, several: int, turning: int) -> float:
    """Return what the last ``several`` of ``count`` mini-batches took, given when updates of ``turning`` ended."""
    return updates_s[count // turning - 1] - updates_s[(count - several) // turning - 1]
