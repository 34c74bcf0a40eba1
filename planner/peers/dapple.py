"""DAPPLE: the pipeline of least estimated latency, stages placed by three policies.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", 2021, section 4.3. TPL(j, m, g) is
the latency of the best plan whose stages hold the first j layers on m devices g, with all other layers as one last
stage on all other devices. From it, the last stage is split behind layer j', its first part on m' devices as each
policy takes them:

    TPL(j', m + m', g + g') = L          (of section 4.1; see :mod:`autopar.planner.peers.latency`)
    TPL = min over j, m, g of TPL(j, m, g)

Every (j, g) keeps its best plan only, and sets g that differ in nodes of the same size count as one. A plan uses all
devices; pure data parallelism, j = 0, is one of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.planner.peers.groups import Alike, Choice, Free, Groups, Positions, alike, choose, group_of, reachable
from autopar.planner.peers.latency import latency_s
from autopar.planner.peers.prices import Array, Prices
from autopar.planner.peers.proposal import Proposal
from autopar.planner.peers.seconds import Seconds, StageSeconds, chained

OVERHEAD = 150_000
"""What numpy's calls for one (j, g) take, in the time of array elements."""


class Found(NamedTuple):
    """A whole plan: stages that end before the layers ``cuts``; the devices of every node that are left before each."""

    latency_s: float
    cuts: tuple[int, ...]
    left: tuple[Free, ...]


class _Point(NamedTuple):
    """A (j, g): layers planned, and the state of the nodes."""

    layers: int
    state: Alike


class _Table(NamedTuple):
    """TPL(j, g) of all j of one g."""

    latency_s: Array
    before: list[_Point | None]
    """The (j, g) that was split."""
    free: list[Free]
    """Devices that are left of every node."""


class _Planned(NamedTuple):
    """The stages and links of a (j, g), the devices of its last planned stage, and those left."""

    seconds: Seconds
    group: Groups | None
    free: Free


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
        self.tables: dict[Alike, _Table] = {}
        self.planned: dict[_Point, _Planned] = {}
        self.choices: dict[Free, Choice] = {}

    def go(self) -> Found | None:
        """Fill the tables, fewer layers first; return the best whole plan."""
        start = _Point(0, alike(self.sizes, self.sizes))
        self.planned[start] = _Planned(Seconds(*np.zeros((3, 0, 1, 1))), None, self.sizes)
        alone = self.seconds.stage(group_of([self.sizes]), np.array([0]), np.array([self.layers]))
        found = [(float(self._latency_s(alone)[0, 0]), start)]
        self._split(start)
        for first in range(1, self.layers):
            for state in sorted(self.tables):
                point, latency = _Point(first, state), float(self.tables[state].latency_s[first])
                if np.isfinite(latency):
                    found.append((latency, point))
                    self._plan(point)
                    self._split(point)
        placeable = [each for each in found if sum(self.planned[each[1]].free) <= self.prices.most_replicas]
        return None if not placeable else self._whole(*min(placeable, key=lambda each: each[0]))

    def _whole(self, latency: float, point: _Point) -> Found:
        cuts, left = [self.layers], [self.planned[point].free]
        while point.layers:
            cuts.append(point.layers)
            point = self._before(point)
            left.append(self.planned[point].free)
        return Found(latency, tuple(reversed(cuts)), tuple(reversed(left)))

    def _split(self, point: _Point) -> None:
        """Split the last stage of a (j, g) in every way."""
        planned, stops = self.planned[point], np.arange(point.layers + 1, self.layers)
        choice = self._choice(planned.free)
        if not choice.left or not len(stops):
            return
        added = self._added(planned, point.layers, stops, choice.groups)
        between = self.seconds.link(choice.groups, choice.rest, stops)
        rest = self.seconds.stage(choice.rest, stops, np.array([self.layers]))
        self._improve(point, stops, choice, self._latency_s(chained([*added, between, rest])))

    def _improve(self, point: _Point, stops: Positions, choice: Choice, latency_s: Array) -> None:
        """Enter latencies ``[group, stop]`` where they are less than what is known."""
        tables = [self._table(state) for state in choice.states]
        known = np.stack([table.latency_s[point.layers + 1 :] for table in tables])
        for at in np.flatnonzero((latency_s < known).any(axis=1)).tolist():
            table = tables[at]
            # Groups may lead to the same state, so that what is known may be less by now.
            better = np.flatnonzero(latency_s[at] < table.latency_s[stops])
            table.latency_s[stops[better]] = latency_s[at, better]
            for stop in stops[better].tolist():
                table.before[stop], table.free[stop] = point, choice.left[at]

    def _plan(self, point: _Point) -> None:
        """Keep the stages of a (j, g), now that no better ones can come."""
        before, free = self._before(point), self.tables[point.state].free[point.layers]
        planned = self.planned[before]
        choice = self._choice(planned.free)
        group = choice.groups.at(choice.left.index(free))
        seconds = chained(self._added(planned, before.layers, np.array([point.layers]), group))
        self.planned[point] = _Planned(seconds, group, free)

    def _before(self, point: _Point) -> _Point:
        before = self.tables[point.state].before[point.layers]
        assert before is not None
        return before

    def _added(self, planned: _Planned, first: int, stops: Positions, groups: Groups) -> list[Seconds]:
        """Return a (j, g) with one stage more, on each of the groups."""
        at = np.array([first])
        stage = self.seconds.stage(groups, at, stops)
        if planned.group is None:
            return [stage]
        return [planned.seconds, self.seconds.link(planned.group, groups, at), stage]

    def _latency_s(self, seconds: Seconds) -> Array:
        """Return the latencies ``[groups, cuts]``."""
        stages, *shape = seconds.forward_s.shape
        forward_s, backward_s, reduce_s = (each.reshape(stages, -1) for each in seconds)
        return latency_s(forward_s, backward_s, reduce_s, self.prices.micro_batches).reshape(shape)

    def _choice(self, free: Free) -> Choice:
        if free not in self.choices:
            self.choices[free] = choose(free, self.sizes, self.prices.most_replicas)
        return self.choices[free]

    def _table(self, state: Alike) -> _Table:
        if state not in self.tables:
            self.tables[state] = _Table(np.full(self.layers, np.inf), [None] * self.layers, [()] * self.layers)
        return self.tables[state]
