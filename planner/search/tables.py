"""Tables: lower bounds of all suffixes, as arrays over the states of the pool.

For the layers from ``first`` on, placed on the devices that a state of the pool leaves, a table holds the
component-wise minimum of the terms of all stages that fit: as :func:`autopar.planner.bounds.fold` never falls when one
of them grows, folding a prefix onto the minima never exceeds the bound of any completion.

Stages move from one state of the pool to another. With a cap on the step, a table leaves out stages that no plan below
it has, and states with fewer devices than the layers need.

Another bound is by the least round trip of a family's plans that compute little beside it. A step takes at least a
micro-batch's round trip from the first stage, R(1), and what passes beside it, B. Unfolding the bound
(:mod:`autopar.planner.bounds`) of a plan with the round trips R(s) shows what B is no less than, at every stage:

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

from autopar.options.plan import PlanOptions
from autopar.planner.bounds import LinkTerms, StageTerms, Terms, fold, last
from autopar.planner.costs import memoize_weakly
from autopar.planner.costs.activations import Counts, Numbers
from autopar.planner.search.stages import NextStages, StageTables

SLACK = 1e-9


class CappedStages:
    """Stage tables without the stages that alone take longer than a step's ``cap_s``."""

    def __init__(self, stages: StageTables, cap_s: float = float("inf")) -> None:
        self._stages = stages
        self.limit_s = (cap_s - stages.costs.profile.step_overhead_s) * (1 + SLACK)
        self.fewest = self._fewest()
        """Fewest devices of the layers before, and of those from on, every position."""

    @property
    def possible(self) -> bool:
        """Whether there are as many devices as the stages need, each for itself."""
        return bool(self.fewest[1, 0] <= len(self._stages.pool.remaining(0)))

    @memoize_weakly
    def next(self, first: int) -> NextStages:
        """Return the stages that may begin with a layer."""
        every = self._stages.next(first)
        within = every.alone_s.min(axis=0) <= self.limit_s
        return every if within.all() else every.some(np.flatnonzero(within))

    def at(self, first: int, group: StateGroup) -> NextStages:
        """Return those of the stages that may meet the cap where they stand, with the terms of that place only."""
        every = self.next(first)
        count = len(every.way)
        place, near = (where[every.way] * count + np.arange(count) for where in (group.place, group.near))
        some = np.flatnonzero(every.alone_s.ravel()[place] <= self.limit_s)
        stages, links, alone_s = (
            np.take(each.reshape(*each.shape[:-2], -1), where[some], axis=-1)[..., None, :]
            for each, where in ((every.stages, place), (every.links, near), (every.alone_s, place))
        )
        return NextStages(every.way[some], every.length[some], every.longest[some], stages, links, alone_s)

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
        late = self._stages.alone_s > self.limit_s
        widths = np.where(late.all(axis=0), np.inf, 1 + late.sum(axis=0))
        lengths = np.arange(1, self._stages.longest + 1)
        return widths[:, np.searchsorted(self._stages.lengths, lengths, side="right") - 1]


