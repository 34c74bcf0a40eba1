"""Partitions of a pipeline that is never flushed, those whose busiest stage does least first.

A partition says which layers are a stage, how many replicas it has, and how these divide micro-batches; devices are
taken in a given order. No replica takes less for a mini-batch than its own backwards, forwards, reduction and
update:

    busy(stage) = (T (forward + backward) + reduction behind the last backward + update) / n

with n = 1, or as many as take turns. A table has the least that the busiest stage does of all that begin with a layer,
on the devices behind ``start``:

    F(first, start) = min over stop, width, division of  max( busy(stage), F(stop, start + width) )

What stands behind the last backward takes a while to find. A bound of ``busy`` without it, of all stops at once, says
for which stages it need not be known. Partitions follow from the table one by one, by A*, with F for what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from math import lcm
from typing import NamedTuple

import numpy as np

from autopar.formats.cluster import Level
from autopar.formats.plan import Division, turn_count
from autopar.planner.candidate import CandidateStage, Family
from autopar.planner.constraints import FixedStages
from autopar.planner.costs.activations import Counts, Numbers
from autopar.planner.costs.model import CostModel


class StageWay(NamedTuple):
    """How a stage's replicas are."""

    width: int
    division: Division

    @property
    def turning(self) -> int:
        """How many replicas take turns; see :func:`autopar.formats.plan.turn_count`."""
        return turn_count(self.division, self.width)


class PipelinePartition(NamedTuple):
    """Stages by their stops and ways, and the seconds of the busiest one per mini-batch."""

    busiest_s: float
    stops: tuple[int, ...]
    ways: tuple[StageWay, ...]

    @property
    def width(self) -> int:
        """Devices of all stages."""
        return sum(way.width for way in self.ways)


class _Site(NamedTuple):
    """What prices know of a stage's devices: what connects them, the kind of each, and the smallest memory."""

    level: Level
    kinds: tuple[int, ...]
    limit_bytes: int


class _Next(NamedTuple):
    """A stage that may follow; the order of fields is that of preference."""

    least_s: float
    """Of the busiest stage of all that begin with it."""
    layers_left: int
    way: StageWay
    busy_s: float


