"""Trips: the least round trip of a family's plans that compute little beside it, and a lower bound of the step by it.

A step takes at least a micro-batch's round trip from the first stage, R(1), and what passes beside it, B. Unfolding the
bound (:mod:`autopar.planner.bounds.chain`) of a plan with the round trips R(s) shows what B is no less than, at every
stage:

    (M / k - 1) R(s)        what it computes at least while none of R(s) passes        (M - 1) max(c, c')

For a given B, the last two say which stages may be in a plan, and the first one how long R(s) may be. So a suffix of
stages is better in nothing than another one of the same layers that has no longer round trip and takes no more devices:
the least R(s) of every position and state of the pool, of stages that all keep within B, are exact. Unlike in tables of
the least terms, round trips and work are of the same plan.

The least round trip falls as B grows: every plan with B in [low, high] takes low and the least of high. Ranges of B are
halved where that is least.
"""

from __future__ import annotations

from heapq import heappush, heapreplace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.costs.areas import Counts
from autopar.planner.options import PlanOptions
from autopar.planner.search.stages import StageTables
from autopar.planner.search.states import States

__all__ = ["Trips"]

PRICES = (0.0, 0.5, 1.0, 2.0)
"""Of a device, over its part of the longest round trip: some bound what takes few devices, some what takes many."""
ROUNDS = 2
ROUNDING = 1e-5
"""Of the kept numbers, which are rounded for speed; hundreds of sums err by less."""
COARSE = 0.9
"""Of a range's higher limit, the lower one, while nothing is known of what is below."""

Numbers = npt.NDArray[np.float64]
Small = npt.NDArray[np.float32]


class _Stages(NamedTuple):
    """Stages, one of every length, by their first layer; arrays over them."""

    first: Counts
    stop: Counts
    number: Counts
    """Among the tables' stages that may begin with the layer, each of which stands for several lengths."""
    width: Counts
    around_s: Numbers
    """Round trip over the stage and the boundary behind it, where it stands best."""
    rate: Numbers
    beside_s: Numbers
    worst_s: Numbers
    """The same where it stands worst."""
    group: Counts
    """Ascending; stages of one differ only in recomputation, and take ever longer."""

    def some(self, chosen: npt.NDArray[np.bool_] | slice) -> _Stages:
        """Return some of the stages."""
        return _Stages._make(each[chosen] for each in self)


class _Kept(NamedTuple):
    """What may be part of a plan."""

    stages: list[_Stages]
    """By first layer."""
    before: Numbers
    """Fewest devices of the layers before every position."""
    behind: Numbers
    before_s: Numbers
    """Least round trip of the layers before every position, and the price of its devices, ``[position, price]``."""
    behind_s: Numbers
    prices: Numbers