class StateGroup(NamedTuple):
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
        self.devices_left = pool.devices_left()
        """Devices."""
        nears = len(stages.nears)
        self.codes = np.stack([move.place * nears + move.near for move in stages.moves])
        """Where a way stands: its place, and the levels to the next stage, ``[way, state]``."""
        self.groups = self._group_states(nears)

    def group_of(self, state: int) -> StateGroup:
        """Return the group that a state is in."""
        return self.groups[int(self._group[state])]

    def behind(self, ways: Counts, states: Counts) -> Counts:
        """Return the states that some ways lead to from some states, ``[way, state]``."""
        return np.take(np.take(self.after, states, axis=1), ways, axis=0)

    def standing(self, ways: Counts, states: Counts) -> Counts:
        """Return where some ways stand in some states, ``[way, state]``: positions in a flat array ``[code, way]``."""
        found = np.take(np.take(self.codes, states, axis=1), ways, axis=0)
        found *= len(ways)
        found += np.arange(len(ways))[:, None]
        return found

    def within(self, group: StateGroup, first: int, capped_stages: CappedStages) -> Counts:
        """Return the states of a group in which the layers before may have met a cap, and others still may."""
        before, behind = capped_stages.fewest[:, first]
        left = self.devices_left[group.states]
        found: Counts = group.states[(before <= self.devices_left[0] - left) & (behind <= left)]
        return found

    def _group_states(self, nears: int) -> list[StateGroup]:
        codes = self.codes.copy()
        # Where a way is impossible, its place does not matter: the state behind it cannot be.
        codes[self.after == self.none] = -1
        columns, index = np.unique(codes, axis=1, return_inverse=True)
        merged: list[Counts] = []
        target = np.zeros(columns.shape[1], dtype=np.int64)
        for at in np.argsort((columns < 0).sum(axis=0), kind="stable"):
            column = columns[:, at]
            agreeing = (((column == other) | (column < 0) | (other < 0)).all() for other in merged)
            alike = (known for known, agrees in enumerate(agreeing) if agrees)
            target[at] = known = next(alike, len(merged))
            if known == len(merged):
                merged.append(column)
            merged[known] = np.maximum(column, merged[known])
        self._group = target[index.ravel()]
        return [
            StateGroup(np.flatnonzero(self._group == at), *np.divmod(np.maximum(each, 0), nears))
            for at, each in enumerate(merged)
        ]


MOST_ELEMENTS = 20_000_000
"""Of the arrays that make a family's tables; about a tenth of a second for so many."""

ROUNDING = 1e-4
"""Tables in single precision err by less than this share, even in sums of hundreds."""