class PartitionTable:
    """The partitions of one family of plans."""

    def __init__(
        self,
        costs: CostModel,
        family: Family,
        devices: Sequence[int],
        divisions: Callable[[int], Sequence[Division]],
        busy_s: Callable[[CandidateStage], float],
        fixed_stages: FixedStages | None = None,
    ) -> None:
        """Fill the table.

        Args:
            costs: prices.
            family: micro-batches, and their samples.
            devices: in the order in which stages take them.
            divisions: returns how so many replicas may divide micro-batches.
            busy_s: returns what a stage's busiest replica does per mini-batch.
            fixed_stages: the only stages that are wanted, if some are.
        """
        self._costs, self._family, self._divisions, self._busy_of = costs, family, divisions, busy_s
        self._layers, self._order, self._devices = costs.layer_count, tuple(devices), len(devices)
        self._fixed = _by_first(fixed_stages)
        self._known_s: dict[tuple[int, int, StageWay, _Site], float] = {}
        self._sites: dict[tuple[int, int], _Site] = {}
        self._sums: dict[tuple[float, int, float], Numbers] = {}
        self._bounds: dict[tuple[int, StageWay, _Site], Numbers] = {}
        # From a layer on, behind so many devices.
        self._least = np.full((self._layers + 1, self._devices + 1), np.inf)
        self._least[self._layers] = 0.0
        for first in reversed(range(self._layers)):
            for start in range(self._devices):
                following = next(self._following(first, start, 0.0), None)
                if following is not None:
                    self._least[first, start] = following.least_s

    def stages(self, partition: PipelinePartition) -> tuple[CandidateStage, ...]:
        """Return a partition's stages, with one micro-batch in flight."""
        found, first, start = list[CandidateStage](), 0, 0
        for stop, way in zip(partition.stops, partition.ways, strict=True):
            found.append(self._stage(first, stop, start, way))
            first, start = stop, start + way.width
        return tuple(found)

    def in_order(self, most_stages: int | None, most_in_span: int) -> Iterator[PipelinePartition]:
        """Yield all partitions of at most so many stages, those whose busiest stage does least first.

        Where replicas take turns, all have had equally many after at most ``most_in_span`` mini-batches. Of partitions
        alike, such come first as have more layers in their first stages, and fewer devices.
        """
        serial = count()
        ahead: list[tuple[float, int, int, int, PipelinePartition, PipelinePartition, Iterator[_Next]]] = []

        def put(before: PipelinePartition, followers: Iterator[_Next]) -> None:
            """Add the next stage to a partition's beginning."""
            span = lcm(*(way.turning for way in before.ways))
            within = (each for each in followers if lcm(span, each.way.turning) <= most_in_span)
            found = next(within, None)
            if found is not None:
                stops, ways = (*before.stops, self._layers - found.layers_left), (*before.ways, found.way)
                after = PipelinePartition(max(before.busiest_s, found.busy_s), stops, ways)
                heappush(ahead, (found.least_s, found.layers_left, after.width, next(serial), after, before, followers))

        put(PipelinePartition(0.0, (), ()), self._following(0, 0, 0.0))
        while ahead:
            _, layers_left, start, _, partition, before, others = heappop(ahead)
            put(before, others)
            if not layers_left:
                yield partition
            elif len(partition.stops) != most_stages:
                put(partition, self._following(partition.stops[-1], start, partition.busiest_s))

    def _following(self, first: int, start: int, busiest_s: float) -> Iterator[_Next]:
        """Yield the stages from a layer on, behind so many devices, by what is the least behind a ``busiest_s``."""
        each = [(stops, way, bounds) for stops, way, bounds in self._beginnings(first, start)]
        if not each:
            return
        bounds_s = np.maximum(np.concatenate([bounds for *_, bounds in each]), busiest_s)
        stops = np.concatenate([own for own, *_ in each])
        way_of = np.repeat(np.arange(len(each)), [len(own) for own, *_ in each])
        found: list[_Next] = []
        while True:
            at = int(bounds_s.argmin())
            bound_s = float(bounds_s[at])
            while found and found[0].least_s <= bound_s:
                yield heappop(found)
            if bound_s == np.inf:
                return
            stop, way = int(stops[at]), each[way_of[at]][1]
            busy_s = self._busy_s(first, stop, start, way)
            least_s = max(bound_s, busy_s)
            bounds_s[at] = np.inf
            heappush(found, _Next(least_s, self._layers - stop, way, busy_s))

    def _beginnings(self, first: int, start: int) -> Iterator[tuple[Counts, StageWay, Numbers]]:
        """Yield stops, a way, and no more than what the busiest stage does of all that begin with such a stage."""
        stops = np.arange(first + 1, self._layers + 1)
        fixed = self._fixed.get(first, (0, 0)) if self._fixed else None
        widths = range(1, self._devices - start + 1) if fixed is None else [fixed[1]]
        for width in (width for width in widths if 0 < width <= self._devices - start):
            for division in self._divisions(width):
                way = StageWay(width, division)
                bounds_s = np.maximum(self._least_busy(first, start, way), self._least[first + 1 :, start + width])
                if fixed is not None:
                    bounds_s = np.where(stops == fixed[0], bounds_s, np.inf)
                yield stops, way, bounds_s

    def _least_busy(self, first: int, start: int, way: StageWay) -> Numbers:
        """Return no more than what stages from a layer on are busy for, by their stop."""
        site = self._site(start, way.width)
        key = first, way, site
        if key not in self._bounds:
            costs, family = self._costs, self._family
            shares = costs.shares(family.micro_batch_size, way.width, way.division)
            computing = [
                self._both_sums(rows, kind, costs.adding(family.micro_batches, way.width))
                for rows, kind in set(zip(shares, site.kinds, strict=True))
            ]
            least_s = family.micro_batches * np.maximum.reduce([sums[first + 1 :] - sums[first] for sums in computing])
            # Sums from the first layer on are rounded.
            self._bounds[key] = np.asarray(least_s * (1 - _ROUNDING) / way.turning)
        return self._bounds[key]

    def _both_sums(self, rows: float, kind: int, adding: float) -> Numbers:
        """Return the seconds of forwards and backwards of all layers before each position."""
        key = rows, kind, adding
        if key not in self._sums:
            sums = self._costs.sums
            self._sums[key] = np.array(sums.forward(rows, kind=kind)) + sums.backward(rows, adding, kind=kind)
        return self._sums[key]

    def _busy_s(self, first: int, stop: int, start: int, way: StageWay) -> float:
        key = first, stop, way, self._site(start, way.width)
        if key not in self._known_s:
            self._known_s[key] = self._busy_of(self._stage(first, stop, start, way))
        return self._known_s[key]

    def _site(self, start: int, width: int) -> _Site:
        if (start, width) not in self._sites:
            devices, costs = self._order[start : start + width], self._costs
            kinds = tuple(costs.kind_of[each] for each in devices)
            self._sites[start, width] = _Site(costs.links.level(devices), kinds, costs.limit_bytes(devices))
        return self._sites[start, width]

    def _stage(self, first: int, stop: int, start: int, way: StageWay) -> CandidateStage:
        shares = self._costs.shares(self._family.micro_batch_size, way.width, way.division)
        return CandidateStage(first, stop, self._order[start : start + way.width], shares, 1, division=way.division)


_ROUNDING = 1e-9


def _by_first(fixed_stages: FixedStages | None) -> dict[int, tuple[int, int]]:
    """Return, by first layer, stop and width of the only stage that may begin there."""
    if fixed_stages is None:
        return {}
    each = zip([0, *fixed_stages.cuts], fixed_stages.cuts, fixed_stages.widths, strict=False)
    return {first: (stop, width) for first, stop, width in each}
