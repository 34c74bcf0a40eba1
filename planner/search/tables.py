"""Tables: lower bounds of all suffixes, as arrays over the states of the pool.

For the layers from ``first`` on, placed on the devices that a state of the pool leaves, a table holds the
component-wise minimum of the terms of all stages that fit: as :func:`autopar.planner.bounds.chain.fold` never falls
when one of them grows, folding a prefix onto the minima never exceeds the bound of any completion.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from autopar.planner.bounds.chain import LinkTerms, StageTerms, Terms, Value, fold, fold_chain, last
from autopar.planner.costs.areas import Counts
from autopar.planner.options import PlanOptions
from autopar.planner.search.caps import Capped
from autopar.planner.search.stages import Next, StageTables
from autopar.planner.search.states import Group, States

MOST_ELEMENTS = 20_000_000
"""Of the arrays that make a family's tables; about a tenth of a second for so many."""

ROUNDING = 1e-4
"""Of rounded tables; hundreds of sums err by less."""

Numbers = npt.NDArray[np.float64]


class SuffixTables:
    """Least terms of all suffixes, for one family, by how many stages they have.

    Those of many stages are lumped together, so that tables of large problems stay small. What cannot
    be part of a plan of fewer seconds than the cap is left out.
    """

    def __init__(
        self,
        stages: StageTables,
        options: PlanOptions,
        capped: Capped | None = None,
        states: States | None = None,
        *,
        rounded: bool = False,
    ) -> None:
        """Fill the tables; ``rounded`` ones take half the time and room, and their bounds less than the rounding."""
        self.stages, self._use_all = stages, options.use_all
        self._capped = capped or Capped(stages)
        pool, layers = stages.pool, stages.layers
        most = stages.constraints.most_stages
        told = self._distinguished(stages.constraints.least_stages)
        self.counts = min(told, most)
        """Suffixes of fewer stages than this are told apart; the last entry is for those of so many, and more."""
        self._lumped = told < most
        self.states = states or States(stages)
        self._kind: type[np.float64] = np.float32 if rounded else np.float64  # type: ignore[assignment]  # read as numbers
        self._least = np.full((4, self.counts, layers + 1, pool.states + 1), np.inf, self._kind)
        self._chain = stages.chain
        self._before = self._prefixes()
        if self._capped.possible:
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
        return range(max(0, stages - 1), stages + (self._lumped and stages == self.counts - 1))

    def after(self, way: int, state: int) -> int:
        """Return the state behind a stage."""
        return int(self.states.after[way, state])

    def terms(self, first: int, state: int, behind: int) -> tuple[Next, Terms]:
        """Return the stages that may begin with a layer, and the least terms of suffixes that begin so.

        ``behind`` stages follow; the largest number that is told apart stands for all larger ones.
        """
        following = self._capped.next(first)
        found = self._extended(first, following, self.states.group_of(state), np.array([state]))
        return following, Terms(*(each[behind, :, 0] for each in found))

    def _prefixes(self) -> Numbers:
        """Least round trips of all stages before every position, if there is a cap and they count for what follows."""
        found = np.zeros(self.stages.layers + 1)
        if not np.isfinite(self._capped.cap_s) or not self._chain:
            return found
        found[1:] = np.inf
        for first in range(self.stages.layers):
            following = self._capped.next(first)
            stage, link = StageTerms(*following.stages), LinkTerms(True, True, *following.links[2:])
            around = np.min(stage.forward_s + stage.backward_s, axis=0) + np.min(link.forth_s + link.back_s, axis=0)
            for more in range(int((following.longest - following.length).max(initial=0)) + 1):
                some = following.longest - following.length >= more
                np.minimum.at(found, first + following.length[some] + more, found[first] + around[some])
        return found

    def _fill(self, first: int) -> None:
        following = self._capped.next(first)
        for group in self.states.groups if len(following.way) else ():
            states = self.states.within(group, first, self._capped)
            near = self._capped.at(first, group.place) if len(states) else following
            if len(states) and len(near.way):
                found = self._extended(first, near, group, states)
                if np.isfinite(self._capped.cap_s):
                    over = found[1] + self._before[first] > self._capped.limit_s
                    for each in found:
                        each[over] = np.inf
                for term, each in enumerate(found):
                    self._least[term, :, first, states] = each.min(axis=1).T

    def _extended(self, first: int, following: Next, group: Group, states: Counts) -> tuple[Numbers, ...]:
        """Terms ``[stages behind, stage, state]``."""
        after = self.states.behind(following.way, states)
        wide = StageTerms(*self._columns(following.stage_at(group.place)))
        forth, back, *seconds = following.link_at(group.near)
        beyond = LinkTerms(np.asarray(forth)[:, None], np.asarray(back)[:, None], *self._columns(seconds))
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
            for each, closed in zip(found, last(wide.at((np.flatnonzero(ends),))), strict=True):
                closing = np.where(empty, np.asarray(closed), np.inf)
                each[0, ends] = np.minimum(each[0, ends], closing) if self.counts == 1 and self._lumped else closing
        return found

    def _columns(self, terms: Iterable[Value]) -> Numbers:
        found: Numbers = np.array(list(terms), dtype=self._kind)[:, :, None]
        return found

    def _suffixes(self, first: int, following: Next, after: Counts) -> Numbers:
        """Least terms behind every next stage, ``[term, stages behind, stage, state]``."""
        width = self._least.shape[3]
        table = self._least.reshape(4, self.counts, -1)
        behind = after + (first + following.length)[:, None] * width
        found: Numbers = np.take(table, behind, axis=2)
        for step in range(1, int((following.longest - following.length).max(initial=0)) + 1):
            more = np.flatnonzero(following.longest - following.length >= step)
            found[:, :, more] = np.minimum(found[:, :, more], np.take(table, behind[more] + step * width, axis=2))
        if self.counts == 1 and self._lumped:
            return found
        # Behind a stage that n stages follow stands a suffix of n; of the most that are told apart, of as many or more.
        shifted = np.full_like(found, np.inf)
        shifted[:, 1:] = found[:, :-1]
        if self._lumped:
            shifted[:, -1] = np.minimum(found[:, -1], shifted[:, -1])
        return shifted

    def _distinguished(self, least: int) -> int:
        tables, devices = self.stages, len(self.stages.pool.remaining(0))
        return max(1, least, min(tables.layers, devices, MOST_ELEMENTS // max(1, tables.size)))
