"""Moves: the layouts beside a layout, by moved cuts, moved devices and other manners of running stages.

From where stages end, how wide they are and how they run; and balanced shapes of groups of devices, for schedules of
which plans are found by trying. Every local search takes its moves from here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from autopar.formats.plan import Division, Shard, group_of, layout_of
from autopar.planner.candidate import Candidate, CandidateStage, Family
from autopar.planner.costs.model import CostModel

Manner = tuple[Division, Shard]
SINGLE: Manner = ("split", "none")


class Layout(NamedTuple):
    """Stages of a candidate without devices, what is in flight, and what is recomputed."""

    cuts: tuple[int, ...]
    """Layers before which the stages end."""
    widths: tuple[int, ...]
    """Replicas."""
    manners: tuple[Manner, ...]
    """How replicas divide micro-batches, and what they shard."""

    @classmethod
    def of(cls, candidate: Candidate) -> Layout:
        """Return the layout of a candidate.

        >>> from autopar.planner.candidate import Family, place
        >>> Layout.of(Candidate(2, 4, "1f1b", place(Family(2, 4, "1f1b"), (3, 5), (2, 1))))
        Layout(cuts=(3, 5), widths=(2, 1), manners=(('split', 'none'), ('split', 'none')))
        """
        manners = tuple((stage.division, stage.shard) for stage in candidate.stages)
        return cls(candidate.cuts, candidate.widths, manners)

    def with_width(self, at: int, width: int, manner: Manner) -> Layout:
        """Return the layout with another width of one stage, which is run in some manner where it has replicas."""
        own = manner if width > 1 else SINGLE
        return Layout(
            self.cuts,
            (*self.widths[:at], width, *self.widths[at + 1 :]),
            (*self.manners[:at], own, *self.manners[at + 1 :]),
        )

    def run(self, manner: Manner) -> Layout:
        """Return the layout with the replicas of all stages run in a manner."""
        return self._replace(manners=tuple(manner if width > 1 else SINGLE for width in self.widths))

    def manner_near(self, at: int) -> Manner:
        """Return how a stage is run, or, where it has one replica, the nearest one that has more."""
        every = sorted(range(len(self.widths)), key=lambda other: abs(other - at))
        return next((self.manners[other] for other in every if self.widths[other] > 1), SINGLE)


def cuts_moved(
    cuts: Sequence[int], edges: Sequence[int], which: Iterable[int], reach: int = 1
) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with one of ``which`` moved, by up to ``reach`` of the edges where stages may end.

    >>> list(cuts_moved((2, 4), (0, 1, 2, 3, 4), (0,)))
    [(1, 4), (3, 4)]
    """
    for index in which:
        low, high = (0, *cuts)[index], cuts[index + 1]
        at = bisect_left(edges, cuts[index])
        for by in (step * sign for step in range(1, reach + 1) for sign in (-1, 1)):
            # The cut may lie between two edges, as a dictated one does.
            place = at + by if at < len(edges) and edges[at] == cuts[index] else at + by - (by > 0)
            if 0 <= place < len(edges) and low < edges[place] < high:
                yield (*cuts[:index], edges[place], *cuts[index + 1 :])


