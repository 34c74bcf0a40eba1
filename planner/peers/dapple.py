"""DAPPLE: the pipeline of least estimated latency, stages placed by three policies.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", 2021, section 4.3. TPL(j, m, g) is
the latency of the best plan whose stages hold the first j layers on m devices g, with all other layers as one last
stage on all other devices. From it, the last stage is split behind layer j', its first part on m' devices as each
policy takes them:

    TPL(j', m + m', g + g') = L          (of section 4.1; see :mod:`autopar.planner.peers.latency`)
    TPL = min over j, m, g of TPL(j, m, g)

Every (j, g) keeps its best plan only. A plan uses all devices; pure data parallelism, j = 0, is one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.planner.peers.groups import Free, Group, Option, group_of, options, reachable
from autopar.planner.peers.latency import latency_s
from autopar.planner.peers.prices import Array, Prices
from autopar.planner.peers.proposal import Proposal
from autopar.planner.peers.seconds import Positions, Seconds, StageSeconds

__all__ = ["Found", "find", "propose", "work"]

OVERHEAD = 300_000
"""What numpy's calls for one (j, g) take, in the time of array elements."""


class Found(NamedTuple):
    """A whole plan: stages that end before the layers ``cuts``; the devices of every node that are left before each."""

    latency_s: float
    cuts: tuple[int, ...]
    left: tuple[Free, ...]


class _Table(NamedTuple):
    """TPL(j, g) of all j of one g: the complement of what is left."""

    latency_s: Array
    before: list[tuple[int, Free] | None]
    """The (j, g) that was split."""


class _Planned(NamedTuple):
    """The stages and links of a (j, g), and the devices of its last planned stage."""

    seconds: Seconds
    group: Group | None


def propose(prices: Prices) -> list[Proposal]:
    """Return DAPPLE's plan; none where every plan has more replicas of a stage than a micro-batch has samples."""
    found = find(prices)
    if found is None:
        return []
    devices = []
    none_left = (0,) * len(prices.servers)
    for before, after in zip(found.left, (*found.left[1:], none_left), strict=True):
        spans = zip(prices.servers, before, after, strict=True)
        taken = [each for server, start, stop in spans for each in server[len(server) - start : len(server) - stop]]
        devices.append(tuple(sorted(taken)))
    return [Proposal(found.cuts, tuple(devices))]


def find(prices: Prices) -> Found | None:
    """Return the plan of least latency whose replicas all have a sample, with the seconds that DAPPLE estimates."""
    return _Search(prices).go()


def work(prices: Prices) -> int:
    """Return how many array elements a proposal takes."""
    layers, devices = prices.layer_count, prices.device_count
    each = layers * (OVERHEAD + 20 * layers * devices)
    return each * reachable(tuple(map(len, prices.servers)), 10**10 // each)


class _Search:
    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.layers = prices.layer_count
        self.sizes: Free = tuple(map(len, prices.servers))
        self.seconds = StageSeconds(prices)
        self.tables: dict[Free, _Table] = {}
        self.planned: dict[tuple[int, Free], _Planned] = {}
        self.options: dict[Free, list[Option]] = {}

    def go(self) -> Found | None:
        """Fill the tables, fewer layers first; return the best whole plan."""
        nothing = np.zeros((3, 0, 1, 1))
        self.planned[0, self.sizes] = _Planned(Seconds(*nothing), None)
        alone = self.seconds.stage([group_of(self.sizes)], np.array([0]), np.array([self.layers]))
        found = [(float(self._latency_s(alone)[0, 0]), 0, self.sizes)]
        self._split(0, self.sizes)
        for first in range(1, self.layers):
            for free in sorted(self.tables):
                latency = float(self.tables[free].latency_s[first])
                if np.isfinite(latency):
                    found.append((latency, first, free))
                    self._plan(first, free)
                    self._split(first, free)
        placeable = [each for each in found if sum(each[2]) <= self.prices.rows]
        return None if not placeable else self._whole(*min(placeable, key=lambda each: each[0]))

    def _whole(self, latency: float, first: int, free: Free) -> Found:
        cuts, left = [self.layers], [free]
        while first:
            before = self.tables[free].before[first]
            assert before is not None
            cuts.append(first)
            first, free = before
            left.append(free)
        return Found(latency, tuple(reversed(cuts)), tuple(reversed(left)))

    def _split(self, first: int, free: Free) -> None:
        """Split the last stage of a (j, g) in every way."""
        every, stops = self._options(free), np.arange(first + 1, self.layers)
        if not every or not len(stops):
            return
        added = self._added(self.planned[first, free], first, stops, every)
        between = self.seconds.link([(each.group, each.rest) for each in every], stops)
        rest = self.seconds.stage([each.rest for each in every], stops, np.array([self.layers]))
        for option, latencies in zip(every, self._latency_s(added.then(between).then(rest)), strict=True):
            table = self._table(option.left)
            better = np.flatnonzero(latencies < table.latency_s[stops])
            table.latency_s[stops[better]] = latencies[better]
            for stop in stops[better].tolist():
                table.before[stop] = (first, free)

    def _plan(self, first: int, free: Free) -> None:
        """Keep the stages of a (j, g), now that no better ones can come."""
        before = self.tables[free].before[first]
        assert before is not None
        option = next(each for each in self._options(before[1]) if each.left == free)
        seconds = self._added(self.planned[before], before[0], np.array([first]), [option])
        self.planned[first, free] = _Planned(seconds, option.group)

    def _added(self, planned: _Planned, first: int, stops: Positions, every: Sequence[Option]) -> Seconds:
        """Return a (j, g) with one stage more, on each option's devices."""
        seconds, at = planned.seconds, np.array([first])
        if planned.group is not None:
            seconds = seconds.then(self.seconds.link([(planned.group, each.group) for each in every], at))
        return seconds.then(self.seconds.stage([each.group for each in every], at, stops))

    def _latency_s(self, seconds: Seconds) -> Array:
        """Return the latencies ``[groups, cuts]``."""
        stages, *shape = seconds.forward_s.shape
        forward_s, backward_s, reduce_s = (each.reshape(stages, -1) for each in seconds)
        return latency_s(forward_s, backward_s, reduce_s, self.prices.micro_batches).reshape(shape)

    def _options(self, free: Free) -> list[Option]:
        if free not in self.options:
            self.options[free] = options(free, self.sizes, self.prices.rows)
        return self.options[free]

    def _table(self, free: Free) -> _Table:
        if free not in self.tables:
            self.tables[free] = _Table(np.full(self.layers, np.inf), [None] * self.layers)
        return self.tables[free]
