"""HetPipe: how devices are dealt to pipelines that train a model together, and how each is cut.

Park et al., "HetPipe: Enabling Large DNN Training on (Whimpy) Heterogeneous GPU Clusters through Integration of
Pipelined Model Parallelism and Data Parallelism", USENIX ATC 2020. Each pipeline, a "virtual worker" with one device a
stage, is cut so that its slowest stage is fastest within the memory of its mini-batches in flight. Devices are dealt by
one of three policies:

- NP, node partition: every node is a virtual worker;
- ED, equal distribution: every virtual worker has as many devices of every node;
- HD, hybrid distribution: nodes are paired, the quickest with the slowest, and each pair is distributed equally to two
  virtual workers.

What they train, and how long that takes, is the weight policy ``wsp``'s: :mod:`autopar.planner.objectives.waves`.

The partition of one virtual worker's layers is an integer program in the paper: of all orders of the devices and all
cuts, those whose stages fit the memory, at the mini-batches that each has in flight, and of these the one with the
least of the longest stage, whose time is its computing and the receiving of its activations and gradients. Here it is a
dynamic program over (devices taken, the last of them, the one that follows, layers placed):

    A(D + d, d, n, j) = min over i < j, p in D of max( A(D, p, d, i),  c_p(i) + t_d(i, j) + c'_n(j) )

with t_d(i, j) the forward and backward of layers i:j on d, c_p(i) and c'_n(j) the activations from p and the gradients
from n. Devices that prices cannot tell apart count as one sort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import gcd, prod
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.formats.cluster import Level
from autopar.planner.candidate import divisors
from autopar.planner.costs import memoize
from autopar.planner.costs.activations import between
from autopar.planner.costs.model import CostModel
from autopar.planner.peers.prices import Array, Indices, Prices

Counts = tuple[int, ...]
OVERHEAD = 50_000
"""What numpy's calls for one entry of the tables take, in the time of array elements."""
END = -1
"""In place of the sort that follows the last stage's."""


class Makeup(NamedTuple):
    """What a virtual worker is made of, sort by sort."""

    kinds: tuple[int, ...]
    limits_bytes: tuple[int, ...]
    counts: Counts
    levels: tuple[tuple[Level, ...], ...]
    """Of the links between devices of two sorts."""


class Partition(NamedTuple):
    """A virtual worker's stages: they end before the layers ``cuts`` and are on devices of the ``sorts``."""

    slowest_s: float
    """Infinite where no stages fit."""
    cuts: tuple[int, ...]
    sorts: tuple[int, ...]


class _BestPipelines(NamedTuple):
    """The best pipelines by the layers placed: their slowest stage, and where and behind which sort the last begins."""

    slowest_s: Array
    first: Indices
    before: Indices


def depths(stages: int, in_flight: int) -> tuple[int, ...]:
    """Return the mini-batches in flight in each stage of a virtual worker, which has so many (the paper's Nm) at once.

    Between a mini-batch's forward in stage s of S and its backward there lie 2 (S - s) stages' work, in which as many
    others may enter.

    >>> depths(3, 4), depths(3, 9)
    ((4, 3, 1), (5, 3, 1))
    """
    return tuple(min(in_flight, 2 * behind + 1) for behind in range(stages - 1, -1, -1))


def makeup_of(costs: CostModel, devices: Sequence[int]) -> tuple[Makeup, list[list[int]]]:
    """Return what devices make up, and those of every sort, ascending: these could change places unnoticed."""
    links = costs.links
    places = links.topology.racks, links.topology.nodes, costs.kind_of, costs.limits_bytes
    on_node: dict[tuple[object, ...], list[int]] = {}
    for device in devices:
        on_node.setdefault(tuple(of[device] for of in places), []).append(device)
    # Whatever tells devices of different nodes apart, two of each node do.
    some = [device for same in on_node.values() for device in same[:2]]
    alike: list[list[int]] = []
    for same in on_node.values():
        # Those beside it are the likeliest to tell a device apart.
        known = next((sort for sort in alike if _same(costs, sort[0], same[0], [*sort[1:2], *same[1:2], *some])), None)
        if known is None:
            alike.append(list(same))
        else:
            known += same
    sorts = list(map(sorted, alike))
    firsts = [sort[0] for sort in sorts]
    # A sort of one has no link of its own.
    levels = tuple(tuple(links.level((one, sort[-1])) for sort in sorts) for one in firsts)
    kinds, limits = (tuple(of[device] for device in firsts) for of in (costs.kind_of, costs.limits_bytes))
    return Makeup(kinds, limits, tuple(map(len, sorts)), levels), sorts


