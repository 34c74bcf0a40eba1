"""Paced: of the plans whose stages all keep a pace, one with a short round trip; where the search starts on large
problems.

A stage keeps a pace if a micro-batch takes it no longer, and if it may have as many in flight as that takes
(:mod:`autopar.planner.depths`). From the last stage to the first, the suffix with the shortest round trip is kept for
every state of the pool: it needs the fewest in flight, and a step takes about its round trip, and a pace for every
further micro-batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.areas import Counts
from autopar.planner.caps import Capped
from autopar.planner.options import PlanOptions
from autopar.planner.stages import Next, StageTables
from autopar.planner.states import States

__all__ = ["Chosen", "Paced"]

Numbers = npt.NDArray[np.float32]
ROUNDING = 1e-5
"""Of the kept numbers, which are rounded for speed; what a plan takes is simulated in full."""
BAND, LEAST_BAND = 0.2, 8
"""Of the devices that are to spare, how far from its part of them a suffix may be; and how far in any case."""


class Chosen(NamedTuple):
    """One stage of a plan."""

    first: int
    stop: int
    way: int
    state: int
    """Of the pool, before."""


class _Suffixes(NamedTuple):
    """Of every position and state, the suffix that is kept; arrays ``[position, state]``."""

    trip_s: Numbers
    """Its round trip; infinite where none keeps the pace."""
    done_s: Numbers
    """From the end of its first stage's last backward to that of everything."""
    ahead: Numbers
    """How many more a stage before needs in flight than its round trip takes, as what is behind keeps it waiting."""
    way: Counts
    """Of its first stage."""
    stop: Counts


class Paced:
    """The plan of a family that keeps a pace with the shortest round trip."""

    def __init__(self, stages: StageTables, states: States, options: PlanOptions, pace_s: float) -> None:
        self.pace_s = pace_s
        self._stages, self._states = stages, states
        family, layers = stages.family, stages.layers
        self._capped = Capped(stages, stages.costs.profile.step_overhead_s + family.micro_batches * pace_s)
        self._micro_batches = family.micro_batches
        turning = [way.width if way.choice.division == "round-robin" else 1 for way in stages.ways]
        self._turning = np.array(turning, dtype=np.float64)
        """By way, how many replicas take turns."""
        self._turns = np.ceil(family.micro_batches / self._turning)
        # Replicas that take turns gain little where as many can share a micro-batch, and cost round trips.
        rows = family.micro_batch_size
        worth = (way.choice.division == "split" or way.width > rows for way in stages.ways)
        self._worth = np.array(list(worth))
        shape = (layers + 1, states.none + 1)
        short = np.full(shape, np.inf, np.float32), *np.zeros((2, *shape), np.float32)
        self._kept = _Suffixes(*short, *np.zeros((2, *shape), dtype=np.int64))
        ends = slice(stages.pool.empty, None) if options.use_all else slice(None)
        self._kept.trip_s[layers, ends] = 0.0
        self._kept.trip_s[layers, states.none] = np.inf
        if self._capped.possible:
            for first in reversed(range(layers)):
                self._fill(first)

    @property
    def step_s(self) -> float:
        """About how long a step takes; infinite where no plan keeps the pace."""
        return float(self._kept.trip_s[0, 0] + self._kept.done_s[0, 0]) + (self._micro_batches - 1) * self.pace_s

    def chosen(self) -> list[Chosen]:
        """Return the plan's stages."""
        found = []
        first = state = 0
        while first < self._stages.layers:
            way, stop = int(self._kept.way[first, state]), int(self._kept.stop[first, state])
            found.append(Chosen(first, stop, way, state))
            first, state = stop, int(self._states.after[way, state])
        return found

    def _fill(self, first: int) -> None:
        following = self._capped.of(first, self._worth)
        states = np.flatnonzero(self._near(first))
        if not len(following.way) or not len(states):
            return
        prices = self._prices(following)
        some = np.flatnonzero((prices[3] >= 1).any(axis=0))
        if len(some):
            way, stops = following.way[some], first + following.length[some]
            self._keep(first, way, stops, states, prices[:, :, some])

    def _near(self, first: int) -> npt.NDArray[np.bool_]:
        """States that leave to the layers before and behind about their part of the devices that the pace can spare."""
        before, behind = self._capped.fewest[:, first]
        left = self._states.left
        spare, used = left[0] - before - behind, left[0] - left
        share = before + spare * before / max(1.0, before + behind)
        fair = np.abs(used - share) <= max(LEAST_BAND, BAND * spare)
        return np.asarray(fair & (before <= used) & (behind <= left))

    def _prices(self, following: Next) -> Numbers:
        """A stage's round trip, its way back, what follows it, and its room, ``[price, place and levels, stage]``."""
        forward_s, backward_s, work_s, closing_s, rate, _ = following.stages[:, :, None]
        _, _, forth_s, back_s, _, _ = following.links[:, None]
        # What a stage holds for one before that has more in flight, and recomputing, are estimated from below: one
        # more in flight must fit, too, unless all do.
        turns, turning = self._turns[following.way], self._turning[following.way]
        most = turns / rate
        room = np.where(most >= turns, self._micro_batches, (np.floor(most + ROUNDING) - 1) * turning)
        room = np.where(work_s <= self._micro_batches * self.pace_s * (1 + ROUNDING), room, -1.0)
        found = (forward_s + backward_s + forth_s + back_s, backward_s + back_s, closing_s, room)
        every = np.stack(np.broadcast_arrays(*found)).astype(np.float32)
        return every.reshape(4, -1, len(following.way))

    def _keep(self, first: int, way: Counts, stops: Counts, states: Counts, prices: Numbers) -> None:
        where = np.take(np.take(self._states.codes, states, axis=1), way, axis=0)
        where = where * len(way) + np.arange(len(way))[:, None]
        around_s, back_s, closing_s, room = (np.take(each, where) for each in prices)
        behind = self._states.behind(way, states) + stops[:, None] * self._kept.trip_s.shape[1]
        trip_s, done_s, ahead = (np.take(each, behind) for each in self._kept[:3])
        trip_s += around_s
        wanted = trip_s * np.float32(1 / self.pace_s)
        wanted += ahead
        done_s -= back_s
        np.maximum(done_s, closing_s, out=done_s)
        total_s = trip_s + done_s
        total_s[wanted > room * np.float32(1 + ROUNDING)] = np.inf
        best, column = total_s.argmin(axis=0), np.arange(len(states))
        found = np.isfinite(total_s[best, column])
        best, column, states = best[found], column[found], states[found]
        trip_s, in_flight = trip_s[best, column], np.ceil(wanted[best, column] * (1 - ROUNDING))
        in_flight = np.ceil(in_flight / self._turning[way[best]]) * self._turning[way[best]]
        waiting = np.minimum(in_flight, self._micro_batches) - 1 + (around_s[best, column] - trip_s) / self.pace_s
        self._kept.trip_s[first, states] = trip_s
        self._kept.done_s[first, states] = done_s[best, column]
        self._kept.ahead[first, states] = np.maximum(ahead[best, column], waiting)
        self._kept.way[first, states] = way[best]
        self._kept.stop[first, states] = stops[best]
