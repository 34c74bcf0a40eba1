"""Feed: a job's steps, given one mini-batch at a time by who does not know how many there will be.

In comes a rank's share of a mini-batch; out comes the record of the mini-batch that has ended. With flushes that is the
same one. Without, it is one some mini-batches before, until the pipeline is drained; the next one then fills it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopar.capture.graph import TensorSpec
from autopar.errors import UsageError
from autopar.runtime.data import Batch, check_inputs
from autopar.runtime.execute import StepRecord
from autopar.runtime.start.job import Job
from autopar.schedules.continuing import lead


@dataclass(frozen=True)
class Metrics:
    """What one step gave, on every rank alike."""

    step: int
    """Counts from 0."""
    loss: float
    """Of the whole mini-batch."""
    gradient_norm: float | None
    """Of all gradients of the model before clipping, where it was asked for."""
    overflow: bool
    """Whether scaled gradients were not finite: nothing was updated."""


class Feed:
    """Steps a job by what it is given; every rank is given as much."""

    def __init__(self, job: Job, first: int) -> None:
        """Begin with mini-batch ``first``, the pipeline being empty."""
        self._job, self._lead, self._span = job, lead(job.plan), job.plan.span
        self._start = self.given = first
        """Of ``given``: how many mini-batches there have been, counted from the run's first."""
        self._next = first - self._lead
        """The repetition that comes next."""
        self._inputs: dict[int, Batch] = {}

    @property
    def under_way(self) -> bool:
        """Whether mini-batches have begun that have not ended."""
        return self._start < self.given and self._lead > 0

    def step(self, inputs: Batch) -> list[StepRecord]:
        """Take the next mini-batch; return the records of those that have ended: none while the pipeline fills."""
        step = self.given
        self._inputs[step] = inputs
        self.given += 1
        ended = self._perform_until(self.given - self._span)
        return ended + self.drain() if step < self._job.plan.synchronous_steps else ended

    def drain(self) -> list[StepRecord]:
        """End all that have begun; return their records."""
        if not self.under_way:
            return []
        ended = self._perform_until(self.given + self._lead - 1)
        self._start, self._next = self.given, self.given - self._lead
        return ended

    def _perform_until(self, first: int) -> list[StepRecord]:
        """Perform the steps, or repetitions, whose first forward is of mini-batch ``first`` or one before."""
        ended = list[StepRecord]()
        while self._next + self._lead <= first:
            record = self._job.train(self._next, self._inputs, self.given, self._start)
            for step in range(self._next, self._next + self._span):
                self._inputs.pop(step, None)
            # There is none while the pipeline only fills.
            ended += record.every if self._next >= self._start else ()
            self._next += self._span
        if not self._lead:
            self._start = self.given
        return ended


def check_given(
    rank: int, values: Mapping[str, torch.Tensor], rows: int | None, specs: list[TensorSpec], expected_rows: int | None
) -> None:
    """Refuse what a rank was given as a batch.

    Raises:
        UsageError: it is not as planned, or lacks what the rank's stages read.
    """
    if rows is None:
        if specs:
            raise UsageError(f"was given no batch, and its stages read {', '.join(spec.name for spec in specs)}")
        return
    if expected_rows is not None and rows != expected_rows:
        raise UsageError(
            f"a batch of {rows} samples, the plan is for {expected_rows}; drop or fill up what is incomplete "
            "(DataLoader(drop_last=True)), or plan for another batch"
        )
    if rows == 0:
        raise UsageError("a batch without samples")
    check_inputs(values, specs)
