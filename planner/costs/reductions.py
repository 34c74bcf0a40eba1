"""Reductions: seconds of summing gradients among a stage's replicas, and how much of them backwards hide.

At the end of a step the gradients of a stage's replicas are reduced: its layers, from the last to the first, fill
buckets. A bucket is reduced from the moment when the backward has left its layers and the bucket before is reduced;
sharded gradients are reduced layer by layer in every backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.hardware.topology import Place
from autopar.ownership import SCATTERING, Shard
from autopar.planner.costs import memoize
from autopar.planner.costs.communication import Flows
from autopar.planner.costs.curves import Collective
from autopar.planner.costs.layers import Launches, Site
from autopar.planner.costs.queues import PassSeconds
from autopar.schedules.buckets import buckets as grouped


class Reduction(NamedTuple):
    """Layers ``first:stop`` on one of the ranks that reduce their gradients."""

    first: int
    stop: int
    place: Place
    """Of the ranks that reduce together."""
    shard: Shard = "none"
    form: int = 0
    """Of the rank."""
    rows: float = 1.0
    """Of a micro-batch, that the rank takes."""
    split: bool = False
    """Whether the weight half of a backward makes the gradients, and not a whole one."""


class Reductions:
    """Prices reductions, each once."""

    def __init__(self, seconds: PassSeconds, flows: Sequence[Flows], *, divisible: bool) -> None:
        """Take the layers' times and bytes, by form, and whether gradients follow the whole backward."""
        self._seconds, self._sums, self._flows, self._divisible = seconds, seconds.sums, flows, divisible

    def occupied_s(self, reduction: Reduction) -> float:
        """Return the seconds that a step's last reduction occupies the link."""
        alone_s = self._without_buckets_s(reduction)
        return sum(seconds for _, seconds in self._bucket_times(*reduction[:5])) if alone_s is None else alone_s

    def buckets(self, first: int, stop: int, form: int = 0) -> list[tuple[int, int]]:
        """(layer whose backward completes the bucket, bytes), in the order of the reductions."""
        sizes = [self._reduced_bytes(layer, first, stop, form) for layer in range(first, stop)]
        return [(first + bucket[-1], sum(sizes[index] for index in bucket)) for bucket in grouped(sizes)]

    def _without_buckets_s(self, reduction: Reduction) -> float | None:
        """Return what is left to reduce after a step's last backward; None: buckets, as that backward completes them.

        Of gradients that every backward reduces, the first layer's. A device that waits for every scatter has nothing
        left of these; of others it has all, although the last backward reduces them layer by layer.
        """
        first, stop, place, shard, form, *_ = reduction
        scattering = shard in SCATTERING
        if self._sums.waits and shard != "none":
            sums = self._sums.in_turn_sums("reduce_scatter", place, form)
            return 0.0 if scattering else sums[stop] - sums[first]
        return self._sums.collectives_s("reduce_scatter", place, form)[first] if scattering else None

    @memoize
    def exposed_s(self, reduction: Reduction) -> float:
        """Return how long after the rank's last backward, or its weight half, the reduction ends."""
        alone_s = 0.0 if reduction.place.ranks == 1 else self._without_buckets_s(reduction)
        if alone_s is not None:
            return alone_s
        first, stop, sums = reduction.first, reduction.stop, self._backward_sums(reduction)
        free = 0.0
        for layer, seconds in self._bucket_times(*reduction[:5]):
            left = sums[stop] - sums[first if self._divisible else layer]
            free = max(free, left) + seconds
        return max(0.0, free - (sums[stop] - sums[first]))

    def _backward_sums(self, reduction: Reduction) -> list[float]:
        """Return running sums of layers' last backwards, in the queue that the stage waits for."""
        form = reduction.form
        costs, site = self._sums.costs[form], Site.of(reduction.shard, reduction.place, form)
        stage = reduction.first, reduction.stop, reduction.rows
        if costs.has_launches and self._seconds.is_launching(*stage, site):
            launched: Launches = "backward_weight_launch_s" if reduction.split else "backward_launch_s"
            return costs.sums(launched, reduction.rows, 1.0)
        return self._sums.computing("backward_weight_s" if reduction.split else "backward_s", reduction.rows, form, 1.0)

    @memoize
    def _bucket_times(self, first: int, stop: int, place: Place, shard: Shard, form: int) -> list[tuple[int, float]]:
        """(layer whose backward completes the bucket, seconds), in the order of the reductions."""
        operation: Collective = "all_reduce" if shard == "none" else "reduce_scatter"
        sizes, seconds = self.buckets(first, stop, form), self._sums.links.collective_s
        return [(layer, seconds(operation, size, place)) for layer, size in sizes]

    def _reduced_bytes(self, layer: int, first: int, stop: int, form: int) -> int:
        total = self._sums.layers[form][layer].trainable_bytes
        for tied in self._flows[form].tied:
            if tied.trainable and layer in tied.layers:
                shared = any(not first <= other < stop for other in tied.layers)
                # Within one stage the sum is complete when the backward leaves the first layer that uses it.
                if shared or any(first <= other < layer for other in tied.layers):
                    total -= tied.bytes
        return max(0, total)