def layers_passed(cuts: Sequence[int], edges: Sequence[int], givers: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with a layer of one of the ``givers`` passed to another stage: those between move by an edge.

    >>> list(layers_passed((2, 4, 6), range(7), (0,)))
    [(1, 4, 6), (1, 3, 6)]
    """
    place = {edge: at for at, edge in enumerate(edges)}
    known = all(cut in place for cut in cuts)
    for giver in givers if known else ():
        for taker in range(len(cuts)):
            between = range(giver, taker) if taker > giver else range(taker, giver)
            by = -1 if taker > giver else 1
            moved = list(cuts)
            for index in between:
                moved[index] = edges[place[cuts[index]] + by]
            if between and all(before < after for before, after in pairwise((0, *moved))):
                yield tuple(moved)


def devices_moved(
    widths: Sequence[int], idle: int, takers: Iterable[int], *, all_used: bool
) -> Iterator[tuple[int, ...]]:
    """Yield the widths with one device passed to one of the ``takers``, taken up, or dropped.

    >>> list(devices_moved((2, 1), 0, (1,), all_used=True)), list(devices_moved((1, 1), 1, (0,), all_used=False))
    ([(1, 2)], [(2, 1)])
    """
    takers = tuple(takers)
    for index, width in enumerate(widths):
        for taker in takers if width > 1 else ():
            if taker != index:
                passed = list(widths)
                passed[index], passed[taker] = width - 1, widths[taker] + 1
                yield tuple(passed)
        if width > 1 and not all_used:
            yield (*widths[:index], width - 1, *widths[index + 1 :])
    for taker in takers if idle else ():
        yield (*widths[:taker], widths[taker] + 1, *widths[taker + 1 :])


def stages_joined(layout: Layout, which: Iterable[int]) -> Iterator[Layout]:
    """Yield the layout with a stage of ``which`` joined with the next one, on the devices of both.

    >>> next(stages_joined(Layout((2, 4), (1, 1), (SINGLE, SINGLE)), (0,)))
    Layout(cuts=(4,), widths=(2,), manners=(('split', 'none'),))
    """
    cuts, widths, manners = layout
    for index in which:
        manner = max(manners[index : index + 2], key=lambda each: each != SINGLE)
        yield Layout(
            (*cuts[:index], *cuts[index + 1 :]),
            (*widths[:index], widths[index] + widths[index + 1], *widths[index + 2 :]),
            (*manners[:index], manner, *manners[index + 2 :]),
        )


def stages_divided(layout: Layout, which: Iterable[int], seconds: Sequence[float], idle: int) -> Iterator[Layout]:
    """Yield the layout with a stage of ``which`` divided in two, about evenly by the running sums ``seconds``."""
    for index in which:
        first, stop = (0, *layout.cuts)[index], layout.cuts[index]
        own = layout.widths[index] + (layout.widths[index] == 1 and idle > 0)
        for width in sorted({1, own // 2, own - 1} - {0, own}):
            aim = seconds[first] + (seconds[stop] - seconds[first]) * width / own
            middle = bisect_left(seconds, aim, first + 1, max(first + 1, stop - 1))
            for cut in range(max(first + 1, middle - 1), min(stop, middle + 1)):
                yield _divide_stage(layout, index, cut, (width, own - width))


def _divide_stage(layout: Layout, index: int, cut: int, parts: tuple[int, int]) -> Layout:
    cuts, widths, manners = layout
    own = tuple(manners[index] if width > 1 else SINGLE for width in parts)
    return Layout(
        (*cuts[:index], cut, *cuts[index:]),
        (*widths[:index], *parts, *widths[index + 1 :]),
        (*manners[:index], *own, *manners[index + 1 :]),
    )


def manners_changed(layout: Layout, manners: Sequence[Manner], which: Iterable[int]) -> Iterator[Layout]:
    """Yield the layout with all replicated stages run in another manner, and with each of ``which``."""
    wide = [index for index, width in enumerate(layout.widths) if width > 1]
    for manner in manners:
        for some in (wide, *([index] for index in which if index in wide)):
            changed = tuple(manner if index in some else each for index, each in enumerate(layout.manners))
            if changed != layout.manners:
                yield layout._replace(manners=changed)


def stages_of(layout: Layout) -> Iterator[tuple[int, int, int, Manner]]:
    """Yield every stage's first layer, stop, width and manner."""
    return zip((0, *layout.cuts[:-1]), *layout, strict=True)


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


def place_shape(
    costs: CostModel, family: Family, shape: Shape, order: Sequence[int], shard: Shard = "none"
) -> tuple[CandidateStage, ...]:
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
        stages.append(
            CandidateStage(first, stop, mine, shares, family.micro_batches, shard=shard if len(mine) > 1 else "none")
        )
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


def balanced_shape(costs: CostModel, family: Family, widths: Sequence[int], chunks: int, edges: Sequence[int]) -> Shape:
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