class Trips:
    """The round trips of a family of which activations and gradients cross every boundary."""

    def __init__(self, stages: StageTables, states: States, options: PlanOptions) -> None:
        self._tables, self._states, self._use_all = stages, states, options.use_all
        self._devices, self._layers = len(stages.pool.remaining(0)), stages.layers
        self._widths = np.array([way.width for way in stages.ways])
        keys = [(way.kind, way.widths, way.variant, way.choice._replace(part=0, parts=1)) for way in stages.ways]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        self._alike = np.array([numbers[key] for key in keys])
        every = [self._beginning(first) for first in range(self._layers)]
        self._stages = _Stages._make(np.concatenate(each) for each in zip(*every, strict=True))
        told = np.stack((self._stages.first, self._stages.stop, self._stages.group))
        changes = np.append(False, (told[:, 1:] != told[:, :-1]).any(axis=0))
        self._stages = self._stages._replace(group=np.cumsum(changes[: told.shape[1]]))
        self._limited = len({place.limit for place in stages.places.known}) > 1

    def bound_s(self, cap_s: float, most_sweeps: int = 9) -> float:
        """Return a lower bound of all plans' seconds without the overhead of a step; at most ``cap_s``.

        The more sweeps, the closer.
        """
        # What plans with B in a range take at least, the range, and the least round trip by its higher end.
        ranges = [(0.0, 0.0, cap_s, 0.0)]
        sweeps = 0
        while ranges[0][0] < cap_s and sweeps < most_sweeps:
            least_s, low, high, high_s = ranges[0]
            if low == 0:
                kept = self._within(high, cap_s)
                if kept is None:
                    heapreplace(ranges, (cap_s, low, high, high_s))
                    continue
                low = COARSE * high
                high_s = self._swept(kept, high, cap_s)
                heapreplace(ranges, (max(least_s, low + high_s), low, high, high_s))
                # With less beside it, the round trip is no shorter.
                heappush(ranges, (min(high_s, cap_s - low), 0.0, low, 0.0))
            else:
                middle = (low + high) / 2
                middle_s = self.least_s(middle, cap_s - low)
                heapreplace(ranges, (max(least_s, low + middle_s), low, middle, middle_s))
                heappush(ranges, (max(least_s, middle + high_s), middle, high, high_s))
            sweeps += 1
        return min(cap_s, ranges[0][0])

    def least_s(self, beside_s: float, most_s: float) -> float:
        """Return the least round trip of plans within a B; infinite where none is below ``most_s``."""
        kept = self._within(beside_s, most_s)
        return float("inf") if kept is None else self._swept(kept, beside_s, most_s)

    def _beginning(self, first: int) -> _Stages:
        """Return the stages that may begin with a layer."""
        following = self._tables.next(first)
        count = following.longest - following.length + 1
        index = np.repeat(np.arange(len(count)), count)
        stop = first + following.length[index] + np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
        fits = np.isfinite(following.stages[2])
        forward_s, backward_s, _, _, rate, beside_s = np.where(fits, following.stages, np.inf).min(axis=1)
        worst_s = np.where(fits, following.stages[5], 0.0).max(axis=0)
        _, _, forth_s, back_s, forth_work_s, back_work_s = following.links.min(axis=1)
        queued_s = np.maximum(forth_work_s - forth_s, back_work_s - back_s)
        each = (
            self._widths[following.way],
            forward_s + backward_s + forth_s + back_s,
            rate,
            np.maximum(beside_s, queued_s),
            worst_s,
            self._alike[following.way],
        )
        found = _Stages(np.full(len(index), first), stop, index, *(one[index] for one in each))
        order = np.lexsort((found.around_s, found.group, found.stop))
        return _Stages._make(one[order] for one in found)

    def _within(self, beside_s: float, most_s: float) -> _Kept | None:
        """Return the stages that may be in a plan; None where there is none."""
        beside_s += ROUNDING * most_s
        prices = np.array(PRICES) * most_s / self._devices
        stages = self._useful(self._stages.some(self._stages.beside_s <= beside_s), beside_s, most_s)
        before, trip_s = np.zeros((2, self._layers + 1))
        for _ in range(ROUNDS):
            # The longest round trip with which a stage keeps within B, and may be part of a whole one.
            longest_s = np.minimum(_room_s(stages.rate, beside_s), most_s - trip_s[stages.first]) * (1 + ROUNDING)
            priced_s = stages.around_s[:, None] + prices * stages.width[:, None]
            # Before some positions, nothing may be.
            spare = np.maximum(-1.0, self._devices - before)
            fitting, behind, behind_s = self._behind(stages, priced_s, prices, longest_s, spare)
            if not behind[0] <= self._devices:
                return None
            stages = stages.some(fitting)
            before, before_s = self._before(stages, priced_s[fitting])
            left = np.maximum(0, self._devices - behind)
            trip_s = np.maximum(0.0, (before_s - prices * left[:, None]).max(axis=1))
        starts = np.searchsorted(stages.first, np.arange(self._layers + 1)).tolist()
        return _Kept(
            [stages.some(slice(*ends)) for ends in pairwise(starts)], before, behind, before_s, behind_s, prices
        )

    def _behind(
        self, stages: _Stages, priced_s: Numbers, prices: Numbers, longest_s: Numbers, spare: Numbers
    ) -> tuple[npt.NDArray[np.bool_], Numbers, Numbers]:
        """Which stages may be part of a plan; of the layers from every position on, devices and priced round trips."""
        starts = np.searchsorted(stages.first, np.arange(self._layers + 1))
        behind, behind_s = np.full(self._layers + 1, np.inf), np.full((self._layers + 1, len(prices)), np.inf)
        behind[-1] = behind_s[-1] = 0.0
        fitting = np.zeros(len(stages.stop), dtype=bool)
        for first in reversed(range(self._layers)):
            own = slice(starts[first], starts[first + 1])
            stop = stages.stop[own]
            total_s, devices = behind_s[stop] + priced_s[own], behind[stop] + stages.width[own]
            some = ((total_s - prices * spare[first]).max(axis=1) <= longest_s[own]) & (devices <= spare[first])
            fitting[own] = some
            behind[first] = devices[some].min(initial=np.inf)
            behind_s[first] = total_s[some].min(axis=0, initial=np.inf)
        return fitting, behind, behind_s

    def _before(self, stages: _Stages, priced_s: Numbers) -> tuple[Numbers, Numbers]:
        """Fewest devices, and least priced round trips, of the layers before every position."""
        before, before_s = np.full(self._layers + 1, np.inf), np.full((self._layers + 1, priced_s.shape[1]), np.inf)
        before[0] = before_s[0] = 0.0
        by_stop = np.argsort(stages.stop, kind="stable")
        ends = np.searchsorted(stages.stop[by_stop], np.arange(self._layers + 2))
        first, width, priced_s = stages.first[by_stop], stages.width[by_stop], priced_s[by_stop]
        for stop in range(1, self._layers + 1):
            own = slice(ends[stop], ends[stop + 1])
            before[stop] = (before[first[own]] + width[own]).min(initial=np.inf)
            before_s[stop] = (before_s[first[own]] + priced_s[own]).min(axis=0, initial=np.inf)
        return before, before_s

    def _useful(self, stages: _Stages, beside_s: float, most_s: float) -> _Stages:
        """Leave out stages that recompute more than another one of the same layers, for room that is not needed."""
        if self._limited or not len(stages.stop):
            return stages
        room_s = np.minimum(most_s, _room_s(stages.rate, beside_s))
        offset = 2 * most_s * stages.group
        others = np.where(stages.worst_s <= beside_s, room_s, 0.0) + offset
        longest = np.append(-1.0, np.maximum.accumulate(others)[:-1])
        return stages.some(room_s + offset > longest)

    def _swept(self, kept: _Kept, beside_s: float, most_s: float) -> float:
        """The least round trip of all layers on all devices."""
        beside_s += ROUNDING * most_s
        none = self._states.none
        trips = np.full((self._layers + 1, none + 1), np.inf, np.float32)
        trips[self._layers, self._tables.pool.empty if self._use_all else 0 :] = 0.0
        trips[self._layers, none] = np.inf
        left = self._states.left
        for first in reversed(range(self._layers)):
            before, behind = kept.before[first], kept.behind[first]
            states = np.flatnonzero((self._devices - left >= before) & (left >= behind))
            if len(states) and len(kept.stages[first].stop):
                here = left[states, None]
                before_s = (kept.before_s[first] - kept.prices * (self._devices - here)).max(axis=1)
                behind_s = (kept.behind_s[first] - kept.prices * here).max(axis=1)
                states = states[np.maximum(before_s, 0.0) + behind_s <= most_s * (1 + ROUNDING)]
                trips[first, states] = self._shortest(kept.stages[first], states, trips, beside_s)
        return float(trips[0, 0]) * (1 - ROUNDING)

    def _shortest(self, stages: _Stages, states: Counts, trips: Small, beside_s: float) -> Small:
        """Least round trips from a position on, ``[state]``."""
        following = self._tables.next(int(stages.first[0]))
        forward_s, backward_s, work_s, _, rate, beside = following.stages[:, :, None, stages.number]
        forth_s, back_s = following.links[2:4, None, :, stages.number]
        room_s = _room_s(rate, beside_s) * (1 + ROUNDING)
        room_s = np.where(np.isfinite(work_s) & (beside <= beside_s), room_s, -1.0)
        around_s, room_s = np.broadcast_arrays(forward_s + backward_s + forth_s + back_s, room_s)
        way = following.way[stages.number][:, None]
        where = self._states.codes[way, states] * len(way) + np.arange(len(way))[:, None]
        found: Small = np.take(trips, self._states.after[way, states] + stages.stop[:, None] * trips.shape[1])
        found += np.take(around_s.astype(np.float32), where)
        found[found > np.take(room_s.astype(np.float32), where)] = np.inf
        least_s: Small = found.min(axis=0)
        return least_s


def _room_s(rate: Numbers, beside_s: float) -> Numbers:
    """Return the longest round trips with which stages keep within B; infinite where all may be in flight."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Numbers = np.where(rate > 1, beside_s / (rate - 1), np.inf)
    return found
