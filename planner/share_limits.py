"""Share limits: stages, widths and counts obey how many samples of a micro-batch layers take at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from autopar.errors import UsageError
from autopar.planner.candidate import CandidateStage, Family, families
from autopar.planner.costs.layers import ShareLimit
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions


class StageWithShares(Protocol):
    """A stage, as far as these limits go."""

    @property
    def first(self) -> int:
        """First layer."""

    @property
    def stop(self) -> int:
        """The layer behind the last one."""

    @property
    def shares(self) -> Sequence[float]:
        """Samples of a micro-batch that each replica takes."""


def crossed_limit(costs: CostModel, stages: Iterable[StageWithShares]) -> str | None:
    """Return what the shares of some stages do not obey; None if they may be so."""
    if not costs.share_limits:
        return None
    for stage in stages:
        for limit in costs.share_limits:
            if limit.overlaps(stage.first, stage.stop) and not limit.admits(stage.shares):
                few = min(stage.shares) < limit.least
                return f"{limit.text}, and a replica is given {min(stage.shares) if few else max(stage.shares):g}"
    return None


def limits_met(costs: CostModel, shares: Sequence[float]) -> tuple[bool, ...]:
    """Return which of all limits replicas of these shares obey."""
    return tuple(limit.admits(shares) for limit in costs.share_limits)


def runnable(costs: CostModel, options: PlanOptions) -> list[Family]:
    """Return the families that the options admit and with whose micro-batches some plan obeys all limits.

    Raises:
        UsageError: there is none.
    """
    every = families(costs.batch, options)
    if not costs.share_limits:
        return every
    found = [family for family in every if _unmet(costs, family) is None]
    if not found:
        few = max(every, key=lambda family: family.micro_batch_size)
        limit = _unmet(costs, few)
        assert limit is not None
        fewer, count = few.micro_batch_size < limit.least, few.micro_batches
        raise UsageError(
            f"{limit.text}; no plan gives it so many with {count} micro-batch{'es' if count > 1 else ''} of "
            f"{few.micro_batch_size} and {len(costs.devices)} device{'s' if len(costs.devices) > 1 else ''}: give "
            f"{'fewer' if fewer else 'more'} `micro_batches` or another `batch`"
        )
    return found


def _unmet(costs: CostModel, family: Family) -> ShareLimit | None:
    rows, devices = family.micro_batch_size, len(costs.devices)
    widest = CandidateStage(0, 1, (), costs.shares(rows, devices if costs.divisible else min(devices, rows)), 1)
    return next((each for each in costs.share_limits if rows < each.least or max(widest.shares) > each.most), None)
