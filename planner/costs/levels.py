"""Levels: sets of layers to recompute, each a part of the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload


class Levels:
    """Sets of the first so many layers of an order, from none to all.

    >>> levels = Levels([4, 2, 3])
    >>> len(levels), sorted(levels[2]), levels.within(2, 3, 5)
    (4, [2, 4], (4,))
    """

    def __init__(self, order: Sequence[int]) -> None:
        """Take the layers in the order in which they join."""
        self._order = tuple(order)
        self._rank = {layer: rank for rank, layer in enumerate(self._order)}
        self._sets: dict[int, frozenset[int]] = {}

    def __len__(self) -> int:
        return len(self._order) + 1

    def __getitem__(self, level: int) -> frozenset[int]:
        level = range(len(self))[level]
        if level not in self._sets:
            self._sets[level] = frozenset(self._order[:level])
        return self._sets[level]

    def within(self, level: int, first: int, stop: int) -> tuple[int, ...]:
        """Return the layers of a level that a stage holds, ascending."""
        return tuple(layer for layer in range(first, stop) if self._rank.get(layer, level) < level)

    def rank(self, layer: int) -> int | None:
        """Return where in the order a layer stands; None where it is never recomputed."""
        return self._rank.get(layer)

    def ranks(self, first: int, stop: int) -> list[int]:
        """Return where in the order a stage's layers stand, ascending."""
        return sorted(self._rank[layer] for layer in range(first, stop) if layer in self._rank)


class Span(NamedTuple):
    """How many of its own layers a stage may recompute, the first ones of the order: from ``low`` to ``high``."""

    levels: Levels
    low: int = 0
    high: int | None = None
    """None: all."""

    def within(self, first: int, stop: int) -> Sets:
        """Return the sets of layers, the fewest first.

        >>> list(Span(Levels([4, 2, 3])).within(3, 5)), list(Span(Levels([4, 2, 3]), 1, 1).within(3, 5))
        ([(), (4,), (3, 4)], [(4,)])
        """
        bounds = [0, *(rank + 1 for rank in self.levels.ranks(first, stop))]
        high = len(bounds) - 1 if self.high is None else min(self.high, len(bounds) - 1)
        return Sets(self.levels, bounds[min(self.low, high) : high + 1], first, stop)


class Sets(Sequence[tuple[int, ...]]):
    """Sets of a stage's layers, made when they are asked for: of a long stage there are many."""

    def __init__(self, levels: Levels, bounds: Sequence[int], first: int, stop: int) -> None:
        self._levels, self._bounds, self._first, self._stop = levels, bounds, first, stop

    def __len__(self) -> int:
        return len(self._bounds)

    @overload
    def __getitem__(self, index: int) -> tuple[int, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[int, ...]]: ...

    def __getitem__(self, index: int | slice) -> tuple[int, ...] | list[tuple[int, ...]]:
        if isinstance(index, slice):
            return [self._levels.within(each, self._first, self._stop) for each in self._bounds[index]]
        return self._levels.within(self._bounds[index], self._first, self._stop)
