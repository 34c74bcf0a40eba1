"""Tables: lower bounds of all suffixes, as arrays over the states of the pool.

For the layers from ``first`` on, placed on the devices that a state of the pool leaves, a table holds the
component-wise minimum of the terms of all stages that fit: as :func:`autopar.planner.bounds.fold` never falls
when one of them grows, folding a prefix onto the minima never exceeds the bound of any completion.

Stages move from one state of the pool to another. With a cap on the step, a table leaves out stages that no plan below
it has, and states with fewer devices than the layers need. A prefix of stages is a function from the terms of what
follows to the seconds of the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.planner.bounds import LinkTerms, StageTerms, Terms, Value, fold, fold_chain, last
from autopar.planner.costs.activations import Counts, Numbers
from autopar.planner.options import PlanOptions
from autopar.planner.search.stages import NextStages, StageTables

SLACK = 1e-9


class CappedStages:
    """Stage tables without the stages that alone take longer than a step's ``cap_s``."""

    def __init__(self, stages: StageTables, cap_s: float = float("inf")) -> None:
        self._stages = stages
        self.limit_s = (cap_s - stages.costs.profile.step_overhead_s) * (1 + SLACK)
        self._next: dict[int, NextStages] = {}
        self.fewest = self._fewest()
        """Fewest devices of the layers before, and of those from on, every position."""

    @property
    def possible(self) -> bool:
        """Whether there are as many devices as the stages need, each for itself."""
        return bool(self.fewest[1, 0] <= len(self._stages.pool.remaining(0)))

    def next(self, first: int) -> NextStages:
        """Return the stages that may begin with a layer."""
        if first not in self._next:
            every = self._stages.next(first)
            within = every.alone_s.min(axis=0) <= self.limit_s
            self._next[first] = every if within.all() else every.some(np.flatnonzero(within))
        return self._next[first]

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
            alike = (known for known, other in enumerate(merged) if _agree(column, other))
            target[at] = known = next(alike, len(merged))
            if known == len(merged):
                merged.append(column)
            merged[known] = np.maximum(column, merged[known])
        self._group = target[index.ravel()]
        return [
            StateGroup(np.flatnonzero(self._group == at), *np.divmod(np.maximum(each, 0), nears))
            for at, each in enumerate(merged)
        ]


def _agree(column: Counts, other: Counts) -> bool:
    return bool(((column == other) | (column < 0) | (other < 0)).all())


MOST_ELEMENTS = 20_000_000
"""Of the arrays that make a family's tables; about a tenth of a second for so many."""

