"""Run: the steps of one rank, and what was seen of them."""

from __future__ import annotations

import time

import torch

from autopar.ranks.context import RankContext
from autopar.runtime.clock import clock_of
from autopar.runtime.execute import StepRecord
from autopar.runtime.job import Job
from autopar.runtime.laps import Laps
from autopar.runtime.result import StepResults
from autopar.runtime.watches import Watches

__all__ = ["Run"]

RECORDED_STEPS = 32
"""Of how many last steps the times of all actions are kept."""


class Run:
    """Steps a rank's job, tells whoever started the rank of every loss, and keeps what the report is made of."""

    def __init__(self, job: Job, context: RankContext, steps: int, *, time_layers: bool) -> None:
        """Prepare, together with all ranks, to train for some steps.

        Args:
            job: the rank's.
            context: the ranks.
            steps: how many mini-batches are trained.
            time_layers: whether layers are timed in the first steps.
        """
        self._job, self._context, self._steps = job, context, steps
        self._watches = Watches(job, context.device, steps, time_layers)
        self._origin_s = _common_origin(context)
        self._laps = Laps(self._origin_s, lags=clock_of(context.device).lags)
        self._records: list[StepRecord] = []

    def perform(self) -> None:
        """Train.

        Raises:
            AutoparError: an action failed; names it.
        """
        for step in range(self._steps):
            self._step(step)
        self._job.finish()
        self._laps.finish()

    def results(self) -> StepResults:
        """Return what the steps gave."""
        return StepResults(
            loss=[record.loss for record in self._records],
            count=[record.count for record in self._records],
            starts_s=self._laps.starts_s,
            ends_s=self._laps.ends_s,
            times_s={
                str(step): [(start - self._origin_s, end - self._origin_s) for start, end in record.times_s]
                for step, record in enumerate(self._records)
                if record.times_s
            },
            gradient_norm=[record.gradient_norm for record in self._records],
            overflowed=[record.overflowed for record in self._records],
            layers_s=self._watches.layers_s(),
            forward_flops=self._watches.forward_flops(),
            peak_flops_per_s=self._watches.peak_flops_per_s,
        )

    def _step(self, step: int) -> None:
        self._watches.begin_step(step)
        self._laps.begin()
        record = self._job.step(step, more=step + 1 < self._steps)
        self._laps.end(record)
        self._watches.end_step(step, record)
        self._records.append(record)
        if step >= RECORDED_STEPS:
            self._records[step - RECORDED_STEPS].times_s.clear()
        if any(stage.loss for stage in self._job.stages.values()):
            self._context.report({"step": step, "loss": record.loss, "count": record.count})


def _common_origin(context: RankContext) -> float:
    """Return a moment that all ranks agree on, on this rank's clock.

    Ranks of one host share a clock; those of several agree to within the time that leaving a barrier takes.
    """
    context.barrier()
    origin = torch.tensor([time.perf_counter()], dtype=torch.float64)
    if context.local_size == context.size:
        context.broadcast(origin)
    return float(origin)
