"""Trips: the least round trip of a family's plans that compute little beside it, and a lower bound of the step by it.

A step takes at least a micro-batch's round trip from the first stage, R(1), and what passes beside it, B. Unfolding the
bound (:mod:`autopar.planner.bounds`) of a plan with the round trips R(s) shows what B is no less than, at every
stage:

    (M / k - 1) R(s)        what it computes at least while none of R(s) passes        (M - 1) max(c, c')

For a given B, the last two say which stages may be in a plan, and the first one how long R(s) may be. So a suffix of
stages is better in nothing than another one of the same layers that has no longer round trip and takes no more devices:
the least R(s) of every position and state of the pool, of stages that all keep within B, are exact. Unlike in tables of
the least terms, round trips and work are of the same plan.

The least round trip falls as B grows: every plan with B in [low, high] takes low and the least of high. So from the cap
down, each range ends where these two no longer meet the cap; or, where the cap cannot be met, not far below. Then the
ranges in which they are least are halved.
"""

from __future__ import annotations

from heapq import heappush, heapreplace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.costs.activations import Counts, Numbers
from autopar.planner.options import PlanOptions
from autopar.planner.search.stages import StageTables
from autopar.planner.search.tables import States

PRICES = (0.0, 0.5, 1.0, 2.0)
"""Of a device, over its part of the longest round trip: some bound what takes few devices, some what takes many."""
ROUNDING = 1e-5
"""Of the kept numbers, which are rounded for speed; hundreds of sums err by less."""
REACH, AHEAD = 0.1, 2.0
"""Of the cap, what a first range may span at most; and of the range before, every further one."""
FINE, COARSE = 0.995, 0.95
"""Of a range's higher limit, the highest lower one, where what may come of it is near the cap, and elsewhere."""
ROUGH = 0.985
"""Of a range's higher limit, a lower one that is far enough for a round trip that is quickly bounded."""

Small = npt.NDArray[np.float32]


class _TripStages(NamedTuple):
    """Stages, one of every length, by their first layer; arrays over them."""

    first: Counts
    stop: Counts
    way: Counts
    width: Counts
    around_s: Numbers
    """Round trip over the stage and the boundary behind it, where it stands best."""
    rate: Numbers
    beside_s: Numbers
    """What it keeps within B where it stands best."""
    worst_s: Numbers
    """And where it stands worst."""
    group: Counts
    """Ascending; stages of one differ only in recomputation, and take ever longer."""
    each_around_s: Small
    """Wherever it stands, ``[place and level, stage]``."""
    each_rate: Numbers
    """``[place, stage]``."""
    each_beside_s: Numbers
    """``[place, stage]``; infinite where a stage does not fit."""


class _Candidates(NamedTuple):
    """What may be part of a plan."""

    indices: Counts
    """Of all stages."""
    starts: list[int]
    """Where those that begin with every layer start."""
    before: Numbers
    """Of the layers before every position the fewest devices; and, with devices at every price, the least round trip.

    ``[devices or price, position]``.
    """
    behind: Numbers
    """The same of the layers behind."""
    prices: Numbers
    """Of a device, shape (prices, 1)."""