def _same(costs: CostModel, one: int, other: int, devices: Sequence[int]) -> bool:
    level = costs.links.level
    return (
        costs.kind_of[one] == costs.kind_of[other]
        and costs.limits_bytes[one] == costs.limits_bytes[other]
        and all(level((one, each)) == level((other, each)) for each in devices if each not in (one, other))
    )


Peaks = Callable[[int, tuple[int, ...], int], npt.NDArray[np.int64]]
"""What layers ``[first, stop]`` hold on a kind of device, given the depths of all stages and which one they are."""


class Partitioner:
    """Partitions virtual workers, within the memory that their weight policy takes."""

    def __init__(self, prices: Prices, peaks: Peaks) -> None:
        self.prices, self.peaks = prices, peaks

    @memoize
    def partition(self, makeup: Makeup, in_flight: int) -> Partition:
        """Return the partition whose slowest stage is fastest, with so many mini-batches in flight.

        A stage's memory is reckoned with every tensor that it sends read by one stage.
        """
        return _PartitionSearch(self, makeup, in_flight).go()

    @memoize
    def stage_s(self, kind: int) -> Array:
        """Return the forward and backward of layers ``[first, stop]``; infinite where there are none."""
        return _stage_s(self.prices, kind)


def _stage_s(prices: Prices, kind: int) -> Array:
    forward, backward = prices.costs.seconds.running(prices.rows, prices.costs.adding(1, 1), kind)
    return between(np.array(forward) + np.array(backward))[:-1]


class _PartitionSearch:
    def __init__(self, owner: Partitioner, makeup: Makeup, in_flight: int) -> None:
        self.owner, self.makeup = owner, makeup
        self.layers = owner.prices.layer_count
        self.depths = depths(sum(makeup.counts), in_flight)
        self.sorts = range(len(makeup.counts))
        self.seconds = [owner.stage_s(kind) for kind in makeup.kinds]
        none = np.zeros(self.layers + 1, dtype=np.int64)
        start = _BestPipelines(np.where(np.arange(self.layers + 1) == 0, 0.0, np.inf), none, none)
        self.best = {((0,) * len(self.sorts), END, sort): start for sort in self.sorts}
        """By the devices taken, the sort of the last of them, and that of the one that follows."""

    def go(self) -> Partition:
        """Fill the tables, fewer devices first; return the best whole partition."""
        counts = self.makeup.counts
        for taken in sorted(product(*(range(count + 1) for count in counts)), key=sum)[1:]:
            for sort in self.sorts:
                if taken[sort]:
                    self._extend(taken, sort)
        slowest_s, sort = min((float(self.best[counts, sort, END].slowest_s[-1]), sort) for sort in self.sorts)
        return self._backtrack(slowest_s, sort) if slowest_s < np.inf else Partition(slowest_s, (), ())

    def _extend(self, taken_counts: Counts, sort: int) -> None:
        """Find the best pipelines that end with a device of a sort."""
        before = _less(taken_counts, sort)
        stage_s, prices, levels = self._fitting(sum(before), sort), self.owner.prices, self.makeup.levels[sort]
        ahead = []
        for each in [each for each in self.sorts if before[each]] or [END]:
            received_s = np.zeros(self.layers) if each == END else prices.forth_s(levels[each])[:-1]
            ahead.append((each, self.best[before, each, sort].slowest_s[:-1], received_s))
        following = [each for each in self.sorts if taken_counts[each] < self.makeup.counts[each]] or [END]
        for after in following:
            whole_s = stage_s + (0.0 if after == END else prices.back_s(levels[after]))
            self.best[taken_counts, sort, after] = _least(ahead, whole_s)

    def _fitting(self, position: int, sort: int) -> Array:
        """Return the seconds of stages ``[first, stop]`` at a position; infinite where they do not fit."""
        peaks = self.owner.peaks(self.makeup.kinds[sort], self.depths, position)
        return np.where(peaks <= self.makeup.limits_bytes[sort], self.seconds[sort], np.inf)

    def _backtrack(self, slowest_s: float, sort: int) -> Partition:
        cuts: list[int] = []
        sorts: list[int] = []
        taken, after, stop = self.makeup.counts, END, self.layers
        while stop:
            best = self.best[taken, sort, after]
            cuts.insert(0, stop)
            sorts.insert(0, sort)
            taken, after = _less(taken, sort), sort
            sort, stop = int(best.before[stop]), int(best.first[stop])
        return Partition(slowest_s, tuple(cuts), tuple(sorts))


