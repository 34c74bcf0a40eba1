"""Sums: seconds of all layers before a position, with what recomputation and sharding add to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from autopar.formats.plan import SCATTERING, Shard
from autopar.formats.profile import Layer
from autopar.planner.costs.layers import LayerCosts
from autopar.planner.costs.links import Level, LinkModel

__all__ = ["StageSums"]

Slower = Mapping[Level, tuple[float, float]]
"""By level, how many times as long computing, and communicating, take while the other goes on."""


class StageSums:
    """Sums of forwards and backwards of stages, by kind of device."""

    def __init__(
        self, costs: Sequence[LayerCosts], layers: Sequence[Layer], links: LinkModel, slower: Slower, *, alone: bool
    ) -> None:
        """Take what is known of the layers.

        Args:
            costs: times, by kind of device.
            layers: their bytes.
            links: prices of gathering and scattering.
            slower: as far as the cluster says.
            alone: where it does not say, whether a device computes and communicates in turn.
        """
        self._costs, self._layers, self._links = costs, layers, links
        self._slower, self._alone = slower, alone
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
            self._sums[key] = self._hidden(self._costs[kind].forward_sums(rows), self.gathers(ranks, level), level)
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

        ``adding`` is the share of backwards that add to gradients. Layers of ``recompute`` run forward again. Sharded
        gradients are reduced, and sharded parameters gathered, while another layer computes.
        """
        communicating = shard in SCATTERING
        if not recompute and not communicating:
            return self._costs[kind].backward_sums(rows, adding)
        where = (shard, ranks, level) if communicating else ()
        key = ("backward", rows, adding, recompute, *where, kind)
        if key not in self._sums:
            layers = self._costs[kind]
            sums = layers.backward_sums(rows, adding)
            sums = _with_recomputation(sums, layers, rows, recompute)
            if communicating:
                moved = self.scatters(ranks, level)
                if shard == "parameters":
                    moved = [one + other for one, other in zip(moved, self.gathers(ranks, level), strict=True)]
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
        first, second = layers.input_sums(rows), layers.weight_sums(rows, adding)
        first = _with_recomputation(first, layers, rows, recompute)
        if shard == "parameters":
            first = self._hidden(first, self.gathers(ranks, level), level)
        if shard in SCATTERING:
            second = self._hidden(second, self.scatters(ranks, level), level)
        return first, second

    def _hidden(self, sums: Sequence[float], moved: Sequence[float], level: Level) -> list[float]:
        """Sums over layers that communicate while they compute."""
        both = (self._both_s(sums[at + 1] - sums[at], seconds, level) for at, seconds in enumerate(moved))
        return list(accumulate(both, initial=0.0))

    def _both_s(self, computing_s: float, moving_s: float, level: Level) -> float:
        """Return what computing and communicating take that begin together.

        Each is slowed by the other while it lasts.
        """
        slower = self._slower.get(level)
        if slower is None:
            return computing_s + moving_s if self._alone else max(computing_s, moving_s)
        computing, moving = slower[0] * computing_s, slower[1] * moving_s
        if computing >= moving:
            both = computing_s + moving * (1 - 1 / slower[0])
        else:
            both = moving_s + computing * (1 - 1 / slower[1])
        return min(both, computing_s + moving_s)

    def gathers(self, ranks: int, level: Level) -> list[float]:
        """Return the seconds of gathering every layer's parameters."""
        sizes = (layer.parameters_bytes for layer in self._layers)
        return [self._links.collective_s("all_gather", size, ranks, level) for size in sizes]

    def scatters(self, ranks: int, level: Level) -> list[float]:
        """Return the seconds of reducing every layer's gradients, each rank to its part."""
        return [
            self._links.collective_s("reduce_scatter", layer.trainable_bytes, ranks, level) for layer in self._layers
        ]


def _with_recomputation(sums: list[float], layers: LayerCosts, rows: float, recompute: frozenset[int]) -> list[float]:
    """Sums over layers, some of which run forward again."""
    if not recompute:
        return sums
    again = (layers.recompute_s(at, rows) if at in recompute else 0.0 for at in range(len(sums) - 1))
    return [before + more for before, more in zip(sums, accumulate(again, initial=0.0), strict=True)]