class RoundTrips:
    """The round trips of a family of which activations and gradients cross every boundary."""

    def __init__(self, stages: StageTables, states: States, options: PlanOptions) -> None:
        self._tables, self._states, self._use_all = stages, states, options.use_all
        self._devices, self._layers = len(stages.pool.remaining(0)), stages.layers
        self._widths = np.array([way.width for way in stages.ways])
        keys = [(way.kind, way.widths, way.variant, way.choice._replace(part=0, parts=1)) for way in stages.ways]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        self._alike = np.array([numbers[key] for key in keys])
        every = [self._beginning(first) for first in range(self._layers)]
        stages_of = _TripStages._make(np.concatenate(each, axis=-1) for each in zip(*every, strict=True))
        told = np.stack((stages_of.first, stages_of.stop, stages_of.group))
        changes = np.append(False, (told[:, 1:] != told[:, :-1]).any(axis=0))
        self._stages = stages_of._replace(group=np.cumsum(changes[: told.shape[1]]))
        self._has_several_limits = len({place.limit for place in stages.places}) > 1

    def bound_s(self, cap_s: float, most_sweeps: int, known_s: float = 0.0) -> float:
        """Return a lower bound of all plans' seconds without the overhead of a step; at most ``cap_s``.

        The more sweeps, the closer; none is made once it is clear that they raise no bound that is ``known_s``.
        """
        # What plans with B in a range take at least, the range, and the least round trip by its higher end, if known.
        ranges: list[tuple[float, float, float, float | None]] = [(0.0, 0.0, cap_s, None)]
        sweeps, reach = 0, REACH * cap_s
        while ranges[0][0] < cap_s and sweeps < most_sweeps * (2 if ranges[0][3] is None else 1):
            least_s, low, high, high_s = ranges[0]
            if high_s is not None:
                sweeps += 1
                middle = (low + high) / 2
                middle_s = self.least_s(middle, cap_s - low)
                heapreplace(ranges, (max(least_s, low + middle_s), low, middle, middle_s))
                heappush(ranges, (max(least_s, middle + high_s), middle, high, high_s))
                continue
            # As far down as the round trip of the higher end rules out, at least and at most so far.
            lowest = max(0.0, high - reach)
            kept = self._within(high, cap_s - lowest)
            high_s = float("inf") if kept is None else self._rough_s(kept)
            if kept is not None and cap_s - high_s > ROUGH * high:
                sweeps += 1
                high_s = self._sweep_s(kept, high, cap_s - lowest)
                if high + high_s <= known_s:
                    return min(cap_s, known_s)
            near = high + high_s > FINE * cap_s and sweeps < most_sweeps
            low = max(lowest, min(cap_s - high_s, (FINE if near else COARSE) * high))
            reach = AHEAD * (high - low)
            heapreplace(ranges, (max(least_s, low + high_s), low, high, high_s))
            if low > 0 and (high_s < float("inf") or self._within(low, cap_s) is not None):
                # With less beside it, the round trip is no shorter.
                heappush(ranges, (min(high_s, cap_s - low), 0.0, low, None))
        return min(cap_s, max(known_s, ranges[0][0]))

    def least_s(self, beside_s: float, most_s: float) -> float:
        """Return the least round trip of plans within a B; infinite where none is below ``most_s``."""
        kept = self._within(beside_s, most_s)
        return float("inf") if kept is None else self._sweep_s(kept, beside_s, most_s)

    def _rough_s(self, candidates: _Candidates) -> float:
        """A round trip that none of all layers on all devices falls below."""
        return float((candidates.behind[1:, :1] - candidates.prices * self._devices).max()) * (1 - ROUNDING)

    def _beginning(self, first: int) -> _TripStages:
        """Return the stages that may begin with a layer."""
        following = self._tables.next(first)
        count = following.longest - following.length + 1
        index = np.repeat(np.arange(len(count)), count)
        stop = first + following.length[index] + np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
        fits = np.isfinite(following.stages[2])
        forward_s, backward_s, _, _, rate, beside_s = np.where(fits, following.stages, np.inf)
        worst_s = np.where(fits, following.stages[5], 0.0).max(axis=0)
        _, _, forth_s, back_s, forth_work_s, back_work_s = following.links
        waits_s = forth_work_s.min(axis=0) - forth_s.min(axis=0), back_work_s.min(axis=0) - back_s.min(axis=0)
        least_beside_s = np.maximum(beside_s.min(axis=0), np.maximum(*waits_s))
        around_s = np.concatenate((forward_s + backward_s)[:, None] + forth_s + back_s)
        least_s, group = around_s.min(axis=0), self._alike[following.way]
        order = np.lexsort((least_s[index], group[index], stop))
        way, width = following.way, self._widths[following.way]
        least = way, width, least_s, rate.min(axis=0), least_beside_s, worst_s, group
        every = *least, around_s.astype(np.float32), rate, beside_s
        where = np.full(len(index), first), stop[order]
        return _TripStages._make((*where, *(each[..., index[order]] for each in every)))

    def _within(self, beside_s: float, most_s: float) -> _Candidates | None:
        """Return the stages that may be in a plan; None where there is none."""
        beside_s += ROUNDING * most_s
        prices = np.array(PRICES)[:, None] * most_s / self._devices
        stages, indices = self._stages, np.flatnonzero(self._useful(beside_s, most_s))
        first, stop, width = (each[indices] for each in (stages.first, stages.stop, stages.width))
        around_s, rate = stages.around_s[indices], stages.rate[indices]
        # The longest round trip with which a stage keeps within B.
        longest_s = np.minimum(_room_s(rate, beside_s), most_s) * (1 + ROUNDING)
        each: Numbers = np.concatenate((width[None], around_s + prices * width))
        fitting, behind = self._behind(first, stop, each, prices, longest_s)
        if not behind[0, 0] <= self._devices:
            return None
        first = first[fitting]
        before = self._before(first, stop[fitting], each[:, fitting])
        starts = np.searchsorted(first, np.arange(self._layers + 1)).tolist()
        return _Candidates(indices[fitting], starts, before, behind, prices)

    def _behind(
        self, first: Counts, stop: Counts, each: Numbers, prices: Numbers, longest_s: Numbers
    ) -> tuple[npt.NDArray[np.bool_], Numbers]:
        """Which stages may be part of a plan; and what the layers from every position on take at least."""
        starts = np.searchsorted(first, np.arange(self._layers + 1))
        behind = np.full((len(each), self._layers + 1), np.inf)
        behind[:, -1] = 0.0
        fitting = np.zeros(len(stop), dtype=bool)
        for at in reversed(range(self._layers)):
            own = slice(starts[at], starts[at + 1])
            total = np.take(behind, stop[own], axis=1)
            total += each[:, own]
            some = (total[1:] - prices * self._devices).max(axis=0) <= longest_s[own]
            some &= total[0] <= self._devices
            fitting[own] = some
            behind[:, at] = total[:, some].min(axis=1, initial=np.inf)
        return fitting, behind

    def _before(self, first: Counts, stop: Counts, each: Numbers) -> Numbers:
        """Return what the layers before every position take at least."""
        before = np.full((len(each), self._layers + 1), np.inf)
        before[:, 0] = 0.0
        by_stop = np.argsort(stop, kind="stable")
        ends = np.searchsorted(stop[by_stop], np.arange(self._layers + 2))
        first, each = first[by_stop], each[:, by_stop]
        for at in range(1, self._layers + 1):
            own = slice(ends[at], ends[at + 1])
            before[:, at] = (np.take(before, first[own], axis=1) + each[:, own]).min(axis=1, initial=np.inf)
        return before

    def _useful(self, beside_s: float, most_s: float) -> npt.NDArray[np.bool_]:
        """Which stages keep within B, and do not recompute more than another one of the same layers in vain."""
        rate, stages = self._stages.rate, self._stages
        within: npt.NDArray[np.bool_] = stages.beside_s <= beside_s
        if self._has_several_limits or not len(rate):
            return within
        room_s = np.minimum(most_s, _room_s(rate, beside_s))
        offset = 2 * most_s * stages.group
        others = np.where(stages.worst_s <= beside_s, room_s, 0.0) + offset
        longest = np.append(-1.0, np.maximum.accumulate(others)[:-1])
        found: npt.NDArray[np.bool_] = within & (room_s + offset > longest)
        return found

    def _sweep_s(self, candidates: _Candidates, beside_s: float, most_s: float) -> float:
        """The least round trip of all layers on all devices."""
        beside_s += ROUNDING * most_s
        none = self._states.none
        trips = np.full((self._layers + 1, none + 1), np.inf, np.float32)
        trips[self._layers, self._tables.pool.empty if self._use_all else 0 :] = 0.0
        trips[self._layers, none] = np.inf
        left, indices, stages = self._states.devices_left, candidates.indices, self._stages
        way, stop = stages.way[indices], stages.stop[indices]
        around_s = np.take(stages.each_around_s, indices, axis=1)
        rate, beside = (np.take(each, indices, axis=1) for each in (stages.each_rate, stages.each_beside_s))
        room_s = np.where(beside <= beside_s, _room_s(rate, beside_s) * (1 + ROUNDING), -1.0).astype(np.float32)
        room_s = np.repeat(room_s, len(around_s) // len(room_s), axis=0)
        for first in reversed(range(self._layers)):
            before, behind = candidates.before[:, first, None], candidates.behind[:, first, None]
            states = np.flatnonzero((self._devices - left >= before[0]) & (left >= behind[0]))
            own = slice(*candidates.starts[first : first + 2])
            if len(states) and own.start < own.stop:
                here = left[states]
                before_s = (before[1:] - candidates.prices * (self._devices - here)).max(axis=0)
                behind_s = (behind[1:] - candidates.prices * here).max(axis=0)
                states = states[np.maximum(before_s, 0.0) + behind_s <= most_s * (1 + ROUNDING)]
                trips[first, states] = self._shortest(
                    way[own], stop[own], around_s[:, own], room_s[:, own], states, trips
                )
        return float(trips[0, 0]) * (1 - ROUNDING)

    def _shortest(
        self, way: Counts, stop: Counts, around_s: Small, room_s: Small, states: Counts, trips: Small
    ) -> Small:
        """Least round trips from a position on, ``[state]``."""
        where = self._states.standing(way, states)
        behind = self._states.behind(way, states)
        behind += stop[:, None] * trips.shape[1]
        found: Small = np.take(trips, behind)
        found += np.take(around_s, where)
        np.copyto(found, np.inf, where=found > np.take(room_s, where))
        least_s: Small = found.min(axis=0)
        return least_s


def _room_s(rate: Numbers, beside_s: float) -> Numbers:
    """Return the longest round trips with which stages keep within B; infinite where all may be in flight."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Numbers = np.where(rate > 1, beside_s / (rate - 1), np.inf)
    return found
