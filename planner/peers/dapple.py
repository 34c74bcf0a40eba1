"""DAPPLE: the pipeline of least estimated latency, stages placed by three policies.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", 2021, section 4.3. TPL(j, m, g) is
the latency of the best plan whose stages hold the first j layers on m devices g, with all other layers as one last
stage on all other devices. From it, the last stage is split behind layer j', its first part on m' devices as each
policy takes them:

    TPL(j', m + m', g + g') = L
    TPL = min over j, m, g of TPL(j, m, g)

Every (j, g) keeps its best plan only, and sets g that differ in nodes of the same size count as one. A plan uses all
devices; pure data parallelism, j = 0, is one of them.

L is the estimate of a step by section 4.1, from the stage that is idle least. A stage s is one of the model's or the
link between two, with forward F_s, backward B_s (of a link: its transfers) and reduction AR_s (of a link: 0). With M
micro-batches and the pivot stage Q:

    L  = Tw + Ts + Te
    Tw = sum of F_s for s <= Q                         until the pivot's first forward is done
    Ts = (M - 1) (F_Q + B_Q)                           the pivot's steady phase, without bubbles
    Te = max over s of AR_s + (sum of B_s .. B_Q for s <= Q, less the sum of B_(Q+1) .. B_(s-1) for s > Q)

Te counts from the start of the pivot's last backward to the end of every stage's reduction, which begins when the
stage's own last backward ends: behind the pivot, that is before the pivot's. The pivot is found from the last stage
on: s takes Q's place if (M - 1) (F_s + B_s) > (M - 1) (F_Q + B_Q) + sum of F + B of the stages between them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from autopar.planner.peers.prices import Array, Indices, Prices, Proposal
from autopar.planner.pool import Free, less, policy_choices


def pivots(forward_s: Array, backward_s: Array, micro_batches: int) -> Indices:
    """Return the pivot stage of pipelines whose stages' seconds are ``[stage, pipeline]``.

    >>> pivots(np.array([[1.0], [3.0], [1.0]]), np.array([[1.0], [3.0], [1.0]]), 4)
    array([1])
    """
    both = forward_s + backward_s
    steady = (micro_batches - 1) * both
    before = np.concatenate((np.zeros((1, both.shape[1])), np.cumsum(both, axis=0)))
    pivot = np.full(both.shape[1], len(both) - 1)
    # What lies between s and Q is before[Q] - before[s + 1].
    least = steady[-1] + before[-2]
    for stage in range(len(both) - 2, -1, -1):
        takes = steady[stage] + before[stage + 1] > least
        pivot[takes] = stage
        least = np.where(takes, steady[stage] + before[stage], least)
    return pivot


def latency_s(forward_s: Array, backward_s: Array, reduce_s: Array, micro_batches: int) -> Array:
    """Return L of pipelines whose stages' seconds are ``[stage, pipeline]``.

    >>> one = np.ones((3, 1))
    >>> latency_s(one, one, 0 * one, 4)
    array([12.])
    """
    pivot = pivots(forward_s, backward_s, micro_batches)
    at = (pivot, np.arange(len(pivot)))
    back = np.cumsum(backward_s, axis=0)
    warmup_s = np.cumsum(forward_s, axis=0)[at]
    steady_s = (micro_batches - 1) * (forward_s + backward_s)[at]
    # Both cases of Te are the difference of two sums from the first stage on.
    ending_s = back[at] + (reduce_s - (back - backward_s)).max(axis=0)
    return np.asarray(warmup_s + steady_s + ending_s)


Alike = tuple[tuple[int, int], ...]
"""(size, devices left) of every node, ascending."""

SEVERAL = -1


class DeviceGroups(NamedTuple):
    """Devices of stages, as columns ``[group, 1]``."""

    widths: Indices
    nodes: Indices
    """The node that all devices of a group are in, or ``SEVERAL``."""

    def levels_to(self, others: DeviceGroups) -> Indices:
        """Return the levels of the slowest links to other groups, or within these: 0 in one node, else 1."""
        return np.where((self.nodes == SEVERAL) | (self.nodes != others.nodes), 1, 0)

    def at(self, index: int) -> DeviceGroups:
        """Return one of the groups."""
        return DeviceGroups(*(each[index : index + 1] for each in self))


class GroupChoice(NamedTuple):
    """What the next stage may take of what is free, and what is then left for the last one."""

    free_after: list[Free]
    states: list[Alike]
    """What is left, see :func:`alike`."""
    groups: DeviceGroups
    rest: DeviceGroups


def group_of(counts: Sequence[Free]) -> DeviceGroups:
    """Return groups of so many devices of every node.

    >>> groups = group_of([(2, 0), (2, 1), (1, 0)])
    >>> groups.levels_to(groups).tolist(), groups.levels_to(groups.at(0)).tolist()
    ([[0], [1], [0]], [[0], [1], [0]])
    """
    used = [[node for node, count in enumerate(each) if count] for each in counts]
    widths = np.array([[sum(each)] for each in counts], dtype=np.int64).reshape(-1, 1)
    nodes = [[nodes[0] if len(nodes) == 1 else SEVERAL] for nodes in used]
    return DeviceGroups(widths, np.array(nodes, dtype=np.int64).reshape(-1, 1))


def choose(free: Free, sizes: Sequence[int], rows: int) -> GroupChoice:
    """Return what the policies let the next stage take, with at most ``rows`` replicas, so that a device is left."""
    taken = [each for count in range(1, min(rows, sum(free) - 1) + 1) for each in policy_choices(free, sizes, count)]
    left = [less(free, each) for each in taken]
    return GroupChoice(left, [alike(each, sizes) for each in left], group_of(taken), group_of(left))


def alike(free: Free, sizes: Sequence[int]) -> Alike:
    """Return what is left of nodes without telling nodes of one size apart: their links are the same.

    >>> alike((1, 2, 3), (4, 4, 4)) == alike((3, 2, 1), (4, 4, 4)), alike((1, 2), (2, 4)) == alike((2, 1), (2, 4))
    (True, False)
    """
    return tuple(sorted(zip(sizes, free, strict=True)))


def reachable(sizes: Free, most: int) -> int:
    """Return how many states of the nodes, see :func:`alike`, the policies lead to; counting ends above ``most``.

    >>> reachable((4,), 100), reachable((2, 2), 100)
    (4, 5)
    """
    seen, waiting = {alike(sizes, sizes)}, [sizes]
    while waiting and len(seen) <= most:
        free = waiting.pop()
        for count in range(1, sum(free)):
            for taken in policy_choices(free, sizes, count):
                left = less(free, taken)
                state = alike(left, sizes)
                if state not in seen:
                    seen.add(state)
                    waiting.append(left)
    return len(seen)


NEVER_S = 1e9
"""Of replicas of a layer that may have one only; finite, so that differences of sums stay numbers."""


def concatenate(parts: Sequence[Array]) -> Array:
    """Return the seconds of all stages and links in a row; groups and cuts are broadcast.

    >>> concatenate([np.ones((3, 1, 1, 1)), np.ones((3, 2, 4, 5))]).shape
    (3, 3, 4, 5)
    """
    shape = np.broadcast_shapes(*(part.shape[2:] for part in parts))
    return np.concatenate([np.broadcast_to(part, (*part.shape[:2], *shape)) for part in parts], axis=1)


class StageSeconds:
    """Prices of stages and links by width, level and cut.

    As arrays ``[seconds, stage or link, group of devices, cut]``, whose seconds are of forward, backward and reduction.
    """

    def __init__(self, prices: Prices) -> None:
        # Width 0 does not occur; its row makes widths indices.
        widths = (1, *range(1, prices.device_count + 1))
        levels = ["node", prices.outer] if len(prices.servers) > 1 else [prices.outer]
        self._computing = np.stack([[of(width) for width in widths] for of in (prices.forward_s, prices.backward_s)])
        sent = [[[of(level, width) for width in widths] for level in levels] for of in (prices.forth_s, prices.back_s)]
        self._links = np.stack([*sent, np.zeros_like(sent[0])])
        self._rates = np.array([[prices.reduce_rate(width, level) for width in widths] for level in levels])
        self._weights, self._single = prices.weights_bytes, prices.single

    def stage(self, groups: DeviceGroups, first: Indices, stop: Indices) -> Array:
        """Return a stage of layers ``first:stop`` on every group."""
        widths = groups.widths
        forward, backward = self._computing[:, widths, stop] - self._computing[:, widths, first]
        forward = forward + np.where(widths > 1, NEVER_S, 0.0) * (self._single[stop] > self._single[first])
        reduce = self._rates[groups.levels_to(groups), widths] * (self._weights[stop] - self._weights[first])
        return np.stack([forward, backward, reduce])[:, None]

    def link(self, ahead: DeviceGroups, behind: DeviceGroups, cut: Indices) -> Array:
        """Return the links between groups at a cut; the finer of two divisions makes the messages."""
        return self._links[:, ahead.levels_to(behind), np.maximum(ahead.widths, behind.widths), cut][:, None]


OVERHEAD = 150_000
"""What numpy's calls for one (j, g) take, in the time of array elements."""


