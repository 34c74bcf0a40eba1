"""Capped: the stages that a plan of fewer seconds than a cap may have, and how many devices it needs at least."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autopar.planner.costs.areas import Counts
from autopar.planner.search.stages import Next, StageTables

SLACK = 1e-9

Numbers = npt.NDArray[np.float64]


class Capped:
    """Stage tables without the stages that alone take longer than ``cap_s``, a step's."""

    def __init__(self, stages: StageTables, cap_s: float = float("inf")) -> None:
        self.cap_s = cap_s
        self._stages = stages
        self.limit_s = (cap_s - stages.costs.profile.step_overhead_s) * (1 + SLACK)
        self._next: dict[int, tuple[Next, Numbers]] = {}
        self.fewest = self._fewest() if np.isfinite(cap_s) else np.zeros((2, stages.layers + 1))
        """Fewest devices of the layers before, and of those from on, every position."""

    @property
    def possible(self) -> bool:
        """Whether there are as many devices as the stages need, each for itself."""
        return bool(self.fewest[1, 0] <= len(self._stages.pool.remaining(0)))

    def next(self, first: int) -> Next:
        """Return the stages that may begin with a layer."""
        return self._stages.next(first) if not np.isfinite(self.cap_s) else self._kept(first)[0]

    def at(self, first: int, place: Counts) -> Next:
        """Return those of the stages that may meet the cap where they stand; ``place`` by way."""
        following = self.next(first)
        if not np.isfinite(self.cap_s):
            return following
        alone_s = self._kept(first)[1][place[following.way], np.arange(len(following.way))]
        return following.some(np.flatnonzero(alone_s <= self.limit_s))

    def _kept(self, first: int) -> tuple[Next, Numbers]:
        """The stages, and the seconds of a step of nothing else."""
        if first not in self._next:
            alone_s = self._stages.alone_s(first)
            some = np.flatnonzero(alone_s.min(axis=0, initial=np.inf) <= self.limit_s)
            self._next[first] = self._stages.next(first).some(some), alone_s[:, some]
        return self._next[first]

    def _fewest(self) -> Numbers:
        layers, widths = self._stages.layers, self._narrowest()
        found = np.full((2, layers + 1), np.inf)
        found[0, 0] = found[1, layers] = 0
        for first in range(layers):
            own = widths[first, : layers - first]
            behind = found[0, first + 1 : first + 1 + len(own)]
            np.minimum(behind, found[0, first] + own, out=behind)
        for first in reversed(range(layers)):
            own = widths[first, : layers - first]
            found[1, first] = (found[1, first + 1 : first + 1 + len(own)] + own).min()
        return found

    def _narrowest(self) -> Numbers:
        """Fewest devices of a stage that meets the cap, ``[first, length - 1]``."""
        spans, lengths = self._stages.spans, self._stages.lengths
        meets = np.flatnonzero(spans.alone_s <= self.limit_s)
        found = np.full((self._stages.layers, len(lengths)), np.inf)
        np.minimum.at(found, (spans.first[meets], spans.column[meets]), spans.width[meets])
        return found[:, np.searchsorted(lengths, np.arange(1, self._stages.longest + 1), side="right") - 1]
