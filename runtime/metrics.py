"""Metrics: what a step gave, as scripts and logs are told of it: the records of all ranks, put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from autopar.formats.timeline import seconds_by_cause
from autopar.runtime.job import Job
from autopar.runtime.loss import StepRecord


@dataclass(frozen=True)
class Metrics:
    """What one step gave; on every rank alike, but for what is said to be a rank's own."""

    step: int
    """Counts from 0."""
    loss: float
    """Of the whole mini-batch."""
    gradient_norm: float | None
    """Of all gradients of the model before clipping, where it was asked for."""
    overflow: bool
    """Whether scaled gradients were not finite: nothing was updated."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """The terms of a loss that returns a mapping, and the figures under ``log``, by name."""
    loss_scale: float = 1.0
    """What losses were multiplied by before their backward (fp16)."""
    learning_rates: tuple[float, ...] = ()
    """Of this rank's groups of parameters, as the update took them; empty where it trains none."""
    outputs: Mapping[str, torch.Tensor] | None = None
    """What the model gave for the mini-batch, where it was asked for; on rank 0."""
    _tell_seconds: Callable[[], dict[str, float]] = field(default=dict, repr=False, compare=False)

    @property
    def seconds(self) -> Mapping[str, float]:
        """What this rank spent the step on, by cause, as in a report; of a GPU, waits until it is done with the step.

        Of several mini-batches that end together, the first one has the seconds of all.
        """
        return self._tell_seconds()


class MetricsSum:
    """The metrics of a mini-batch, of whose losses ranks begin to add up their parts, all at once."""

    def __init__(self, job: Job, record: StepRecord) -> None:
        """Begin to add up what a rank's record says of a mini-batch that has ended."""
        self._job, self._record = job, record
        parts = [record.loss, record.count, *(record.terms.get(name, 0.0) for name in job.terms)]
        self._sums = torch.tensor(parts, dtype=torch.float64)
        self._pending = job.transport.all_reduce(self._sums, tuple(range(len(job.plan.devices))))

    def metrics(self) -> Metrics:
        """Return them, once the sums are there."""
        self._pending.wait()
        (total, count, *terms), record = self._sums.tolist(), self._record
        loss = record.total_loss
        if loss is None:
            loss = total / count if count else total
        return Metrics(
            step=record.step,
            loss=loss,
            gradient_norm=record.gradient_norm,
            overflow=record.overflow,
            losses=dict(zip(self._job.terms, terms, strict=True)),
            loss_scale=record.scale,
            learning_rates=record.learning_rates,
            _tell_seconds=self._seconds,
        )

    def _seconds(self) -> dict[str, float]:
        loading = self._record.loading
        return seconds_by_cause(self._job.actions, self._record.times_s, () if loading is None else loading.spans_s)
