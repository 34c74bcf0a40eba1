"""States: how stages move through the states of the pool."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.costs.areas import Counts
from autopar.planner.search.caps import Capped
from autopar.planner.search.stages import StageTables


class Group(NamedTuple):
    """States in which every way finds places that are alike."""

    states: Counts
    place: Counts
    """By way."""
    near: Counts


class States:
    """The states that every way leads to, and what it finds there."""

    def __init__(self, stages: StageTables) -> None:
        pool = stages.pool
        self.none = pool.states
        """A state that cannot be."""
        self.after = np.stack([move.after for move in stages.moves])
        """``[way, state]``."""
        self.left = pool.devices_left()
        """Devices."""
        nears = len(stages.nears)
        self.codes = np.stack([move.place * nears + move.near for move in stages.moves])
        """Where a way stands: its place, and the levels to the next stage, ``[way, state]``."""
        self.groups = self._grouped(nears)

    def group_of(self, state: int) -> Group:
        """Return the group that a state is in."""
        return self.groups[int(self._group[state])]

    def behind(self, ways: Counts, states: Counts) -> Counts:
        """Return the states that some ways lead to from some states, ``[way, state]``."""
        return np.take(np.take(self.after, states, axis=1), ways, axis=0)

    def standing(self, ways: Counts, states: Counts, count: int) -> Counts:
        """Return where some ways stand in some states, ``[way, state]``.

        These are positions in an array of ``count`` numbers, one per way in ``ways``, for every code.
        """
        found = np.take(np.take(self.codes, states, axis=1), ways, axis=0)
        found *= count
        found += np.arange(count)[:, None]
        return found

    def within(self, group: Group, first: int, capped: Capped) -> Counts:
        """Return the states of a group in which the layers before may have met a cap, and others still may."""
        before, behind = capped.fewest[:, first]
        left = self.left[group.states]
        found: Counts = group.states[(before <= self.left[0] - left) & (behind <= left)]
        return found

    def _grouped(self, nears: int) -> list[Group]:
        codes = self.codes.copy()
        # Where a way is impossible, its place does not matter: the state behind it cannot be.
        codes[self.after == self.none] = -1
        columns, index = np.unique(codes, axis=1, return_inverse=True)
        merged: list[Counts] = []
        target = np.zeros(columns.shape[1], dtype=np.int64)
        for at in np.argsort((columns < 0).sum(axis=0), kind="stable"):
            column = columns[:, at]
            alike = (known for known, other in enumerate(merged) if _agree(column, other))
            target[at] = known = next(alike, len(merged))
            if known == len(merged):
                merged.append(column)
            merged[known] = np.maximum(column, merged[known])
        self._group = target[index.ravel()]
        return [
            Group(np.flatnonzero(self._group == at), *np.divmod(np.maximum(each, 0), nears))
            for at, each in enumerate(merged)
        ]


def _agree(column: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> bool:
    return bool(((column == other) | (column < 0) | (other < 0)).all())
