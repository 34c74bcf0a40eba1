"""Ordered: the layers of all stages in the order in which they are recomputed."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from autopar.planner.costs.areas import Counts
from autopar.planner.costs.levels import Levels

__all__ = ["Ordered"]

Number = TypeVar("Number", np.int64, np.float64)


class Ordered:
    """Layers of every stage that may be recomputed, in their order, and sums over the first ones.

    >>> ordered = Ordered(Levels([2, 0]), 3, np.array([1, 3]))
    >>> ordered.counts.tolist(), ordered.sums(np.array([1.0, 5.0, 2.0]), np.array([[1, 1], [0, 0], [0, 1]])).tolist()
    ([[1, 2], [0, 1], [1, 1]], [[1.0, 2.0], [0.0, 0.0], [0.0, 2.0]])
    """

    def __init__(self, levels: Levels, layers: int, lengths: Counts) -> None:
        """Sort the layers of all stages.

        Args:
            levels: the order.
            layers: of the model.
            lengths: of the stages, ascending; those that would end behind the last layer are cut off there.
        """
        ranks = np.full(layers + 1, layers)
        for layer in range(layers):
            rank = levels.rank(layer)
            ranks[layer] = layers if rank is None else rank
        longest = int(lengths[-1])
        self._layers = np.full((layers, len(lengths), longest), layers)
        for column, length in enumerate(lengths.tolist()):
            own = np.minimum(np.arange(layers)[:, None] + np.arange(length), layers)
            order = np.argsort(ranks[own], axis=1, kind="stable")
            self._layers[:, column, :length] = np.take_along_axis(own, order, axis=1)
        self._layers[ranks[self._layers] == layers] = layers
        self.counts: Counts = (self._layers < layers).sum(axis=2)
        """How many may be recomputed, ``[first, length]``."""

    def sums(self, values: npt.NDArray[Number], counts: Counts) -> npt.NDArray[Number]:
        """Return sums of the values of so many layers of every stage, ``[first, length]``."""
        padded = np.append(values, np.zeros(1, dtype=values.dtype))
        running = np.cumsum(padded[self._layers], axis=2)
        last = np.clip(counts - 1, 0, running.shape[2] - 1)
        found = np.take_along_axis(running, last[:, :, None], axis=2)[:, :, 0]
        return np.where(counts > 0, found, np.zeros(1, dtype=values.dtype))
