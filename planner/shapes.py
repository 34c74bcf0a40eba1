"""Shapes: where stages end and how wide groups of devices are, for schedules of which plans are found by trying."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from autopar.formats.layout import group_of, layout_of
from autopar.formats.plan import Shard
from autopar.planner.candidate import Family, Placed
from autopar.planner.costs.model import CostModel

FEW = 4
"""Groups of which one may be wide to begin with."""
HALVINGS = 40
"""Of the seconds of the slowest stage; what is left of an error is rounding."""


class Shape(NamedTuple):
    """Stages of a candidate, without what is in flight."""

    cuts: tuple[int, ...]
    """Layers before which the stages end."""
    widths: tuple[int, ...]
    """Replicas, by group of devices."""


def placed(
    costs: CostModel, family: Family, shape: Shape, order: Sequence[int], shard: Shard = "none"
) -> tuple[Placed, ...]:
    """Return the stages of a shape, groups taking devices in the given order, with all micro-batches in flight.

    Replicas split micro-batches; those of groups of several shard.
    """
    devices, begin = [], 0
    for width in shape.widths:
        devices.append(tuple(order[begin : begin + width]))
        begin += width
    stages = []
    for index, (first, stop) in enumerate(pairwise((0, *shape.cuts))):
        mine = devices[group_of(layout_of(family.schedule), index, len(devices))]
        shares = costs.shares(family.micro_batch_size, len(mine))
        stages.append(Placed(first, stop, mine, shares, family.micro_batches, shard=shard if len(mine) > 1 else "none"))
    return tuple(stages)


def widths_of(devices: int, groups: int, most: int, *, all_used: bool) -> list[tuple[int, ...]]:
    """Return widths of groups to begin with, none above ``most``: equal ones, of one device, of few groups one wide.

    With ``all_used`` no device is idle, as far as ``most`` lets them be used.

    >>> widths_of(7, 3, 7, all_used=False)
    [(2, 2, 2), (1, 1, 1), (5, 1, 1), (1, 5, 1), (1, 1, 5)]
    >>> widths_of(7, 2, 3, all_used=True)
    [(3, 3), (1, 1), (3, 1), (1, 3)]
    """
    each, more = divmod(devices, groups)
    found = [tuple(min(most, each + (all_used and at < more)) for at in range(groups)), (1,) * groups]
    wide = min(most, devices - groups + 1)
    found.extend((*(1,) * at, wide, *(1,) * (groups - 1 - at)) for at in range(groups if groups <= FEW else 0))
    used = [widths for widths in found if not all_used or sum(widths) == devices]
    return list(dict.fromkeys(used or found))


def balanced(costs: CostModel, family: Family, widths: Sequence[int], chunks: int, edges: Sequence[int]) -> Shape:
    """Return the shape of groups of some widths whose slowest stage is about as quick as can be.

    ``edges`` are where stages may end, 0 and the last included; there is one for every stage.
    """
    count, layout = len(widths) * chunks, layout_of(family.schedule)
    sums: dict[int, list[float]] = {}
    for width in set(widths):
        rows = costs.shares(family.micro_batch_size, width)[-1]
        both = zip(costs.sums.forward(rows), costs.sums.backward(rows, 1.0), strict=True)
        running = [forward_s + backward_s for forward_s, backward_s in both]
        sums[width] = [running[edge] for edge in edges]
    own = [sums[widths[group_of(layout, index, len(widths))]] for index in range(count)]
    low, high = 0.0, max(each[-1] for each in own)
    found = _within(own, high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        tried = _within(own, middle)
        low, high, found = (middle, high, found) if tried is None else (low, middle, tried)
    assert found is not None
    return Shape(tuple(edges[at] for at in found), tuple(widths))


def _within(own: Sequence[Sequence[float]], most_s: float) -> list[int] | None:
    """Return the ends of stages that take no longer than some seconds, as long ones as can be; None: there are none."""
    last, at = len(own[0]) - 1, 0
    found = []
    for index, sums in enumerate(own):
        behind = len(own) - 1 - index
        stop = min(bisect_right(sums, sums[at] + most_s) - 1, last - behind)
        if stop <= at:
            return None
        found.append(stop)
        at = stop
    return found if at == last else None
