"""Pace: good plans, and a lower bound, of a family too large to tell every stage apart.

Of the plans whose stages all keep a pace, those with a short round trip are found, one for each pace that is tried.

A step takes a micro-batch's round trip R(1) from the first stage, and B beside it. In a step of B + R(1), a stage s has
B + R(s) from its first forward on: of M micro-batches, it keeps as many in flight as a round trip takes at that pace,

    k = M R(s) / (B + R(s))

and more where a stage b behind keeps it waiting. A backward of s lets a forward begin that b runs before the backward
that is d = k - k(b) + 1 later, so these take W = R(s) - R(b) + t(b) for every d of the M - k that forwards follow, and
the last of these forwards comes back R(s) later: with E = R(s) - W, (M - k) W / d is no more than B - E, or

    k >= ((k(b) - 1) (B - E) + M W) / (B - E + W)

And it computes no more than B while none of R(s) passes. From the last stage to the first, the suffix with the shortest
round trip is kept for every state of the pool: it needs the fewest in flight. What may come of it is bounded in
:mod:`autopar.planner.search.tables`.

Why: docs/design/decisions.md, "Search: Large problems are opened by paces".
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.options.plan import PlanOptions
from autopar.planner.bounds import beside_s, work_s
from autopar.planner.candidate import with_depths
from autopar.planner.costs.activations import Counts
from autopar.planner.search.depths import LEAD, depth_choices, least_recomputed, span_of
from autopar.planner.search.judge import ENOUGH, SWEPT, Best
from autopar.planner.search.stages import StageTables, Step
from autopar.planner.search.tables import CappedStages, RoundTrips, States, SuffixTables
from autopar.planner.simulator.simulate import Simulator

Numbers = npt.NDArray[np.floating]
WAITING = 1.04
"""Stages have so many times what is necessary in flight, so that they wait less for each other."""
ROUNDING = 1e-5
"""What is kept of suffixes is rounded by this share, for speed; a plan that is found is simulated in full."""
MANY_SWEPT = 150_000_000
"""Of more stages in all states of the pool, plans are looked for in some states only, and no table bounds them."""
BAND, LEAST_BAND = 0.2, 8
"""In those states, a suffix has its part of the devices to spare, give or take this share of them, or so many."""


class _Suffixes(NamedTuple):
    """Of every position and state, the suffix that is kept; arrays ``[position, state]``."""

    trip_s: Numbers
    """Its round trip; infinite where none keeps the pace."""
    since_s: Numbers
    """Of the stage behind that keeps those before it waiting longest: its round trip without what it computes."""
    deep: Numbers
    """And how many it has in flight, but for one."""
    in_flight: Numbers
    """Of its first stage, on all replicas."""
    most: Numbers
    """How many micro-batches may pass before a gradient it sent must have arrived, for it to fit."""
    period: Numbers
    """Micro-batches from one of a replica of its first stage to its next."""
    way: Counts
    """Of its first stage."""
    stop: Counts


class _PaceStages(NamedTuple):
    """Stages that may begin with a layer, of the shortest of the lengths taken together; arrays over them."""

    way: Counts
    stop: Counts
    room: Numbers
    """Most in flight on every replica."""
    exchange: Numbers
    """How many gradients on their way back hold as much as one in flight."""
    beside_s: Numbers
    """What it computes at least beside a round trip, with as many in flight."""
    terms: Numbers
    """Forward, backward and the round trip over the stage and the boundary, ``[term, place and levels, stage]``."""

    def some(self, indices: Counts) -> _PaceStages:
        """Return some of the stages."""
        return _PaceStages._make(each[..., indices] for each in self)


class Paces:
    """What plans of a family are made of, at any pace."""

    def __init__(self, stages: StageTables, states: States, options: PlanOptions) -> None:
        self.tables, self.states, self.use_all = stages, states, options.use_all
        self.many = stages.size > MANY_SWEPT
        """Whether there are too many stages to look at every state."""
        self.micro_batches, self.whole = stages.family.micro_batches, stages.family.schedule == "gpipe"
        self.widths = np.array([way.replicas.devices for way in stages.ways])
        """Devices, by way."""
        periods = [way.replicas.period for way in stages.ways]
        self.period = np.array(periods, dtype=np.float32)
        """By way, micro-batches from one of a replica's to its next."""
        counts = np.arange(1 + max(periods))
        self.meetings = np.lcm.outer(counts, counts).astype(np.float32)
        """By two periods, after how many micro-batches the same two replicas meet."""
        self.turns = np.ceil(self.micro_batches / self.period)
        # Replicas that take turns gain little where as many can share a micro-batch, and cost round trips.
        rows = stages.family.micro_batch_size
        self._worth = np.array([way.replicas.period == 1 or way.replicas.width > rows for way in stages.ways])
        self.stages = [self._beginning(first) for first in range(stages.layers)]
        """By first layer."""

    def _beginning(self, first: int) -> _PaceStages:
        following = self.tables.next(first)
        following = following.some(np.flatnonzero(self._worth[following.way]))
        way, stop = following.way, first + following.length
        depth, exchange = self.tables.sure_depth(way, first, following.length)
        forward_s, backward_s, work_s = following.stages[:3, :, None]
        forth_s, back_s = following.links[2:4, None]
        terms = np.stack(np.broadcast_arrays(forward_s, backward_s, forward_s + backward_s + forth_s + back_s))
        fits = np.broadcast_to(np.isfinite(work_s), terms.shape[1:])
        places = fits.shape[0] * fits.shape[1]
        terms = np.where(fits, terms, np.inf).reshape(3, places, len(way)).astype(np.float32)
        if self.whole:
            depth = np.where(depth < self.turns[way], 0, depth)
        with np.errstate(invalid="ignore"):
            # What does not fit is infinite, or no number.
            each_s = np.asarray(beside_s(terms[0], terms[1], self.turns[way], np.maximum(depth, 1)))
        least_s = np.where(depth > 0, np.fmin.reduce(each_s, axis=0, initial=np.inf), np.inf)
        return _PaceStages(way, stop, depth.astype(np.float32), exchange.astype(np.float32), least_s, terms)


