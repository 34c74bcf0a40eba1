"""Cadence: after which steps a run saves a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Literal

from autopar.errors import UsageError

Every = int | Literal["auto"]
SHARE = 0.03
"""Of training's time that checkpoints may take by default."""
FIRST = 5
"""Steps of an attempt before its first checkpoint, where what one takes decides."""


def known_every(every: int | str) -> Every:
    """Return how often to save.

    Raises:
        UsageError: it is neither a number of steps nor ``auto``.
    """
    if every == "auto":
        return "auto"
    if isinstance(every, str) and every.isdecimal():
        every = int(every)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"`every` must be a number of steps, at least 1, or 'auto'; found {every!r}")
    return every


class Cadence:
    """Says when a checkpoint is due: after so many steps, or as often as a share of the time allows.

    What a checkpoint takes is how long training waits for it, and what writing it takes of a processor: ranks that
    compute on the host's processors may wait for that, too. Pipelines that are never flushed are drained for one, and
    ask before they are filled: :meth:`next_after`.
    """

    def __init__(self, every: Every, first_step: int, most: Callable[[float], float]) -> None:
        """Begin.

        Args:
            every: a number of steps, counted from the run's first, or ``auto``.
            first_step: with which this attempt begins.
            most: returns the largest of the numbers that all ranks call it with.
        """
        self._every, self._most = every, most
        self._next = first_step + FIRST
        self._newest = first_step
        self._lengths_s: list[float] = []
        self._drains = False

    def add(self, step_s: float) -> None:
        """Take note of how long a step took."""
        self._lengths_s.append(step_s)

    def next_after(self, done: int, cost_s: Callable[[], float | None]) -> int:
        """Return after how many steps the next checkpoint is due; all ranks ask at once, and are told the same.

        Args:
            done: steps since the run's first.
            cost_s: returns what the checkpoint before took, the draining and filling of the pipeline included, once
                that is known; None if there was none.
        """
        if self._every != "auto":
            return (done // self._every + 1) * self._every
        count, self._drains, cost = FIRST, True, cost_s()
        if cost is not None and self._lengths_s:
            longest, most = self._most(median(self._lengths_s)), self._most(cost)
            count = max(1, math.ceil(most / (SHARE * longest))) if longest else FIRST
        self._next = done + count
        return self._next

    def due(self, done: int, cost_s: Callable[[], float | None]) -> bool:
        """Tell whether a checkpoint is due after so many steps; all ranks ask at once, and are told the same.

        Args:
            done: steps since the run's first.
            cost_s: returns what the checkpoint before took, once that is known; None if there was none.
        """
        if self._every != "auto":
            return done % self._every == 0
        if done < self._next or self._drains:
            return done == self._next
        cost = cost_s()
        if cost is not None:
            # The first step also sets up.
            step_s = median(self._lengths_s[1:] or self._lengths_s)
            longest, cost = self._most(step_s), self._most(cost)
            self._next = self._newest + max(1, math.ceil(cost / (SHARE * longest))) if longest else done
        if done < self._next:
            return False
        self._newest, self._next = done, done + FIRST
        return True
