"""Sums: seconds of all layers before a position, with what recomputation and sharding add to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from autopar.formats.cluster import Level
from autopar.formats.plan import SCATTERING, Shard
from autopar.formats.profile import Layer
from autopar.planner.costs.layers import LayerCosts
from autopar.planner.costs.links import Collective, LinkModel

Slower = Mapping[Level, tuple[float, float]]
"""By level, how many times as long computing, and communicating, take while the other goes on."""


class StageSums:
    """Sums of forwards and backwards of stages, by kind of device."""

    def __init__(
        self, costs: Sequence[LayerCosts], layers: Sequence[Layer], links: LinkModel, slower: Slower, *, waits: bool
    ) -> None:
        """Take what is known of the layers.

        Args:
            costs: times, by kind of device.
            layers: their bytes.
            links: prices of gathering and scattering.
            slower: as far as the cluster says.
            waits: whether a device gathers and scatters between its computations, and not beside them.
        """
        self._costs, self._layers, self._links = costs, layers, links
        self._slower, self.waits = slower, waits
        self._sums: dict[object, list[float]] = {}

    def forward(
        self, rows: float, shard: Shard = "none", ranks: int = 1, level: Level = "node", kind: int = 0
    ) -> list[float]:
        """Return, for every position, the seconds of the forwards of all layers before it.

        Where parameters are sharded, a layer's are gathered while the layer before computes.
        """
        if shard != "parameters":
            return self._costs[kind].forward_sums(rows)
        key = ("forward", rows, ranks, level, kind)
        if key not in self._sums:
            moved = self.gathers(ranks, level, kind)
            self._sums[key] = self._hidden(self._costs[kind].forward_sums(rows), moved, level)
        return self._sums[key]

    def backward(
        self,
        rows: float,
        adding: float,
        recompute: frozenset[int] = frozenset(),
        shard: Shard = "none",
        ranks: int = 1,
        level: Level = "node",
        kind: int = 0,
    ) -> list[float]:
        """Return, for every position, the seconds of the backwards of all layers before it.

        ``adding`` is the share of backwards that add to gradients, of sharded ones each rank to its part. Layers of
        ``recompute`` run forward again. Sharded gradients are reduced, and sharded parameters gathered, while another
        layer computes, unless the device waits for that.
        """
        communicating = shard in SCATTERING
        adding = adding / ranks if communicating else adding
        if not recompute and not communicating:
            return self._costs[kind].backward_sums(rows, adding)
        where = (shard, ranks, level) if communicating else ()
        key = ("backward", rows, adding, recompute, *where, kind)
        if key not in self._sums:
            layers = self._costs[kind]
            sums = layers.backward_sums(rows, adding)
            sums = _with_recomputation(sums, layers, rows, recompute)
            if communicating:
                moved = self.scatters(ranks, level, kind)
                if shard == "parameters":
                    moved = [one + other for one, other in zip(moved, self.gathers(ranks, level, kind), strict=True)]
                sums = self._hidden(sums, moved, level)
            self._sums[key] = sums
        return self._sums[key]

    def halves(
        self,
        rows: float,
        adding: float,
        recompute: frozenset[int] = frozenset(),
        shard: Shard = "none",
        ranks: int = 1,
        level: Level = "node",
        kind: int = 0,
    ) -> tuple[list[float], list[float]]:
        """Return :meth:`backward` of backwards in two halves: of the inputs', and of the weights'.

        The first half runs layers forward again and reads sharded parameters; the second adds to gradients, which
        sharded ones are reduced of.
        """
        layers = self._costs[kind]
        adding = adding / ranks if shard in SCATTERING else adding
        first, second = layers.input_sums(rows), layers.weight_sums(rows, adding)
        first = _with_recomputation(first, layers, rows, recompute)
        if shard == "parameters":
            first = self._hidden(first, self.gathers(ranks, level, kind), level)
        if shard in SCATTERING:
            second = self._hidden(second, self.scatters(ranks, level, kind), level)
        return first, second

    def _hidden(self, sums: Sequence[float], moved: Sequence[float], level: Level) -> list[float]:
        """Sums over layers that communicate while they compute."""
        both = (self._both_s(sums[at + 1] - sums[at], seconds, level) for at, seconds in enumerate(moved))
        return list(accumulate(both, initial=0.0))

    def _both_s(self, computing_s: float, moving_s: float, level: Level) -> float:
        """Return what computing and communicating take that begin together.

        Each is slowed by the other while it lasts.
        """
        if self.waits:
            return computing_s + moving_s
        slower = self._slower.get(level)
        if slower is None:
            return max(computing_s, moving_s)
        computing, moving = slower[0] * computing_s, slower[1] * moving_s
        if computing >= moving:
            both = computing_s + moving * (1 - 1 / slower[0])
        else:
            both = moving_s + computing * (1 - 1 / slower[1])
        return min(both, computing_s + moving_s)

    def gathers(self, ranks: int, level: Level, kind: int = 0) -> list[float]:
        """Return the seconds of gathering every layer's parameters."""
        return self._moved("all_gather", ranks, level, kind)

    def scatters(self, ranks: int, level: Level, kind: int = 0) -> list[float]:
        """Return the seconds of reducing every layer's gradients, each rank to its part."""
        return self._moved("reduce_scatter", ranks, level, kind)

    def in_turn_s(self, operation: Collective, first: int, stop: int, ranks: int, level: Level, kind: int = 0) -> float:
        """Return the seconds of gathering or scattering layers ``first:stop`` one by one."""
        key = ("in turn", operation, ranks, level, kind)
        if key not in self._sums:
            self._sums[key] = list(accumulate(self._moved(operation, ranks, level, kind), initial=0.0))
        return self._sums[key][stop] - self._sums[key][first]

    def _moved(self, operation: Collective, ranks: int, level: Level, kind: int) -> list[float]:
        key = (operation, ranks, level, kind)
        if key not in self._sums:
            found = []
            for layer, own in zip(self._layers, self._costs[kind].layers, strict=True):
                size = layer.parameters_bytes if operation == "all_gather" else layer.trainable_bytes
                copies_s = self._copies_s(operation, own, size, ranks, level)
                found.append(self._links.collective_s(operation, size, ranks, level) + copies_s)
            self._sums[key] = found
        return self._sums[key]

    def _copies_s(self, operation: Collective, layer: Layer, size_bytes: int, ranks: int, level: Level) -> float:
        """Return what copying a layer into and out of buffers takes a device that waits for it.

        Curves that were measured have it. Else, adding to gradients tells: it reads two numbers and writes one, where a
        copy reads and writes one. What is gathered is copied whole, and each rank's part before.
        """
        if ranks < 2 or not self.waits or not layer.trainable_bytes or self._links.copied(operation, level):
            return 0.0
        copies = 1 + 1 / ranks if operation == "all_gather" else 1.0
        return copies * 2 / 3 * layer.accumulate_s * size_bytes / layer.trainable_bytes


def _with_recomputation(sums: list[float], layers: LayerCosts, rows: float, recompute: frozenset[int]) -> list[float]:
    """Sums over layers, some of which run forward again."""
    if not recompute:
        return sums
    again = (layers.recompute_s(at, rows) if at in recompute else 0.0 for at in range(len(sums) - 1))
    return [before + more for before, more in zip(sums, accumulate(again, initial=0.0), strict=True)]
