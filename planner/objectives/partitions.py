"""Partitions: those of a pipeline that is never flushed, in the order of their busiest stage.

A partition says which layers are a stage, how many replicas it has, and how these divide micro-batches; devices are
taken in a given order. No replica takes less for a mini-batch than its own backwards, forwards, reduction and update:

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

from autopar.hardware.topology import Place
from autopar.ownership import Replicas
from autopar.planner.candidate import CandidateStage, Family
from autopar.planner.costs import memoize
from autopar.planner.costs.activations import Numbers
from autopar.planner.costs.model import CostModel
from autopar.planner.dictated import FixedStages
from autopar.planner.shares import by_speed


class PipelinePartition(NamedTuple):
    """Stages by their stops and replicas, and the seconds of the busiest one per mini-batch."""

    busiest_s: float
    stops: tuple[int, ...]
    replicas: tuple[Replicas, ...]

    @property
    def width(self) -> int:
        """Devices of all stages."""
        return sum(each.devices for each in self.replicas)


class _Site(NamedTuple):
    """What prices know of a stage's devices: where they stand, the form of each replica, and the smallest memory."""

    place: Place
    forms: tuple[int, ...]
    limit_bytes: int


class _Next(NamedTuple):
    """A stage that may follow; the order of fields is that of preference."""

    least_s: float
    """Of the busiest stage of all that begin with it."""
    layers_left: int
    replicas: Replicas
    busy_s: float


class PartitionTable:
    """The partitions of one family of plans."""

    def __init__(
        self,
        costs: CostModel,
        family: Family,
        devices: Sequence[int],
        ways: Callable[[int], Sequence[Replicas]],
        busy_s: Callable[[CandidateStage], float],
        fixed_stages: FixedStages | None = None,
    ) -> None:
        """Fill the table.

        Args:
            costs: prices.
            family: micro-batches, and their samples.
            devices: in the order in which stages take them.
            ways: returns how so many replicas may be run.
            busy_s: returns what a stage's busiest replica does per mini-batch.
            fixed_stages: the only stages that are wanted, if some are.
        """
        self._costs, self._family, self._ways, self._busy_of = costs, family, ways, busy_s
        self._layers, self._order, self._devices = costs.layer_count, tuple(devices), len(devices)
        self._fixed: dict[int, tuple[int, int, Replicas]] = {}
        """By first layer, stop and width of the only stage that may begin there, and one of its replicas."""
        if fixed_stages is not None:
            ends = zip(fixed_stages.cuts, fixed_stages.widths, fixed_stages.teams, strict=True)
            self._fixed = dict(zip((0, *fixed_stages.cuts), ends, strict=False))
        self._known_s: dict[tuple[int, int, Replicas, _Site], float] = {}
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
        for stop, replicas in zip(partition.stops, partition.replicas, strict=True):
            found.append(self._stage(first, stop, start, replicas))
            first, start = stop, start + replicas.devices
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
            span = lcm(*(each.period for each in before.replicas))
            within = (each for each in followers if lcm(span, each.replicas.period) <= most_in_span)
            found = next(within, None)
            if found is not None:
                stops, every = (*before.stops, self._layers - found.layers_left), (*before.replicas, found.replicas)
                after = PipelinePartition(max(before.busiest_s, found.busy_s), stops, every)
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
        each = list(self._beginnings(first, start))
        if not each:
            return
        bounds_s = np.maximum(np.concatenate([bounds for _, bounds in each]), busiest_s)
        found: list[_Next] = []
        while True:
            at = int(bounds_s.argmin())
            bound_s = float(bounds_s[at])
            while found and found[0].least_s <= bound_s:
                yield heappop(found)
            if bound_s == np.inf:
                return
            number, further = divmod(at, self._layers - first)
            stop, replicas = first + 1 + further, each[number][0]
            busy_s = self._busy_s(first, stop, start, replicas)
            least_s = max(bound_s, busy_s)
            bounds_s[at] = np.inf
            heappush(found, _Next(least_s, self._layers - stop, replicas, busy_s))

    def _beginnings(self, first: int, start: int) -> Iterator[tuple[Replicas, Numbers]]:
        """Yield replicas, and by stop no more than what the busiest stage does of all that begin with such a stage."""
        fixed = self._fixed.get(first, (0, 0, Replicas())) if self._fixed else None
        widths, team = (range(1, self._devices - start + 1), Replicas()) if fixed is None else ([fixed[1]], fixed[2])
        for width in (width for width in widths if 0 < width * team.team <= self._devices - start):
            for replicas in (each.run_by(team) for each in self._ways(width)):
                least_s = self._least_busy(first, replicas, self._site(start, replicas))
                bounds_s = np.maximum(least_s, self._least[first + 1 :, start + replicas.devices])
                if fixed is not None:
                    bounds_s[np.arange(first + 1, self._layers + 1) != fixed[0]] = np.inf
                yield replicas, bounds_s

    @memoize
    def _least_busy(self, first: int, replicas: Replicas, site: _Site) -> Numbers:
        """Return no more than what stages from a layer on are busy for, by their stop."""
        costs, family = self._costs, self._family
        shares = costs.shares(family.micro_batch_size, replicas)
        adding = costs.adding(family.micro_batches, replicas.width)
        unlike = len({costs.forms.every[form].kind for form in site.forms}) > 1 and replicas.division == "split"
        # By speed, some replica has as many rows as an even share, on the quickest kind at best.
        asked = {(max(shares), form) for form in site.forms} if unlike else set(zip(shares, site.forms, strict=True))
        computing = [
            np.maximum.reduce([queue[first + 1 :] - queue[first] for queue in self._both_sums(rows, form, adding)])
            for rows, form in asked
        ]
        least_s = family.micro_batches * (np.minimum if unlike else np.maximum).reduce(computing)
        # Sums from the first layer on are rounded.
        return np.asarray(least_s * (1 - _ROUNDING) / replicas.period)

    @memoize
    def _both_sums(self, rows: float, form: int, adding: float) -> Sequence[Numbers]:
        """Return the seconds of forwards and backwards of all layers before each position, queue by queue."""
        queues = self._costs.seconds.by_queue(rows, adding, form, split=False)
        return [np.array(forward) + backward for forward, backward in queues]

    def _busy_s(self, first: int, stop: int, start: int, replicas: Replicas) -> float:
        key = first, stop, replicas, self._site(start, replicas)
        if key not in self._known_s:
            self._known_s[key] = self._busy_of(self._stage(first, stop, start, replicas))
        return self._known_s[key]

    @memoize
    def _site(self, start: int, replicas: Replicas) -> _Site:
        costs, stage = self._costs, self._stage(0, self._layers, start, replicas)
        forms = tuple(costs.form_of(stage, replica) for replica in range(replicas.width))
        return _Site(costs.copies_place(stage), forms, costs.limit_bytes(stage.devices))

    def _stage(self, first: int, stop: int, start: int, replicas: Replicas) -> CandidateStage:
        shares = self._costs.shares(self._family.micro_batch_size, replicas)
        devices = self._order[start : start + replicas.devices]
        return by_speed(self._costs, CandidateStage.of(first, stop, devices, shares, 1, replicas), self._family)


_ROUNDING = 1e-9
