"""Best: candidates judged by memory and simulation, and the best of them."""

from __future__ import annotations

import math
from typing import NamedTuple

from autopar.planner.candidate import Candidate
from autopar.planner.share_limits import crossed_limit
from autopar.planner.simulator.simulate import Simulator

__all__ = ["Best", "Found"]


class Found(NamedTuple):
    """A simulated candidate."""

    step_s: float
    candidate: Candidate


class Best:
    """The best candidates simulated so far, at large and by number of stages; the first of equals stays."""

    def __init__(self, cap_s: float = float("inf")) -> None:
        """Begin with no candidate; only those quicker than ``cap_s`` are of interest."""
        self._cap_s = cap_s
        self.found: Found | None = None
        self.by_stages: dict[int, Found] = {}
        self.closest: tuple[int, Candidate] | None = None
        """The least shortfall of memory among candidates that do not fit."""

    @property
    def step_s(self) -> float:
        """Seconds of the best candidate, or of the cap while there is none."""
        return self.found.step_s if self.found else self._cap_s

    def judge(self, simulator: Simulator, candidate: Candidate) -> float | None:
        """Simulate a candidate; return its seconds per step, or None where it does not fit, or breaks a share limit.

        Of one that is not the best of its number of stages, the seconds may be a lower bound.
        """
        if crossed_limit(simulator.costs, candidate.stages) is not None:
            return None
        short = max(simulator.costs.shortfalls(candidate))
        if short > 0:
            self.miss(short, candidate)
            return None
        rival = self.by_stages.get(len(candidate.stages))
        found = Found(simulator.step_s(candidate, math.inf if rival is None else rival.step_s), candidate)
        self.consider(found)
        return found.step_s

    def miss(self, short: int, candidate: Candidate) -> None:
        """Note a candidate that lacks ``short`` bytes."""
        if self.closest is None or short < self.closest[0]:
            self.closest = (short, candidate)

    def consider(self, found: Found) -> None:
        """Keep a simulated candidate if it is the best, at large or of its number of stages."""
        count = len(found.candidate.stages)
        if count not in self.by_stages or found.step_s < self.by_stages[count].step_s:
            self.by_stages[count] = found
        if found.step_s < self.step_s:
            self.found = found
