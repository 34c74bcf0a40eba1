"""Outcome: what the ranks bring back becomes a report, a timeline and the index of the trained weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import torch

from autopar.formats.document import least_certain
from autopar.formats.plan import Plan
from autopar.formats.program import BACKWARDS, FORWARD, UPDATE, Program
from autopar.formats.report import RankTimes, Report, StepTimes
from autopar.formats.timeline import Timeline
from autopar.ranks.context import backend_of
from autopar.runtime import weights
from autopar.runtime.saving import shard_name
from autopar.runtime.worker import RankResult

__all__ = ["Outcome", "loss_of", "outcome_of", "write_weights_index"]


@dataclass(frozen=True)
class Outcome:
    """What a training run gives."""

    report: Report
    timeline: Timeline
    """The actions of a step of median length."""


def outcome_of(
    plan: Plan,
    program: Program,
    results: Sequence[RankResult],
    initial_weights: str,
    notes: Sequence[str] = (),
) -> Outcome:
    """Put the ranks' results, in rank order, together."""
    lengths = _step_lengths(results)
    steady = lengths[1:] or lengths
    typical = median(steady)
    recorded = [int(step) for step in results[0]["times_s"]]
    chosen = min(recorded, key=lambda step: (abs(lengths[step] - typical), -step))
    timeline = _timeline(program, results, chosen)
    report = Report(
        model=plan.model.source,
        plan_sha256=hashlib.sha256(plan.dumps().encode()).hexdigest(),
        device=plan.device_type,
        backend=backend_of(plan.device_type),
        torch=torch.__version__,
        ranks=len(results),
        steps=len(lengths),
        loss=tuple(_losses(results)),
        step_s=StepTimes(median=typical, p10=_quantile(steady, 0), p90=_quantile(steady, 8)),
        predicted_step_s=plan.predicted.step_s,
        error=plan.predicted.step_s / typical - 1,
        predicted_compute=least_certain(plan.predicted.compute),
        predicted_communication=plan.predicted.communication,
        samples_per_s=plan.batch / typical,
        peak_bytes=tuple(result["peak_bytes"] for result in results),
        peak_kind="allocated" if plan.device_type == "cuda" else "resident",
        bubble=timeline.bubble(),
        rank_times=tuple(_rank_times(timeline, result, typical) for result in results),
        initial_weights=initial_weights,
        gradient_norm=tuple(results[0]["gradient_norm"]) if any(results[0]["gradient_norm"]) else (),
        overflows=sum(results[0]["overflowed"]),
        notes=tuple(notes),
    )
    return Outcome(report, timeline)


def loss_of(parts: Sequence[tuple[float, float]]) -> float:
    """Return a mini-batch's loss from the ranks' parts: (part of the mean, 0), or (sum, count).

    >>> loss_of([(0.5, 0), (0.25, 0)]), loss_of([(6.0, 4), (2.0, 4)])
    (0.75, 1.0)
    """
    total, count = sum(part for part, _ in parts), sum(count for _, count in parts)
    return total / count if count else total


def write_weights_index(plan: Plan, results: Sequence[RankResult], folder: Path) -> None:
    """Write the index of the trained weights, after all ranks have written theirs."""
    stages = len(plan.stages)
    files = {
        shard_name(int(stage), stages): names
        for result in results
        if result["replica"] == 0
        for stage, names in result["saved"].items()
    }
    weights.write_index(folder, files)


def _step_lengths(results: Sequence[RankResult]) -> list[float]:
    """A step lasts from the end of the one before it, on the slowest rank, to its own end there."""
    ends = [max(moments) for moments in zip(*(result["ends_s"] for result in results), strict=True)]
    begin = min(result["starts_s"][0] for result in results)
    return [end - before for before, end in zip([begin, *ends], ends, strict=False)]


def _losses(results: Sequence[RankResult]) -> list[float]:
    steps = range(len(results[0]["loss"]))
    return [loss_of([(result["loss"][step], result["count"][step]) for result in results]) for step in steps]


def _quantile(values: Sequence[float], index: int) -> float:
    return quantiles(values, n=10, method="inclusive")[index] if len(values) > 1 else values[0]


def _timeline(program: Program, results: Sequence[RankResult], step: int) -> Timeline:
    times = [result["times_s"][str(step)] for result in results]
    begin = min(moments[0][0] for moments in times)
    timeline = Timeline("measured")
    for rank, actions in enumerate(program.ranks):
        for action, (start, end) in zip(actions, times[rank], strict=True):
            timeline.add(rank, action, start - begin, end - begin)
    return timeline


def _rank_times(timeline: Timeline, result: RankResult, step_s: float) -> RankTimes:
    mine = [event for event in timeline if event.rank == result["rank"]]
    compute = sum(event.end_s - event.start_s for event in mine if event.action.kind in (FORWARD, *BACKWARDS))
    update = sum(event.end_s - event.start_s for event in mine if event.action.kind == UPDATE)
    return RankTimes(
        rank=result["rank"],
        stages=tuple(result["stages"]),
        replica=result["replica"],
        compute_s=compute,
        update_s=update,
        waiting_s=max(0.0, step_s - compute - update),
    )