class PacePlan:
    """The plan of a family that takes ``beside_s`` beside its round trip, with the shortest one."""

    def __init__(self, paces: Paces, beside_s: float) -> None:
        self.beside_s = beside_s
        self._paces, self._states = paces, paces.states
        layers, pool, none = paces.tables.layers, paces.tables.pool, paces.states.none
        self._layers, self._devices = layers, len(pool.remaining(0))
        shape = (layers + 1, none + 1)
        self._suffixes = _Suffixes._make(
            (*np.zeros((5, *shape), np.float32), np.ones(shape, np.float32), *np.zeros((2, *shape), np.int64))
        )
        self._suffixes.trip_s[:] = np.inf
        self._suffixes.most[layers] = np.inf
        self._suffixes.trip_s[layers, pool.empty if paces.use_all else 0 : none] = 0.0
        self._stages, self._fewest = self._possible()
        if self._fewest[1, 0] <= self._devices:
            for first in reversed(range(layers)):
                self._keep(first)

    @property
    def step_s(self) -> float:
        """About how long a step takes; infinite where no plan keeps the pace."""
        return float(self._suffixes.trip_s[0, 0]) + self.beside_s

    def plan_stages(self) -> list[tuple[Step, int]]:
        """Return the plan's stages, and how many micro-batches are in flight on every replica of each."""
        found = []
        first = state = 0
        while first < self._layers:
            way, stop = int(self._suffixes.way[first, state]), int(self._suffixes.stop[first, state])
            depth = int(np.ceil(self._suffixes.in_flight[first, state] / self._paces.period[way]))
            found.append((Step(first, stop, way, state), max(1, min(depth, int(self._paces.turns[way])))))
            first, state = stop, int(self._states.after[way, state])
        return found

    def _possible(self) -> tuple[list[_PaceStages], Numbers]:
        """Return the stages that may keep the pace, and the fewest devices before and behind every position."""
        layers, widths, found = self._layers, self._paces.widths, []
        fewest, trip_s = np.full((2, layers + 1), np.inf), np.full(layers + 1, np.inf)
        fewest[0, 0] = fewest[1, layers] = trip_s[layers] = 0.0
        for first in reversed(range(layers)):
            each = self._paces.stages[first]
            each = each.some(np.flatnonzero(each.beside_s <= self.beside_s * (1 + ROUNDING)))
            least_s = each.terms[2].min(axis=0, initial=np.inf) + trip_s[each.stop]
            devices = widths[each.way] + fewest[1, each.stop]
            room = each.room * self._paces.period[each.way]
            with np.errstate(invalid="ignore"):
                wanted = self._paces.micro_batches * least_s / (self.beside_s + least_s)
            some = np.flatnonzero((wanted <= room) & (devices <= self._devices))
            trip_s[first], fewest[1, first] = (one[some].min(initial=np.inf) for one in (least_s, devices))
            found.append(each.some(some))
        for first, each in enumerate(reversed(found)):
            np.minimum.at(fewest[0], each.stop, fewest[0, first] + widths[each.way])
        return found[::-1], fewest

    def _passing(self, in_flight: Numbers, period: Numbers, after: Counts) -> Numbers:
        """How many micro-batches pass until a gradient that a stage with such a period is sent has arrived."""
        behind = np.take(self._suffixes.period, after)
        if (period == 1).all() and (behind == 1).all():
            return in_flight
        meetings = self._paces.meetings
        meeting = np.take(meetings, (period * len(meetings) + behind).astype(np.int64))
        found: Numbers = np.ceil(in_flight / meeting) * meeting
        return found

    def _in_flight_when_waiting(self, trip_s: Numbers, since_s: Numbers, deep: Numbers) -> Numbers:
        """In flight for a round trip, in front of a stage that keeps others waiting."""
        count, beside_s = WAITING * self._paces.micro_batches, self.beside_s
        found: Numbers = (deep * (beside_s - since_s) + count * (trip_s - since_s)) / (beside_s + trip_s - 2 * since_s)
        return found

    def _near(self, first: int) -> Counts:
        """States that leave enough devices to either side; of many, those that spare each about its part."""
        before, behind = self._fewest[:, first]
        left = self._states.devices_left
        spare, used = self._devices - before - behind, self._devices - left
        possible = (before <= used) & (behind <= left)
        if self._paces.many:
            share = before + spare * before / max(1.0, before + behind)
            possible &= np.abs(used - share) <= max(LEAST_BAND, BAND * spare)
        return np.flatnonzero(possible)

    def _keep(self, first: int) -> None:
        """Keep the best suffixes of the layers from ``first`` on."""
        way, stop, room, exchange, _, terms = self._stages[first]
        states = self._near(first) if np.isfinite(self._fewest[:, first]).all() else np.zeros(0, np.int64)
        if not len(way) or not len(states):
            return
        after = self._states.behind(way, states)
        after += stop[:, None] * self._suffixes.trip_s.shape[1]
        where = self._states.standing(way, states)
        trip_s, since_s, deep, in_flight, most = (np.take(each, after) for each in self._suffixes[:5])
        forward_s, backward_s, around_s = (np.take(each, where) for each in terms)
        trip_s += around_s
        period, turns = self._paces.period[way][:, None], self._paces.turns[way][:, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            # What does not fit is infinite, or no number, and not within the limit.
            waiting = np.ceil(self._in_flight_when_waiting(trip_s, since_s, deep) * (1 - ROUNDING))
            wanted = np.maximum(in_flight, waiting)
            depth = np.minimum(turns, np.full_like(wanted, np.inf) if self._paces.whole else np.ceil(wanted / period))
            beside = beside_s(forward_s, backward_s, turns, depth)
        in_flight = np.minimum(depth * period, self._paces.micro_batches)
        passing = self._passing(in_flight, period, after)
        fits = (depth <= room[:, None]) & (beside <= self.beside_s * (1 + ROUNDING)) & (passing <= most)
        trip_s[~fits] = np.inf
        best, column = trip_s.argmin(axis=0), np.arange(len(states))
        found = np.isfinite(trip_s[best, column])
        best, column, states = best[found], column[found], states[found]
        every = trip_s, forward_s + backward_s, in_flight, since_s, deep, depth
        trip_s, own_s, in_flight, since_s, deep, depth = (each[best, column] for each in every)
        longest = self._longest_waiting(trip_s, own_s, in_flight, since_s, deep)
        more = LEAD + np.floor((room[best] - depth) * exchange[best])
        most, period = (depth + more) * period[best, 0], period[best, 0]
        kept = _Suffixes(trip_s, *longest, in_flight, most, period, way[best], stop[best])
        for table, numbers in zip(self._suffixes, kept, strict=True):
            table[first, states] = numbers

    def _longest_waiting(
        self, trip_s: Numbers, own_s: Numbers, in_flight: Numbers, since_s: Numbers, deep: Numbers
    ) -> tuple[Numbers, Numbers]:
        """Return ``since_s`` and ``deep`` of suffixes: those of their first stage where it keeps others longer."""
        own, later_s = (trip_s - own_s, in_flight - 1), trip_s + own_s
        longer = self._in_flight_when_waiting(later_s, *own) > self._in_flight_when_waiting(later_s, since_s, deep)
        return np.where(longer, own[0], since_s), np.where(longer, own[1], deep)


MANY_ELEMENTS = 20_000_000
"""Plans of families with more stages in all states of the pool are not looked through one by one."""
MOST_SWEPT = 1_200_000_000
"""All passes together look at so many stages in all states, but a few passes are made in any case."""
FEW_PASSES, PASSES = 7, 8
FEW_SWEEPS, SWEEPS = 19, 24
MOST_BOUNDED = 5_000_000_000
"""All sweeps of a bound together look at so many stages in all states, but a few sweeps are made in any case."""
FEW_CAPS, CAPS = 1, 3
"""Tables are made for so many caps between the bound and the best step: each cap excludes other stages."""
COARSE_STEP, FAR_STEP, FINE_STEP = 1.04, 1.3, 1.004
"""Times as slow as the last pace that was tried is the next one: mostly; once several could not be kept; and how close
the slowest pace that cannot be kept and the quickest that can are for the search between them to end."""
AHEAD = 1.36
"""The first pace that is tried is so many times as slow as the work of all devices alone would admit."""
NEAR = 1.03
"""A plan that keeps a pace is simulated if its step, about, is less than so many times the best one."""
LOWERED = 0.9525
"""A family that is too large for tables is bounded up to this part of the best step: the lower, the quicker."""
MOST_CAP = 1000
"""No plan is looked for whose step is more than so many times the bound by work."""


class FamilySearch:
    """Looks for good plans of a family, and proves how much better others might be."""

    def __init__(self, simulator: Simulator, stages: StageTables, options: PlanOptions, best: Best) -> None:
        self.simulator, self.costs, self.stages = simulator, simulator.costs, stages
        self.options, self.best = options, best
        self.large = stages.size > MANY_ELEMENTS
        self.passes = max(FEW_PASSES, min(PASSES, MOST_SWEPT // stages.size))
        self._capped_stages = CappedStages(stages, best.step_s)
        self.tabled_us = 0.0
        """The work of tables so far."""
        self.tables = (
            self._below(self._capped_stages) if stages.size <= MANY_SWEPT and self._capped_stages.possible else None
        )
        """Of the plans that may be better than the best one; none where there are none, or too many stages."""

    @property
    def hopeless(self) -> bool:
        """Whether no plan can be better than the best one."""
        return not self._capped_stages.possible or (self.tables is not None and self.tables.least_s == float("inf"))

    @property
    def pacing_us(self) -> float:
        """The work of :meth:`try_paces`."""
        return self.passes * (SWEPT * self.stages.size)

    def try_paces(self) -> None:
        """Judge plans of the quickest paces that can be kept, and of slower ones."""
        fewest_s = self._least_cap_s - self.costs.profile.step_overhead_s
        if fewest_s == float("inf"):
            return
        quickest_s, low_s, passes = fewest_s * AHEAD, 0.0, 1
        while self._try(quickest_s) == float("inf") and quickest_s < MOST_CAP * fewest_s:
            # None is quick enough; a pace that is slow enough can always be kept, if anything fits.
            low_s, passes = quickest_s, passes + 1
            quickest_s *= COARSE_STEP if passes <= FEW_PASSES else FAR_STEP
        slower_s = quickest_s
        while passes < self.passes and quickest_s > low_s * FINE_STEP:
            passes += 1
            next_s = (low_s * quickest_s) ** 0.5 if low_s > 0 else quickest_s / COARSE_STEP
            if self._try(next_s) < float("inf"):
                quickest_s = next_s
            else:
                low_s = next_s
        while passes < self.passes:
            passes, slower_s = passes + 1, slower_s * COARSE_STEP
            if self._try(slower_s) >= self.best.step_s * NEAR:
                break

    def prove_bound(self) -> tuple[float, SuffixTables | None]:
        """Return a lower bound, and tables of what may be better, unless these are too large to look through.

        What is not below a cap takes at least as long, and so does the least below it.
        """
        if self._least_cap_s == float("inf"):
            return float("inf"), None
        overhead_s = self.costs.profile.step_overhead_s
        lower_s = max(work_s(self.costs, self.stages.family), self._least_cap_s / COARSE_STEP)
        # Where no plan is known yet, what is slower than any sensible one is left out.
        most_s = min(self.best.step_s, MOST_CAP * lower_s)
        if self.tables is None and self.stages.chain:
            return self._round_trips_s(most_s * LOWERED, lower_s), None
        tables = self.tables or self._below(CappedStages(self.stages, most_s))
        lower_s = max(lower_s, min(most_s, tables.least_s + overhead_s))
        for _ in range((FEW_CAPS if self.large else CAPS) if tables.least_s < float("inf") else 0):
            cap_s = (lower_s + most_s) / 2
            below = self._below(CappedStages(self.stages, cap_s))
            lower_s = max(lower_s, min(cap_s, below.least_s + overhead_s))
        if self.stages.chain and lower_s * (1 + ENOUGH) < most_s:
            # Neither is always the closer bound.
            lower_s = self._round_trips_s(most_s, lower_s)
        return lower_s, None if self.large else tables

    def _round_trips_s(self, cap_s: float, lower_s: float) -> float:
        """Return a lower bound by round trips that is at most a cap; ``lower_s`` where it is not above that."""
        overhead_s = self.costs.profile.step_overhead_s
        sweeps = max(FEW_SWEEPS, min(SWEEPS, MOST_BOUNDED // self.stages.size))
        trips = RoundTrips(self.stages, self.states, self.options)
        return trips.bound_s(cap_s - overhead_s, sweeps, lower_s - overhead_s) + overhead_s

    @cached_property
    def states(self) -> States:
        """The states of the pool."""
        return States(self.stages)

    @cached_property
    def paces(self) -> Paces:
        """What plans are made of, at any pace."""
        return Paces(self.stages, self.states, self.options)

    @cached_property
    def _least_cap_s(self) -> float:
        """A step that the devices may suffice for, were there nothing but work; infinite where nothing fits."""
        least_s = cap_s = work_s(self.costs, self.stages.family)
        while not CappedStages(self.stages, cap_s).possible:
            cap_s *= COARSE_STEP
            if cap_s > MOST_CAP * least_s:
                return float("inf")
        return cap_s

    def _try(self, beside_s: float) -> float:
        """Judge the plan of a pace, if it may be better; return about how long its step takes."""
        paced = PacePlan(self.paces, beside_s)
        if paced.step_s >= self.best.step_s * NEAR:
            return paced.step_s
        family, (steps, depths) = self.stages.family, zip(*paced.plan_stages(), strict=True)
        # Depths go by what the stages were chosen to recompute, as few layers as fit may come of it.
        placed = map(self.stages.place, steps)
        frame = [stage._replace(warmup=stage.replicas.most(family.micro_batches)) for stage in placed]
        spans = [span_of(self.costs, family, self.options, stage) for stage in frame]
        if self.stages.constraints.broken(frame, self.costs.kind_of) is not None:
            # Paces do not count stages.
            return paced.step_s
        deep = with_depths(family, frame, depths).stages
        own, short = least_recomputed(self.costs, family, deep, spans)
        candidates = [own] if short <= 0 else []
        if short > 0 or not self.large:
            found = depth_choices(self.costs, family, frame, spans, exact=False)
            candidates += found.candidates
            self.best.miss(found.closest)
        for _ in self.best.judge_each(self.simulator, candidates):
            pass
        return paced.step_s

    def _below(self, capped_stages: CappedStages) -> SuffixTables:
        """Return the tables of plans that take less than a cap."""
        self.tabled_us += self.stages.table_us
        return SuffixTables(self.stages, self.options, capped_stages, self.states, single_precision=self.large)
