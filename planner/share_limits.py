"""Share limits: how many samples of a micro-batch a layer takes at once, which stages, widths and counts obey."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from autopar.errors import UsageError
from autopar.formats.profile import Profile
from autopar.planner.candidate import Family, Placed, families
from autopar.planner.options import PlanOptions

if TYPE_CHECKING:
    from autopar.planner.costs.model import CostModel


class Shared(Protocol):
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


class ShareLimit(NamedTuple):
    """What some layers take."""

    least: int
    most: float
    layers: tuple[int, ...]
    """Ascending."""
    text: str
    """The limit, of the first of them."""

    def admits(self, shares: Sequence[float]) -> bool:
        """Whether replicas of these shares may hold the layers."""
        return self.least <= min(shares) and max(shares) <= self.most

    def held(self, first: int, stop: int) -> bool:
        """Whether any of the layers is among ``first:stop``."""
        return any(first <= layer < stop for layer in self.layers)


def share_limits(profile: Profile) -> tuple[ShareLimit, ...]:
    """Return the limits of a profile's layers, each once."""
    found: dict[tuple[int, float], list[int]] = {}
    for index, layer in enumerate(profile.layers):
        most = float("inf") if layer.most_samples is None else layer.most_samples
        if (layer.least_samples, most) != (1, float("inf")):
            found.setdefault((layer.least_samples, most), []).append(index)
    return tuple(
        ShareLimit(least, most, tuple(layers), _text(profile.layers[layers[0]].name, least, most))
        for (least, most), layers in found.items()
    )


def _text(name: str, least: int, most: float) -> str:
    if most == float("inf"):
        return f"layer {name} takes at least {least} samples of a micro-batch at once"
    return f"layer {name} takes {least} to {most} samples of a micro-batch at once"


def crossed_limit(costs: CostModel, stages: Iterable[Shared]) -> str | None:
    """Return what the shares of some stages do not obey; None if they may be so."""
    if not costs.share_limits:
        return None
    for stage in stages:
        for limit in costs.share_limits:
            if limit.held(stage.first, stage.stop) and not limit.admits(stage.shares):
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
    widest = Placed(0, 1, (), costs.shares(rows, devices if costs.divisible else min(devices, rows)), 1)
    return next((each for each in costs.share_limits if rows < each.least or max(widest.shares) > each.most), None)
