"""Ordered: the layers of all stages in the order in which they are recomputed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autopar.planner.costs.areas import Counts
from autopar.planner.costs.levels import Levels

Numbers = npt.NDArray[np.float64]
MOST_KEPT = 20_000_000
"""Numbers that tell which layers are summed, and are remembered."""


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
        inside = np.arange(longest) < lengths[:, None]
        own = np.minimum(np.arange(layers)[:, None] + np.arange(longest), layers)
        ranked = np.where(inside, ranks[own][:, None, :], layers)
        self._rank = np.argsort(np.argsort(ranked, axis=2, kind="stable"), axis=2)
        """Of every layer among those of a stage, ``[first, length, layer]``."""
        self._layers = own
        self.counts: Counts = (ranked < layers).sum(axis=2)
        """How many may be recomputed, ``[first, length]``."""
        self._chosen: dict[bytes, Numbers] = {}

    def sums(self, values: Numbers, counts: Counts) -> Numbers:
        """Return sums of the values of so many layers of every stage, ``[first, length]``."""
        key = counts.tobytes()
        if key not in self._chosen:
            if self._rank.size * (1 + len(self._chosen)) > MOST_KEPT:
                self._chosen.clear()
            self._chosen[key] = (self._rank < counts[:, :, None]).astype(np.float64)
        padded = np.append(values, 0.0)
        return np.asarray((self._chosen[key] @ padded[self._layers][:, :, None])[:, :, 0])