class DapplePlan(NamedTuple):
    """A whole plan, and its estimate."""

    latency_s: float
    proposal: Proposal


class _Point(NamedTuple):
    """A (j, g): layers planned, and the state of the nodes."""

    layers: int
    state: Alike


class _LatencyTable(NamedTuple):
    """TPL(j, g) of all j of one g."""

    latency_s: Array
    before: list[_Point | None]
    """The (j, g) that was split."""
    free: list[Free]
    """Devices that are left of every node."""


class _PlannedStages(NamedTuple):
    """The stages and links of a (j, g), the devices of its last planned stage, those left, and what it was split of."""

    seconds: Array
    group: DeviceGroups | None
    free: Free
    before: _Point | None


def propose(prices: Prices) -> list[Proposal]:
    """Return DAPPLE's plan; none where every plan has more replicas of a stage than a micro-batch has samples."""
    found = DappleSearch(prices).go()
    return [] if found is None else [found.proposal]


def work(prices: Prices) -> int:
    """Return how many array elements a proposal takes."""
    layers, devices = prices.layer_count, prices.device_count
    each = layers * (OVERHEAD + 20 * layers * devices)
    return each * reachable(tuple(map(len, prices.servers)), 10**10 // each)


class DappleSearch:
    """The tables of all (j, g), and what their plans are made of."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.layers = prices.layer_count
        self.sizes: Free = tuple(map(len, prices.servers))
        self.seconds = StageSeconds(prices)
        self.tables: defaultdict[Alike, _LatencyTable] = defaultdict(
            lambda: _LatencyTable(np.full(self.layers, np.inf), [None] * self.layers, [()] * self.layers)
        )
        self.planned_stages: dict[_Point, _PlannedStages] = {}
        self.choice = cache(partial(choose, sizes=self.sizes, rows=prices.most_replicas))

    def go(self) -> DapplePlan | None:
        """Fill the tables, fewer layers first; return the plan of least latency whose replicas all have a sample."""
        start = _Point(0, alike(self.sizes, self.sizes))
        self.planned_stages[start] = _PlannedStages(np.zeros((3, 0, 1, 1)), None, self.sizes, None)
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
        placeable = [each for each in found if sum(self.planned_stages[each[1]].free) <= self.prices.most_replicas]
        if not placeable:
            return None
        latency, point = min(placeable, key=lambda each: each[0])
        return DapplePlan(latency, self._proposal(point))

    def _proposal(self, point: _Point | None) -> Proposal:
        """Return the plan of a (j, g): its stages, and the last one on all devices that are left."""
        stops, left = [self.layers], [(0,) * len(self.sizes)]
        while point is not None:
            planned = self.planned_stages[point]
            stops.insert(0, point.layers)
            left.insert(0, planned.free)
            point = planned.before
        devices = []
        for before, after in pairwise(left):
            spans = zip(self.prices.servers, before, after, strict=True)
            taken = [each for server, start, stop in spans for each in server[len(server) - start : len(server) - stop]]
            devices.append(tuple(sorted(taken)))
        return Proposal(tuple(stops[1:]), tuple(devices))

    def _split(self, point: _Point) -> None:
        """Split the last stage of a (j, g) in every way."""
        planned, stops = self.planned_stages[point], np.arange(point.layers + 1, self.layers)
        choice = self.choice(planned.free)
        if not choice.free_after or not len(stops):
            return
        added = self._with_stage(planned, point.layers, stops, choice.groups)
        between = self.seconds.link(choice.groups, choice.rest, stops)
        rest = self.seconds.stage(choice.rest, stops, np.array([self.layers]))
        self._improve(point, stops, choice, self._latency_s(concatenate([*added, between, rest])))

    def _improve(self, point: _Point, stops: Indices, choice: GroupChoice, latency_s: Array) -> None:
        """Enter latencies ``[group, stop]`` where they are less than what is known."""
        tables = [self.tables[state] for state in choice.states]
        known = np.stack([table.latency_s[point.layers + 1 :] for table in tables])
        for at in np.flatnonzero((latency_s < known).any(axis=1)).tolist():
            table = tables[at]
            # Groups may lead to the same state, so that what is known may be less by now.
            better = np.flatnonzero(latency_s[at] < table.latency_s[stops])
            table.latency_s[stops[better]] = latency_s[at, better]
            for stop in stops[better].tolist():
                table.before[stop], table.free[stop] = point, choice.free_after[at]

    def _plan(self, point: _Point) -> None:
        """Keep the stages of a (j, g), now that no better ones can come."""
        table = self.tables[point.state]
        before, free = table.before[point.layers], table.free[point.layers]
        assert before is not None
        planned = self.planned_stages[before]
        choice = self.choice(planned.free)
        group = choice.groups.at(choice.free_after.index(free))
        seconds = concatenate(self._with_stage(planned, before.layers, np.array([point.layers]), group))
        self.planned_stages[point] = _PlannedStages(seconds, group, free, before)

    def _with_stage(
        self, planned_stages: _PlannedStages, first: int, stops: Indices, groups: DeviceGroups
    ) -> list[Array]:
        """Return a (j, g) with one stage more, on each of the groups."""
        at = np.array([first])
        stage = self.seconds.stage(groups, at, stops)
        if planned_stages.group is None:
            return [stage]
        return [planned_stages.seconds, self.seconds.link(planned_stages.group, groups, at), stage]

    def _latency_s(self, seconds: Array) -> Array:
        """Return the latencies ``[group, cut]``."""
        _, stages, *shape = seconds.shape
        forward_s, backward_s, reduce_s = seconds.reshape(3, stages, -1)
        return latency_s(forward_s, backward_s, reduce_s, self.prices.micro_batches).reshape(shape)
