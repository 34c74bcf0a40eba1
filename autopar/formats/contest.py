"""Contests: plans of one model that have trained the same data from the same first weights, seed by seed.

In: what every run measured. Out: rows, by which plans are compared: how far each came, how long a mini-batch took, and
when it reached a loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from statistics import fmean, median
from typing import NamedTuple

from autopar.formats.document import Bytes, Record, Seconds, Text
from autopar.formats.plan import Plan

MEAN_OF = 10
"""Mini-batches over which a loss is averaged where it is compared."""


class ContestResult(Record):
    """What a run of one plan with one seed measured."""

    loss: tuple[float, ...]
    """Of every mini-batch, as far as it is a number."""
    step_s: Seconds | None = None
    """From one mini-batch to the next, median; null where the run failed."""
    peak_bytes: Bytes | None = None
    """Of the rank that held most."""
    diverged: Text | None = None
    """What became no number, where something did."""
    failure: Text | None = None
    """Why it failed of anything else."""

    @property
    def trouble(self) -> str | None:
        """Why it came to no good end: it failed, or its loss is no number, or above that of its beginning."""
        if self.failure is not None or self.diverged is not None:
            return self.failure or f"diverged after {len(self.loss)} mini-batches: {self.diverged}"
        first, last = fmean(self.loss[:MEAN_OF]), mean_loss(self.loss)
        if len(self.loss) >= 2 * MEAN_OF and last > first:
            return f"learned nothing: its loss rose from {first:.4g} to {last:.4g}"
        return None

    def steps_to(self, loss: float) -> int | None:
        """Return after how many mini-batches a loss is reached; None: never."""
        counts = range(1, len(self.loss) + 1)
        return next((count for count in counts if mean_loss(self.loss[:count]) <= loss), None)


def mean_loss(losses: Sequence[float]) -> float:
    """Return the mean of the last losses.

    >>> mean_loss([5.0, *[1.0] * 10])
    1.0
    """
    return fmean(losses[-MEAN_OF:]) if losses else inf


class Contestant(NamedTuple):
    """Who takes part: a plan, or why there is none."""

    name: str
    """What tells it from others."""
    plan: Plan | None = None
    """None where there is none."""
    stages: str | None = None
    """In the form that ``autopar plan --stages`` takes."""
    refusal: str | None = None
    """Why there is no plan, or it cannot be trained here."""
    is_plain: bool = False
    """Whether one process trains it, by the model's own forward, and no rank."""


class ContestRow(NamedTuple):
    """A contestant and its results, seed by seed."""

    contestant: Contestant
    """Who it is."""
    results: tuple[ContestResult, ...]
    """In the order of seeds; none where it could not begin."""
    emulated: bool = False
    """Whether its mini-batch takes as long as it is simulated of another cluster."""

    @property
    def trouble(self) -> str | None:
        """Why it cannot be trained, or what happened to the first seed that came to no good end."""
        return self.contestant.refusal or next(filter(None, (each.trouble for each in self.results)), None)

    @property
    def predicted_s(self) -> float | None:
        """Seconds from one mini-batch to the next, as simulated."""
        return None if self.contestant.plan is None else self.contestant.plan.predicted.step_s

    @property
    def measured_s(self) -> float | None:
        """The same as measured, median over seeds; None where nothing was, or another cluster is emulated."""
        known = [each.step_s for each in self.results if each.step_s is not None]
        return median(known) if known and not self.emulated else None

    @property
    def period_s(self) -> float | None:
        """Seconds by which it is compared."""
        return self.predicted_s if self.emulated else self.measured_s

    @property
    def predicted_bytes(self) -> int | None:
        """Of the rank that is to hold most."""
        plan = self.contestant.plan
        return None if plan is None else max(plan.predicted.peak_bytes, default=None)

    @property
    def measured_bytes(self) -> int | None:
        """Of the rank that held most, over all seeds; None like :attr:`measured_s`."""
        known = [each.peak_bytes for each in self.results if each.peak_bytes is not None]
        return None if self.emulated else max(known, default=None)

    @property
    def versions(self) -> int | None:
        """Most versions of its weights that a stage keeps."""
        plan = self.contestant.plan
        if plan is None:
            return None
        return max(plan.policy.kept_versions(each) for each in plan.depths)

    @property
    def delay(self) -> float | None:
        """Most updates from a forward to its own, of any stage, in the mean of a mini-batch."""
        plan = self.contestant.plan
        return None if plan is None else max(map(plan.policy.delay, plan.depths))

    @property
    def losses(self) -> tuple[float, ...]:
        """By seed, the mean of the last mini-batches' losses; infinite where the run came to no good end."""
        return tuple(inf if each.trouble else mean_loss(each.loss) for each in self.results)

    @property
    def spread(self) -> tuple[float, float, float] | None:
        """The mean of :attr:`losses`, their least and their largest; None where it came to no good end."""
        return None if self.trouble else (fmean(self.losses), min(self.losses), max(self.losses))

    def seconds_to(self, loss: float) -> float | None:
        """Return the seconds until a loss is reached, median over seeds; None where one of them never does."""
        steps = [each.steps_to(loss) for each in self.results]
        if self.trouble or self.period_s is None or None in steps:
            return None
        return median(each for each in steps if each is not None) * self.period_s

    def as_dict(self, loss: float | None = None) -> dict[str, object]:
        """Return it as JSON has it, with when it reached a loss."""
        plan = self.contestant.plan
        return {
            "name": self.contestant.name,
            "trouble": self.trouble,
            "stages": self.contestant.stages,
            "schedule": None if plan is None else plan.schedule,
            "policy": None if plan is None else plan.weight_policy,
            "micro_batches": None if plan is None else plan.micro_batches,
            "loss": [None if each == inf else each for each in self.losses],
            "seconds_to_loss": None if loss is None else self.seconds_to(loss),
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "predicted_bytes": self.predicted_bytes,
            "measured_bytes": self.measured_bytes,
            "versions": self.versions,
            "delay": self.delay,
            "losses": [list(each.loss) for each in self.results],
        }


class RunComparison(NamedTuple):
    """Plans of one model, compared by running them."""

    model: str
    """Where its code is."""
    rows: tuple[ContestRow, ...]
    """First what could not be trained, failed or diverged; then by seconds to ``loss``, or of a mini-batch."""
    loss: float | None = None
    """The loss that they are ordered by."""
    cluster: str | None = None
    """What is emulated; none: this host was measured."""
    notes: tuple[str, ...] = ()
    """What a reader should know."""


def ordered(rows: Iterable[ContestRow], loss: float | None) -> tuple[ContestRow, ...]:
    """Return rows in the order of :class:`RunComparison`; what never reaches the loss is last, the lowest first."""

    def place(row: ContestRow) -> tuple[bool, float, float]:
        if row.spread is None or loss is None:
            return row.trouble is None, row.period_s or 0.0, 0.0
        reached_s = row.seconds_to(loss)
        return True, inf if reached_s is None else reached_s, row.spread[0]

    return tuple(sorted(rows, key=place))
