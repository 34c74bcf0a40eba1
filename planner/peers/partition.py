"""Partition: the layers of one virtual worker on its devices, so that the slowest stage is fastest.

Park et al., 2020 (:mod:`autopar.planner.peers.hetpipe`), state this as an integer program: of all orders of the
devices and all cuts, those whose stages fit the memory, at the micro-batches that each has in flight, and of these the
one with the least of the longest stage, whose time is its computing and the receiving of its activations and gradients.
Here it is a dynamic program over (devices taken, the last of them, the one that follows, layers placed):

    A(D + d, d, n, j) = min over i < j, p in D of max( A(D, p, d, i),  c_p(i) + t_d(i, j) + c'_n(j) )

with t_d(i, j) the forward and backward of layers i:j on d, c_p(i) and c'_n(j) the activations from p and the gradients
from n. Devices that prices cannot tell apart count as one sort.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from autopar.formats.cluster import Level
from autopar.planner.costs import memoize
from autopar.planner.costs.memory import Parts, PeakTerms, peak_of
from autopar.planner.costs.model import CostModel
from autopar.planner.peers.prices import Array, Indices, Prices, between

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


class PipelineCounts(NamedTuple):
    """What a stage's memory depends on besides its layers and device."""

    in_flight: int
    """Micro-batches of a virtual worker in its pipeline at once: the paper's Nm."""
    turns: int
    """Micro-batches of a step that a virtual worker is given."""
    workers: int


class Partition(NamedTuple):
    """A virtual worker's stages: they end before the layers ``cuts`` and are on devices of the ``sorts``."""

    slowest_s: float
    cuts: tuple[int, ...]
    sorts: tuple[int, ...]


class _BestPipelines(NamedTuple):
    """The best pipelines by the layers placed: their slowest stage, and where and behind which sort the last begins."""

    slowest_s: Array
    first: Indices
    before: Indices


def depths(stages: int, pipeline: PipelineCounts) -> tuple[int, ...]:
    """Return the micro-batches in flight in each stage.

    Between a micro-batch's forward in stage s of S and its backward there lie 2 (S - s) stages' work, in which as many
    others may enter.

    >>> depths(3, PipelineCounts(4, 8, 1)), depths(3, PipelineCounts(9, 8, 1))
    ((4, 3, 1), (5, 3, 1))
    """
    most = min(pipeline.in_flight, pipeline.turns)
    return tuple(min(most, 2 * behind + 1) for behind in range(stages - 1, -1, -1))


def makeup_of(costs: CostModel, devices: Sequence[int]) -> tuple[Makeup, list[list[int]]]:
    """Return what devices make up, and the devices of every sort: those that could change places unnoticed."""
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
        known = next((sort for sort in alike if _alike(costs, sort[0], same[0], [*sort[1:2], *same[1:2], *some])), None)
        if known is None:
            alike.append(list(same))
        else:
            known += same
    place = {device: at for at, device in enumerate(devices)}
    sorts = [sorted(sort, key=place.__getitem__) for sort in alike]
    firsts = [sort[0] for sort in sorts]
    # A sort of one has no link of its own.
    levels = tuple(tuple(links.level((one, sort[-1])) for sort in sorts) for one in firsts)
    kinds, limits = (tuple(of[device] for device in firsts) for of in (costs.kind_of, costs.limits_bytes))
    return Makeup(kinds, limits, tuple(map(len, sorts)), levels), sorts


def _alike(costs: CostModel, one: int, other: int, devices: Sequence[int]) -> bool:
    level = costs.links.level
    return (
        costs.kind_of[one] == costs.kind_of[other]
        and costs.limits_bytes[one] == costs.limits_bytes[other]
        and all(level((one, each)) == level((other, each)) for each in devices if each not in (one, other))
    )