class SuffixTables:
    """Least terms of all suffixes, for one family, by how many stages they have; those of many are lumped together.

    What cannot be part of a plan of fewer seconds than the cap is left out.
    """

    def __init__(
        self,
        stages: StageTables,
        options: PlanOptions,
        capped_stages: CappedStages | None = None,
        states: States | None = None,
        *,
        single_precision: bool = False,
    ) -> None:
        """Fill the tables; single precision takes half the time and room, and bounds are less by the rounding."""
        self.stages, self._use_all = stages, options.use_all
        self._capped_stages = capped_stages or CappedStages(stages)
        pool, layers = stages.pool, stages.layers
        most = stages.constraints.most_stages
        apart = min(layers, len(pool.remaining(0)), MOST_ELEMENTS // max(1, stages.size))
        apart = max(1, stages.constraints.least_stages, apart)
        self.counts = min(apart, most)
        """Suffixes of fewer stages than this are told apart; the last entry is for those of so many, and more."""
        self._last_is_open = apart < most
        self.states = states or States(stages)
        self._kind: type[np.float64] = np.float32 if single_precision else np.float64  # type: ignore[assignment]  # read as numbers
        self._least = np.full((4, self.counts, layers + 1, pool.states + 1), np.inf, self._kind)
        self._chain = stages.chain
        self._before = self._prefixes()
        if self._capped_stages.possible:
            for first in reversed(range(layers)):
                self._fill(first)

    @property
    def least_s(self) -> float:
        """The least bound of a plan, without what precedes every step; infinite where there is none below the cap."""
        least_s = float(self._least[3, self.stages.constraints.least_stages - 1 :, 0, 0].min(initial=np.inf))
        return least_s * (1 - ROUNDING) if self._kind is np.float32 else least_s

    def behinds(self, stages: int | None) -> range:
        """Return how many stages may follow the first of ``stages``, as :meth:`terms` takes them; none: any number."""
        if stages is None:
            return range(self.counts)
        return range(max(0, stages - 1), stages + (self._last_is_open and stages == self.counts - 1))

    def terms(self, first: int, state: int) -> tuple[NextStages, list[Terms]]:
        """Return the stages that may begin with a layer, and the least terms of suffixes that begin so.

        By how many stages follow; the largest number that is told apart stands for all larger ones.
        """
        following = self._capped_stages.at(first, self.states.group_of(state))
        found = self._extend_terms(first, following, np.array([state]))
        return following, [Terms(*each) for each in zip(*(each[:, :, 0] for each in found), strict=True)]

    def _prefixes(self) -> Numbers:
        """Least round trips of all stages before every position, where they count for what follows."""
        found = np.zeros(self.stages.layers + 1)
        if not self._chain:
            return found
        found[1:] = np.inf
        for first in range(self.stages.layers):
            following = self._capped_stages.next(first)
            stage, link = StageTerms.from_array(following.stages), LinkTerms(True, True, *following.links[2:])
            around = np.min(stage.forward_s + stage.backward_s, axis=0) + np.min(link.forth_s + link.back_s, axis=0)
            for more in range(int((following.longest - following.length).max(initial=0)) + 1):
                some = following.longest - following.length >= more
                np.minimum.at(found, first + following.length[some] + more, found[first] + around[some])
        return found

    def _fill(self, first: int) -> None:
        for group in self.states.groups:
            states = self.states.within(group, first, self._capped_stages)
            if len(states):
                found = self._extend_terms(first, self._capped_stages.at(first, group), states)
                over = found[1] + self._before[first] > self._capped_stages.limit_s
                for term, each in enumerate(found):
                    each[over] = np.inf
                    self._least[term, :, first, states] = each.min(axis=1, initial=np.inf).T

    def _extend_terms(self, first: int, following: NextStages, states: Counts) -> tuple[Numbers, ...]:
        """Terms ``[stages behind, stage, state]``."""
        after = self.states.behind(following.way, states)
        wide = StageTerms.from_array(following.stages[:, 0, :, None].astype(self._kind))
        forth, back, *seconds = following.links[:, 0, :, None].astype(self._kind)
        beyond = LinkTerms(True, True, *seconds) if self._chain else LinkTerms(forth > 0, back > 0, *seconds)
        behind = Terms(*self._suffixes(first, following, after))
        found = tuple(map(np.asarray, fold(wide, beyond, behind)))
        if not self._chain:
            # Where no gradient returns, some terms have nothing of what is behind: not even that nothing can be there.
            there = np.isfinite(behind.step_s)
            found = tuple(np.where(there, each, self._kind(np.inf)) for each in found)
        ends = first + following.longest >= self.stages.layers
        if ends.any():
            empty = after[ends] == self.stages.pool.empty if self._use_all else after[ends] < self.states.none
            ending = StageTerms._make(None if term is None else np.asarray(term)[ends] for term in wide)
            for terms, closed in zip(found, last(ending), strict=True):
                terms[0, ends] = np.minimum(terms[0, ends], np.where(empty, closed, np.inf))
        return found

    def _suffixes(self, first: int, following: NextStages, after: Counts) -> Numbers:
        """Least terms behind every next stage, ``[term, stages behind, stage, state]``."""
        width = self._least.shape[3]
        table = self._least.reshape(4, self.counts, -1)
        behind = after + (first + following.length)[:, None] * width
        found: Numbers = np.take(table, behind, axis=2)
        for step in range(1, int((following.longest - following.length).max(initial=0)) + 1):
            more = np.flatnonzero(following.longest - following.length >= step)
            found[:, :, more] = np.minimum(found[:, :, more], np.take(table, behind[more] + step * width, axis=2))
        # Behind a stage that n stages follow stands a suffix of n; of the most that are told apart, of as many or more.
        many = found[:, -2:].min(axis=1)
        found[:, 1:] = found[:, :-1]
        found[:, 0] = np.inf
        if self._last_is_open:
            found[:, -1] = many
        return found


PRICES = (0.0, 0.5, 1.0, 2.0)
"""Prices of a device, in its part of the longest round trip: low ones bound plans of few devices, high ones of many."""
TRIP_ROUNDING = 1e-5
"""Round trips are rounded by this share, for speed; sums of hundreds err by less."""
REACH, AHEAD = 0.1, 2.0
"""The first range spans at most this part of the cap, and every further one so many times the range before."""
FINE, COARSE = 0.995, 0.95
"""A range begins at this part of its end at most: the first where its least step is near the cap, else the second."""
ROUGH = 0.985
"""If a rough bound of the round trip lets a range begin below this part of its end, that bound will do."""

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
        self._widths = np.array([way.replicas.devices for way in stages.ways])
        keys = [
            (way.kinds, way.counts, way.widths, way.variant, way.replicas, way.recompute.every) for way in stages.ways
        ]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        self._alike = np.array([numbers[key] for key in keys])
        every = [self._beginning(first) for first in range(self._layers)]
        stages_of = _TripStages._make(np.concatenate(each, axis=-1) for each in zip(*every, strict=True))
        alike = np.stack((stages_of.first, stages_of.stop, stages_of.group))
        changes = np.append(False, (alike[:, 1:] != alike[:, :-1]).any(axis=0))
        self._stages = stages_of._replace(group=np.cumsum(changes[: alike.shape[1]]))
        self._has_several_limits = len({place.limit for known in stages.places.values() for place in known}) > 1

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
        return float((candidates.behind[1:, :1] - candidates.prices * self._devices).max()) * (1 - TRIP_ROUNDING)

    def _beginning(self, first: int) -> _TripStages:
        """Return the stages that may begin with a layer."""
        following = self._tables.next(first)
        count = following.longest - following.length + 1
        index = np.repeat(np.arange(len(count)), count)
        stop = first + following.length[index] + np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
        fits = np.isfinite(following.stages[2])
        forward_s, backward_s, _, _, rate, beside_s = np.where(fits, following.stages[:6], np.inf)
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
        beside_s += TRIP_ROUNDING * most_s
        prices = np.array(PRICES)[:, None] * most_s / self._devices
        stages, indices = self._stages, np.flatnonzero(self._useful(beside_s, most_s))
        first, stop, width = (each[indices] for each in (stages.first, stages.stop, stages.width))
        around_s, rate = stages.around_s[indices], stages.rate[indices]
        # The longest round trip with which a stage keeps within B.
        longest_s = np.minimum(_room_s(rate, beside_s), most_s) * (1 + TRIP_ROUNDING)
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
        beside_s += TRIP_ROUNDING * most_s
        none = self._states.none
        trips = np.full((self._layers + 1, none + 1), np.inf, np.float32)
        trips[self._layers, self._tables.pool.empty if self._use_all else 0 : none] = 0.0
        left, indices, stages = self._states.devices_left, candidates.indices, self._stages
        way, stop = stages.way[indices], stages.stop[indices]
        around_s = np.take(stages.each_around_s, indices, axis=1)
        rate, beside = (np.take(each, indices, axis=1) for each in (stages.each_rate, stages.each_beside_s))
        room_s = np.where(beside <= beside_s, _room_s(rate, beside_s) * (1 + TRIP_ROUNDING), -1.0).astype(np.float32)
        room_s = np.repeat(room_s, len(around_s) // len(room_s), axis=0)
        for first in reversed(range(self._layers)):
            before, behind = candidates.before[:, first, None], candidates.behind[:, first, None]
            states = np.flatnonzero((self._devices - left >= before[0]) & (left >= behind[0]))
            own = slice(*candidates.starts[first : first + 2])
            if len(states) and own.start < own.stop:
                here = left[states]
                before_s = (before[1:] - candidates.prices * (self._devices - here)).max(axis=0)
                behind_s = (behind[1:] - candidates.prices * here).max(axis=0)
                states = states[np.maximum(before_s, 0.0) + behind_s <= most_s * (1 + TRIP_ROUNDING)]
                trips[first, states] = self._shortest(
                    way[own], stop[own], around_s[:, own], room_s[:, own], states, trips
                )
        return float(trips[0, 0]) * (1 - TRIP_ROUNDING)

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
