"""Capped: the stages that a plan of fewer seconds than a cap may have, and how many devices it needs at least."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autopar.planner.stages import Next, StageTables

__all__ = ["Capped"]

SLACK = 1e-9

Numbers = npt.NDArray[np.float64]


class Capped:
    """Stage tables without the stages that alone take longer than ``cap_s``, a step's."""

    def __init__(self, stages: StageTables, cap_s: float = float("inf")) -> None:
        self.cap_s = cap_s
        self._stages = stages
        self.limit_s = (cap_s - stages.costs.profile.step_overhead_s) * (1 + SLACK)
        self._next: dict[int, Next] = {}
        self._alone_s: dict[int, Numbers] = {}
        self.fewest = self._fewest() if np.isfinite(cap_s) else np.zeros((2, stages.layers + 1))
        """Fewest devices of the layers before, and of those from on, every position."""

    @property
    def possible(self) -> bool:
        """Whether there are as many devices as the stages need, each for itself."""
        return bool(self.fewest[1, 0] <= len(self._stages.pool.remaining(0)))

    def next(self, first: int) -> Next:
        """Return the stages that may begin with a layer."""
        if not np.isfinite(self.cap_s):
            return self._stages.next(first)
        if first not in self._next:
            following = self._stages.next(first)
            alone_s = following.alone_s()
            some = np.flatnonzero(alone_s.min(axis=0, initial=np.inf) <= self.limit_s)
            self._next[first] = following.some(some)
            self._alone_s[first] = alone_s[:, some]
        return self._next[first]

    def at(self, first: int, place: npt.NDArray[np.int64]) -> Next:
        """Return those of the stages that may meet the cap where they stand; ``place`` by way."""
        following = self.next(first)
        if not np.isfinite(self.cap_s):
            return following
        alone_s = self._alone_s[first][place[following.way], np.arange(len(following.way))]
        return following.some(np.flatnonzero(alone_s <= self.limit_s))

    def _fewest(self) -> Numbers:
        layers = self._stages.layers
        widths = np.array([way.width for way in self._stages.ways])
        found = np.full((2, layers + 1), np.inf)
        found[0, 0] = found[1, layers] = 0
        spans = [self._spans(first) for first in range(layers)]
        for first, (way, stops) in enumerate(spans):
            np.minimum.at(found[0], stops, found[0, first] + widths[way])
        for first in reversed(range(layers)):
            way, stops = spans[first]
            found[1, first] = (found[1, stops] + widths[way]).min(initial=np.inf)
        return found

    def _spans(self, first: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(way, stop) of every stage, each of those taken together."""
        following = self.next(first)
        count = following.longest - following.length + 1
        offsets = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        return np.repeat(following.way, count), first + np.repeat(following.length, count) + offsets