ROUNDING = 1e-4
"""Of rounded tables; hundreds of sums err by less."""


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
        told = min(layers, len(pool.remaining(0)), MOST_ELEMENTS // max(1, stages.size))
        told = max(1, stages.constraints.least_stages, told)
        self.counts = min(told, most)
        """Suffixes of fewer stages than this are told apart; the last entry is for those of so many, and more."""
        self._last_is_open = told < most
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

    def terms(self, first: int, state: int, behind: int) -> tuple[NextStages, Terms]:
        """Return the stages that may begin with a layer, and the least terms of suffixes that begin so.

        ``behind`` stages follow; the largest number that is told apart stands for all larger ones.
        """
        following = self._capped_stages.at(first, self.states.group_of(state))
        found = self._extend_terms(first, following, np.array([state]))
        return following, Terms(*(each[behind, :, 0] for each in found))

    def _prefixes(self) -> Numbers:
        """Least round trips of all stages before every position, where they count for what follows."""
        found = np.zeros(self.stages.layers + 1)
        if not self._chain:
            return found
        found[1:] = np.inf
        for first in range(self.stages.layers):
            following = self._capped_stages.next(first)
            stage, link = StageTerms(*following.stages), LinkTerms(True, True, *following.links[2:])
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
        wide = StageTerms(*following.stages[:, 0, :, None].astype(self._kind))
        forth, back, *seconds = following.links[:, 0, :, None].astype(self._kind)
        beyond = LinkTerms(forth > 0, back > 0, *seconds)
        behind = Terms(*self._suffixes(first, following, after))
        if self._chain:
            found = tuple(map(np.asarray, fold_chain(wide, beyond, behind)))
        else:
            # Where no gradient returns, some terms have nothing of what is behind: not even that nothing can be there.
            there = np.isfinite(behind.step_s)
            found = tuple(np.where(there, each, self._kind(np.inf)) for each in fold(wide, beyond, behind))
        ends = first + following.longest >= self.stages.layers
        if ends.any():
            empty = after[ends] == self.stages.pool.empty if self._use_all else after[ends] < self.states.none
            ending = StageTerms(*(np.asarray(term)[ends] for term in wide if term is not None))
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


_NONE = float("-inf")


class Prefix(NamedTuple):
    """The largest of a number, of a term of what follows and a number, and of lines over its round trip.

    :func:`autopar.planner.bounds.fold` is made of sums and maxima, so that folding any number of stages is again
    of this form.
    """

    constant_s: float = 0.0
    backward_s: float = _NONE
    """Added to the term U of what follows."""
    done_s: float = _NONE
    """Added to its term V."""
    lines: tuple[tuple[float, float], ...] = ()
    """(slope, seconds) over its term R, those only that are the largest somewhere."""

    def step_s(self, behind: Terms) -> Value:
        """Return the seconds of the step of this prefix before the stages ``behind``; scalars and arrays alike."""
        found = np.maximum(self.constant_s, behind.step_s)
        if self.backward_s > _NONE:
            found = np.maximum(found, self.backward_s + behind.backward_s)
        if self.done_s > _NONE:
            found = np.maximum(found, self.done_s + behind.done_s)
        for slope, seconds in self.lines:
            found = np.maximum(found, slope * behind.trip_s + seconds)
        return found

    def then(self, stage: StageTerms, link: LinkTerms) -> Prefix:
        """Return this prefix with one more stage behind it, and the boundary behind that."""
        # The step is the term V of the first stage, or that of a stage behind a boundary that nothing crosses.
        done_s = max(self.done_s, 0.0)
        backward_s = max(self.backward_s, done_s + float(stage.closing_s))
        own = float(stage.forward_s + stage.backward_s)
        forth_s, back_s = float(link.forth_s), float(link.back_s)
        rate, around, beside = float(stage.rate), own + forth_s + back_s, float(stage.beside_s)
        constant_s = max(self.constant_s, backward_s + float(stage.work_s))
        halves = stage.total_s, stage.rest_s
        total_s, rest_s = (_NONE if each is None else done_s + float(each) for each in halves)
        constant_s = max(constant_s, total_s)
        then_done_s = done_s + float(stage.forward_s) + forth_s if link.forth else _NONE
        if not link.back:
            fixed = (
                backward_s + rate * own,
                backward_s + own + beside,
                own + rest_s,
                *(slope * own + seconds for slope, seconds in self.lines),
            )
            return Prefix(max(constant_s, *fixed), _NONE, then_done_s)
        queued = max(float(link.forth_work_s) + back_s, forth_s + float(link.back_work_s))
        lines = [(slope, slope * around + seconds) for slope, seconds in self.lines]
        lines += [
            (rate, rate * around + backward_s),
            (1.0, max(backward_s + max(own + queued, around + beside), around + rest_s)),
        ]
        return Prefix(constant_s, backward_s + around, then_done_s, _largest(lines))


NOTHING = Prefix()


def _largest(lines: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return those lines that are the largest at some round trip from 0 on, by slope, ascending.

    >>> _largest([(1.0, 5.0), (2.0, 1.0), (1.0, 4.0), (1.5, 2.0)])
    ((1.0, 5.0), (2.0, 1.0))
    """
    hull: list[tuple[float, float]] = []
    for slope, seconds in sorted(lines):
        while hull and hull[-1][1] <= seconds:
            hull.pop()
        while len(hull) > 1 and _is_hidden(hull[-2], hull[-1], (slope, seconds)):
            hull.pop()
        hull.append((slope, seconds))
    return tuple(hull)


def _is_hidden(flat: tuple[float, float], middle: tuple[float, float], steep: tuple[float, float]) -> bool:
    """Whether a line is nowhere above both of its neighbours."""
    return (flat[1] - middle[1]) * (steep[0] - flat[0]) >= (flat[1] - steep[1]) * (middle[0] - flat[0])