class Partitioner:
    """Partitions virtual workers at one micro-batch count."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.costs, self.rows = prices, prices.costs, prices.rows
        self.layers = prices.layer_count

    @memoize
    def partition(self, makeup: Makeup, pipeline: PipelineCounts) -> Partition | None:
        """Return the partition whose slowest stage is fastest; none where no partition fits.

        A stage's memory is reckoned with every tensor that it sends read by one stage.
        """
        return _PartitionSearch(self, makeup, pipeline).go()

    def stage_s(self, kind: int, pipeline: PipelineCounts) -> Array:
        """Return the forward and backward of layers ``[first, stop]``; infinite where there are none."""
        adding = self.costs.adding(pipeline.turns, pipeline.workers)
        sums = np.array(self.costs.sums.forward(self.rows, kind=kind))
        sums = sums + np.array(self.costs.sums.backward(self.rows, adding, kind=kind))
        return between(sums)[:-1]

    @memoize
    def parts(self, kind: int) -> Parts:
        """Return what layers ``[first, stop]`` hold on a kind of device."""
        return self.costs.memory[kind].by_stop(self.rows)


class _PartitionSearch:
    def __init__(self, owner: Partitioner, makeup: Makeup, pipeline: PipelineCounts) -> None:
        self.owner, self.makeup, self.pipeline = owner, makeup, pipeline
        self.stages = sum(makeup.counts)
        self.depths = depths(self.stages, pipeline)
        self.sorts = range(len(makeup.counts))
        self.seconds = [owner.stage_s(kind, pipeline) for kind in makeup.kinds]
        self.best: dict[tuple[Counts, int, int], _BestPipelines] = {}

    def go(self) -> Partition | None:
        """Fill the tables, fewer devices first; return the best whole partition."""
        if self.stages > self.owner.layers:
            return None
        ranges = (range(count + 1) for count in self.makeup.counts)
        for taken in sorted(product(*ranges), key=lambda counts: (sum(counts), counts))[1:]:
            for sort in self.sorts:
                if taken[sort]:
                    self._extend(taken, sort)
        ends = [(float(self.best[self.makeup.counts, sort, END].slowest_s[-1]), sort) for sort in self.sorts]
        slowest_s, sort = min(ends)
        return None if np.isinf(slowest_s) else self._backtrack(slowest_s, sort)

    def _extend(self, taken_counts: Counts, sort: int) -> None:
        """Find the best pipelines that end with a device of a sort."""
        before = _less(taken_counts, sort)
        stage_s, prices, levels = self._fitting(sum(before), sort), self.owner.prices, self.makeup.levels[sort]
        ahead = list(self._ahead(before, sort))
        following = [each for each in self.sorts if taken_counts[each] < self.makeup.counts[each]] or [END]
        for after in following:
            whole_s = stage_s + (0.0 if after == END else prices.back_s(levels[after]))
            self.best[taken_counts, sort, after] = _least(ahead, whole_s)

    def _fitting(self, position: int, sort: int) -> Array:
        """Return the seconds of stages ``[first, stop]`` at a position; infinite where they do not fit."""
        lead = self.depths[position - 1] - self.depths[position] if position else 0
        _, turns, workers = self.pipeline
        held = PeakTerms(self.owner.rows, self.depths[position], turns, workers, lead)
        peaks = np.asarray(peak_of(self.owner.parts(self.makeup.kinds[sort]), held))
        return np.where(peaks <= self.makeup.limits_bytes[sort], self.seconds[sort], np.inf)

    def _ahead(self, before: Counts, sort: int) -> Iterator[tuple[int, Array, Array]]:
        """Yield (sort before, slowest stage so far, seconds of receiving from it) by the layer that is next."""
        layers = self.owner.layers
        if not any(before):
            yield END, np.where(np.arange(layers) == 0, 0.0, np.inf), np.zeros(layers)
            return
        for each in self.sorts:
            if before[each]:
                received = self.owner.prices.forth_s(self.makeup.levels[sort][each])[:-1]
                yield each, self.best[before, each, sort].slowest_s[:-1], received

    def _backtrack(self, slowest_s: float, sort: int) -> Partition:
        cuts: list[int] = []
        sorts: list[int] = []
        taken, after, stop = self.makeup.counts, END, self.owner.layers
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


def work(makeup: Makeup, layers: int) -> int:
    """Return how many array elements a partition takes."""
    sorts = len(makeup.counts)
    return prod(count + 1 for count in makeup.counts) * sorts**2 * (OVERHEAD + sorts * (layers + 1) ** 2)
