"""DepthLimits: how many micro-batches in flight fit on all stages of one family, with some layers recomputed.

A stage recomputes the first so many of its layers in their order; what it then keeps of each micro-batch is what it
keeps without, less what these layers free. Devices hold as many as the bytes of each leave room for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from autopar.formats.plan import turns
from autopar.planner.candidate import Family
from autopar.planner.costs.activations import Counts, Numbers, rows_bytes, running
from autopar.planner.costs.layers import Levels
from autopar.planner.costs.memory import Parts, PeakTerms, lengths_swept, moments_of, peak_of
from autopar.planner.costs.model import UNLIMITED_BYTES, CostModel
from autopar.planner.placement import Pool
from autopar.planner.search.variants import Choice

MOST_KEPT = 20_000_000
"""Numbers that tell which layers are summed, and are remembered."""


class LayerOrder:
    """Layers of every stage that may be recomputed, in their order, and sums over the first ones.

    >>> ordered = LayerOrder(Levels([2, 0]), 3, np.array([1, 3]))
    >>> ordered.counts.tolist(), ordered.sums(np.array([1.0, 5.0, 2.0]), np.array([[1, 1], [0, 0], [0, 1]])).tolist()
    ([[1, 2], [0, 1], [1, 1]], [[1.0, 2.0], [0.0, 0.0], [0.0, 2.0]])
    """

    def __init__(self, levels: Levels, layers: int, lengths: Counts) -> None:
        """Sort the layers of stages of some ``lengths``, ascending; none goes on behind the last layer."""
        ranks = np.full(layers + 1, layers)
        ranks[list(levels.order)] = np.arange(len(levels.order))
        longest = int(lengths[-1])
        inside = np.arange(longest) < lengths[:, None]
        own = np.minimum(np.arange(layers)[:, None] + np.arange(longest), layers)
        ranked = np.where(inside, ranks[own][:, None, :], layers)
        self._rank = np.argsort(np.argsort(ranked, axis=2, kind="stable"), axis=2)
        """Of every layer among those of a stage, ``[first, length, layer]``."""
        self._layers = own
        self.counts: Counts = (ranked < layers).sum(axis=2)
        """How many may be recomputed, ``[first, length]``."""
        self._masks: dict[bytes, Numbers] = {}

    def sums(self, values: Numbers, counts: Counts) -> Numbers:
        """Return sums of the values of so many layers of every stage, ``[first, length]``."""
        key = counts.tobytes()
        if key not in self._masks:
            if self._rank.size * (1 + len(self._masks)) > MOST_KEPT:
                self._masks.clear()
            self._masks[key] = (self._rank < counts[:, :, None]).astype(np.float64)
        padded = np.append(values, 0.0)
        return np.asarray((self._masks[key] @ padded[self._layers][:, :, None])[:, :, 0])


MANY_LAYERS = 200
LEAD = 3
"""For how many more micro-batches than are in flight a gradient is on its way, where that is not known."""


class DepthLimits:
    """The memory of all stages of some lengths, ``[first, length]``."""

    def __init__(self, costs: CostModel, family: Family, pool: Pool) -> None:
        self.costs, self.family, self.pool = costs, family, pool
        self.layers = costs.layer_count
        self.lengths: Counts = np.arange(1, self.layers + 1)
        """Numbers of layers of the stages that are looked at, ascending; to be set before these are asked for."""
        self._parts: dict[tuple[object, ...], Parts] = {}
        self._orders: dict[int, LayerOrder] = {}
        self._depths: dict[tuple[Choice, int, int, int], Counts] = {}

    def reach(self, choices: Mapping[int, Sequence[Choice]]) -> int:
        """Return the layers of the longest stage that fits, or a few more."""
        # The most that any recomputation frees is that of all layers.
        every = {(kind, each._replace(part=0, every=each.recomputes)) for kind in choices for each in choices[kind]}
        for longest in lengths_swept(self.layers):
            fits = np.logical_or.reduce([self._fitting(kind, choice, longest) for kind, choice in every])
            if not fits[-1]:
                return int(np.flatnonzero(fits).max(initial=0)) + 1
        return self.layers

    def _fitting(self, kind: int, choice: Choice, longest: int) -> npt.NDArray[np.bool_]:
        """Whether any stage fits, by its number of layers."""
        limit = max(self.costs.limits_bytes[device] for device in self.pool.all_of(kind))
        widths = choice.widths(self.family.micro_batches, self.family.micro_batch_size, self.costs.divisible)
        width = min(widths.stop - 1, self.costs.kind_of.count(kind))
        fits = np.zeros((self.layers, longest), dtype=bool)
        if width >= widths.start:
            held = self.peak_terms(choice, min(self.shares(choice, width)), width)
            held = held if self.family.schedule == "gpipe" else held._replace(warmup=1)
            levels = self.costs.recompute_levels(self.family.micro_batch_size, kind)
            for level in (0, -1) if choice.recomputes else (0,):
                parts = self.costs.memory[kind].arrays(held.rows, levels[level], longest)
                fits |= np.asarray(peak_of(parts, held)) <= limit
        return np.asarray((fits & self._within_model(longest)).any(axis=0))

    def _within_model(self, longest: int) -> npt.NDArray[np.bool_]:
        """Which stages end with the last layer at the latest, ``[first, length - 1]``."""
        return np.tri(self.layers, longest, dtype=bool)[::-1]

    def binding(self, kind: int) -> bool:
        """Whether some stage of one replica may not fit with all micro-batches in flight."""
        limit = self.costs.limit_bytes(self.pool.all_of(kind))
        rows, count = self.family.micro_batch_size, self.family.micro_batches
        if self._holds_all(kind, rows, count, limit):
            return False
        if self.layers > MANY_LAYERS:
            return True
        parts = self.costs.memory[kind].arrays(rows, frozenset(), self.layers)
        short = np.asarray(peak_of(parts, PeakTerms(rows, count, count))) > limit
        return bool((short & self._within_model(self.layers)).any())

    def _holds_all(self, kind: int, rows: float, count: int, limit: int) -> bool:
        """Whether a limit is above what any stage may hold."""
        return limit >= UNLIMITED_BYTES or self.costs.memory[kind].most(rows, count) <= limit

    def depth(self, choice: Choice, kind: int, width: int, limit: int) -> Counts:
        """Return the most micro-batches in flight that fit, ``[first, length]``; 0 where none does."""
        key = (choice, kind, width, limit)
        if key not in self._depths:
            self._depths[key] = self._depth(*key)
        return self._depths[key]

    def _depth(self, choice: Choice, kind: int, width: int, limit: int) -> Counts:
        shares, count = self.shares(choice, width), self.turns(choice, width)
        if self._holds_all(kind, max(shares), count, limit):
            return np.full((self.layers, len(self.lengths)), count)
        # Of unequal shares the largest.
        every = [(self._parts_of(choice, rows, kind), rows) for rows in {max(shares), min(shares)}]
        found = [self._deepest(parts, self.peak_terms(choice, rows, width), limit) for parts, rows in every]
        return np.asarray(np.minimum.reduce(found))

    def sure_depth(self, choice: Choice, kind: int, width: int, limit: int) -> tuple[Counts, Numbers]:
        """Return micro-batches in flight that fit while as few layers are recomputed as the choice allows.

        With what a recomputed layer holds while it is at work, and what a stage holds for one that leads it by a few;
        :meth:`depth` takes both to be free. And how many gradients sent back hold as much as one micro-batch in flight.
        """
        rows = max(self.shares(choice, width))
        parts = self._parts_of(choice, rows, kind, sure=True)
        answered = np.maximum(1.0, np.asarray(rows_bytes(rows, parts.sent_gradients), dtype=np.float64))
        depth = self._deepest(parts, self.peak_terms(choice, rows, width)._replace(lead=LEAD), limit)
        return depth, np.asarray(parts.activations) / answered

    def shares(self, choice: Choice, width: int) -> tuple[float, ...]:
        """Return the rows that each replica takes."""
        return self.costs.shares(self.family.micro_batch_size, width, choice.division)

    def turns(self, choice: Choice, width: int) -> int:
        """Return how many micro-batches of a step the first replica takes part in."""
        return len(turns(choice.division, width, 0, self.family.micro_batches))

    def peak_terms(self, choice: Choice, rows: float, width: int) -> PeakTerms:
        """Return what the memory of a replica depends on, with all micro-batches in flight."""
        count = self.turns(choice, width)
        return PeakTerms(rows, count, count, width, shard=choice.shard)

    def layer_order(self, kind: int) -> LayerOrder:
        """Return the layers of all stages in the order in which they are recomputed."""
        if kind not in self._orders:
            levels = self.costs.recompute_levels(self.family.micro_batch_size, kind)
            self._orders[kind] = LayerOrder(levels, self.layers, self.lengths)
        return self._orders[kind]

    def _parts_of(self, choice: Choice, rows: float, kind: int, *, sure: bool = False) -> Parts:
        """What stages' peaks are made of, with as many layers recomputed as the choice allows.

        Where these are some of a stage's layers, all that each of them saves by itself is taken to be free; with
        ``sure``, as few are recomputed as the choice allows, and what the largest frees is held while it is at work.
        """
        none = self._whole_parts(rows, False, kind)
        if not choice.recomputes:
            return none
        key = (sure, rows, choice.part, choice.parts, choice.every, kind)
        if key not in self._parts:
            order, every = self.layer_order(kind), self._whole_parts(rows, True, kind)
            low, high = choice.recompute_range(order.counts)
            freed = np.array([self.costs.memory[kind].freed_bytes(layer, rows) for layer in range(self.layers)])
            # Sums of bytes are whole numbers that floats hold exactly.
            saved = np.rint(order.sums(freed.astype(np.float64), low if sure else high)).astype(np.int64)
            largest = running(freed, int(self.lengths[-1]), np.maximum)[:, self.lengths - 1]
            passing, whole = saved - largest if sure else saved, low == order.counts
            self._parts[key] = none._replace(
                activations=np.where(whole, every.activations, none.activations - saved),
                peak=np.where(whole, every.peak, none.peak - passing),
                first_peak=np.where(whole, every.first_peak, none.first_peak - passing),
            )
        return self._parts[key]

    def _whole_parts(self, rows: float, every: bool, kind: int) -> Parts:
        key = (rows, every, kind)
        if key not in self._parts:
            levels = self.costs.recompute_levels(self.family.micro_batch_size, kind)
            parts = self.costs.memory[kind].arrays(rows, levels[-1 if every else 0], int(self.lengths[-1]))
            self._parts[key] = Parts(*(np.asarray(each)[:, self.lengths - 1] for each in parts))
        return self._parts[key]

    def _deepest(self, parts: Parts, terms: PeakTerms, limit: int) -> Counts:
        """Most in flight that fit: all, or as many as the bytes that each takes leave room for."""
        count = terms.micro_batches
        deepest = np.where(peak_of(parts, terms) <= limit, count, 0)
        if self.family.schedule == "gpipe" or count == 1:
            return deepest
        one = terms._replace(warmup=1)
        computing, updating = moments_of(parts, one)
        more = np.maximum(0, limit - computing) // np.maximum(1, parts.activations)
        some = np.where(np.maximum(computing, updating) <= limit, np.minimum(count - 1, 1 + more), 0)
        return np.maximum(deepest, some)