def _less(counts: Counts, sort: int) -> Counts:
    return tuple(count - (index == sort) for index, count in enumerate(counts))


def _least(ahead: Sequence[tuple[int, Array, Array]], whole_s: Array) -> _BestPipelines:
    """Return the best last stages ``[first, stop]``, the first sort and layer of equals."""
    slowest = np.stack([np.maximum(known[:, None], whole_s + received[:, None]) for _, known, received in ahead])
    every = slowest.reshape(-1, slowest.shape[-1])
    chosen = every.argmin(axis=0)
    sorts = np.array([sort for sort, _, _ in ahead], dtype=np.int64)
    at = np.arange(every.shape[-1])
    return _BestPipelines(every[chosen, at], chosen % slowest.shape[1], sorts[chosen // slowest.shape[1]])


Policy = Literal["NP", "ED", "HD"]
Devices = tuple[int, ...]


class Allocation(NamedTuple):
    """The devices of every virtual worker."""

    policy: Policy
    workers: tuple[Devices, ...]


def allocations(nodes: Sequence[Sequence[Devices]], alone_s: Sequence[float]) -> list[Allocation]:
    """Return every allocation that uses all devices, the first of those that are alike.

    The papers' cluster has four nodes of four devices and four virtual workers; here ED has every number of them that
    divides the devices of all nodes.

    Args:
        nodes: of every node, its devices by kind.
        alone_s: of every device, the seconds of a mini-batch of the whole model on it.

    >>> for each in allocations([[(0, 1)], [(2, 3)]], [1.0, 1.0, 2.0, 2.0]):
    ...     print(each.policy, *each.workers)
    NP (0, 1) (2, 3)
    ED (0, 1, 2, 3)
    ED (0, 2) (1, 3)
    """
    found = [Allocation("NP", tuple(tuple(sorted(_all(node))) for node in nodes))]
    groups = [group for node in nodes for group in node]
    found += [Allocation("ED", _equal_workers(groups, count)) for count in divisors(gcd(*map(len, groups)))]
    order = sorted(range(len(nodes)), key=lambda at: (-sum(1 / max(alone_s[d], 1e-300) for d in _all(nodes[at])), at))
    pairs = [(*nodes[order[at]], *nodes[order[-1 - at]]) for at in range(len(nodes) // 2)]
    if len(nodes) % 2 == 0 and all(len(group) % 2 == 0 for group in groups):
        found.append(Allocation("HD", tuple(worker for pair in pairs for worker in _equal_workers(pair, 2))))
    first: dict[frozenset[Devices], Allocation] = {}
    for each in found:
        first.setdefault(frozenset(each.workers), each)
    return list(first.values())


def _all(node: Iterable[Devices]) -> list[int]:
    return [device for group in node for device in group]


def _equal_workers(groups: Sequence[Devices], count: int) -> tuple[Devices, ...]:
    """Return ``count`` workers with as many consecutive devices of every group."""
    return tuple(
        tuple(sorted(_all(group[len(group) * at // count : len(group) * (at + 1) // count] for group in groups)))
        for at in range(count)
    )


def allocate_workers(prices: Prices) -> list[Allocation]:
    """Return the allocations to several virtual workers with a layer for every device of each.

    Where a partition would take more than about a second, the allocation is left out.
    """
    costs = prices.costs
    nodes = []
    for server in prices.servers:
        groups: dict[tuple[int, int], list[int]] = {}
        for device in server:
            groups.setdefault((costs.kind_of[device], costs.limits_bytes[device]), []).append(device)
        nodes.append([tuple(group) for group in groups.values()])
    by_kind = {kind: float(_stage_s(prices, kind)[0, -1]) for kind in set(costs.kind_of)}
    every = allocations(nodes, [by_kind[kind] for kind in costs.kind_of])
    return [each for each in every if len(each.workers) > 1 and all(can_partition(costs, own) for own in each.workers)]


MOST_WORK = 10**9
"""Array elements that one virtual worker's partition may take."""


def can_partition(costs: CostModel, devices: Sequence[int]) -> bool:
    """Whether there is a layer for each of some devices, and their partition takes about a second at most."""
    if len(devices) > costs.layer_count:
        return False
    counts = makeup_of(costs, devices)[0].counts
    each = OVERHEAD + len(counts) * (costs.layer_count + 1) ** 2
    return prod(count + 1 for count in counts) * len(counts) ** 2 * each <= MOST_WORK
