"""Areas: what stages hold, as a sum of numbers that each count for some first layers and some stops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


class Area(NamedTuple):
    """A number that counts for stages ``first:stop`` with both in a range, ends included."""

    first_low: int
    first_high: int
    stop_low: int
    stop_high: int
    value: int


class Areas:
    """A sum of areas.

    >>> areas = Areas(3, [Area(0, 1, 2, 3, 5), Area(0, 0, 1, 3, 1)])
    >>> areas.at(0, 2), areas.at(1, 2), areas.at(0, 1)
    (6, 5, 1)
    >>> areas.window(3).tolist()
    [[1, 6, 6], [5, 5, 0], [0, 0, 0]]
    """

    def __init__(self, layers: int, areas: Iterable[Area]) -> None:
        """Take the areas, over the stages of so many layers."""
        self._layers = layers
        columns = np.array(list(areas), dtype=np.int64).reshape(-1, 5)
        self._columns = columns[(columns[:, 0] <= columns[:, 1]) & (columns[:, 2] <= columns[:, 3])]

    def at(self, first: int, stop: int) -> int:
        """Return the sum for one stage."""
        first_low, first_high, stop_low, stop_high, value = self._columns.T
        there = (first_low <= first) & (first <= first_high) & (stop_low <= stop) & (stop <= stop_high)
        return int(value[there].sum())

    def window(self, longest: int) -> Counts:
        """Return the sums of all stages of up to ``longest`` layers, ``[first, length - 1]``; 0 for those too long."""
        first_low, first_high, stop_low, stop_high, value = self._columns.T
        found = np.zeros((self._layers, longest), dtype=np.int64)
        for length in range(1, longest + 1):
            low = np.maximum(first_low, stop_low - length)
            high = np.minimum(np.minimum(first_high, stop_high - length), self._layers - length)
            there = low <= high
            steps = np.zeros(self._layers + 1, dtype=np.int64)
            np.add.at(steps, low[there], value[there])
            np.subtract.at(steps, high[there] + 1, value[there])
            found[:, length - 1] = np.cumsum(steps[:-1])
        return found


def windowed(sums: Counts, longest: int) -> Counts:
    """Return the differences of running sums, ``[first, length - 1]``; 0 for stages that are too long.

    >>> windowed(np.array([0, 1, 3, 6]), 2).tolist()
    [[1, 3], [2, 5], [3, 0]]
    """
    layers = len(sums) - 1
    stops = np.arange(layers)[:, None] + np.arange(1, longest + 1)
    found: Counts = sums[np.minimum(stops, layers)] - sums[:-1, None]
    found[stops > layers] = 0
    return found
