"""Search: candidates in the order of their lower bounds, judged by the simulator.

Best first over prefixes of stages, all families on one heap. A whole plan is a node of its own, still without depths:
its bound has in flight what fits. It opens into the candidates that differ in depths, each with its exact bound.

A plan's three bounds each know more than the one before: work alone, contiguous stages, links.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from autopar.formats.plan import Bounds
from autopar.planner.bounds.chain import (
    LinkTerms,
    StageTerms,
    Terms,
    candidate_bound_s,
    fold,
    link_terms,
    stage_terms,
    work_s,
)
from autopar.planner.candidate import Candidate, CandidateStage, Family, splits_backward
from autopar.planner.costs.layers import Span
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.placement.places import Places, pool_of
from autopar.planner.placement.pool import Pool
from autopar.planner.search.depths import depth_choices
from autopar.planner.search.judge import BEST_FIRST, ENOUGH, PACES, Best, fitted_us, least_gap, simulated_us
from autopar.planner.search.pace import FamilySearch
from autopar.planner.search.stages import StageTables
from autopar.planner.search.tables import NOTHING, ROUNDING, CappedStages, SuffixTables
from autopar.planner.search.variants import FINE, ROUGH, Fineness
from autopar.planner.simulator.simulate import Simulator

MOST_APART = 4_000_000
"""Stages in all states of the pool up to which bounds tell each apart; of more, similar ones are bounded together."""
MOST_BOUNDED, MOST_CLOSELY_BOUNDED = 10_000_000, 1_000_000_000
"""Stages in all states up to which bounds are found that no plan is looked for with."""
MOST_PUSHED = 20
"""Next stages that are kept where they are taken together."""
EXPANSIONS = 1_000
EXPANSIONS_WHEN_EXACT = 2_000_000
HOPELESS = 1.1
LEAST_CANDIDATES = 60
"""Simulated even where fewer certify the gap: what is left of it costs little to try for."""


class SearchResult(NamedTuple):
    """What a search proves."""

    lower_bound_s: float
    """No plan that was searched takes less."""
    least_bound_s: float
    """The least bound of any plan that fits; infinite where none does, or none was met."""


class _Step(NamedTuple):
    """A chosen stage, without its depth."""

    first: int
    stop: int
    way: int
    state: int
    """Of the pool, before."""


class _StagePath:
    """The first stages of a plan."""

    __slots__ = ("before", "count", "prefix", "stage", "step", "terms", "trip_s")

    def __init__(
        self, before: _StagePath | None, step: _Step, stage: CandidateStage, terms: StageTerms, link: LinkTerms | None
    ) -> None:
        self.before, self.step, self.stage, self.terms = before, step, stage, terms
        self.count, self.prefix, self.trip_s = 1, NOTHING, 0.0
        if before is not None and link is not None:
            self.count = before.count + 1
            self.prefix = before.prefix.then(before.terms, link)
            own = before.terms.forward_s + before.terms.backward_s + link.forth_s + link.back_s
            self.trip_s = before.trip_s + float(own)

    def stages(self) -> list[_StagePath]:
        """Return the path to every stage, the first one's first."""
        found: list[_StagePath] = []
        path: _StagePath | None = self
        while path is not None:
            found.append(path)
            path = path.before
        return found[::-1]


class _SearchNode(NamedTuple):
    """A family with its first stages chosen, or a candidate; the heap's order is the fields' order."""

    bound_s: float
    layers_left: int
    """Layers yet to place; the deepest of equals is first, so that plateaus yield plans. -1 for a candidate."""
    trip_s: float
    sequence: int
    family: int
    path: _StagePath | None = None
    step: _Step | None = None
    """The last stage, behind those of the path."""
    behind: int | None = None
    """Stages yet to choose, as the tables tell them apart; none: any number."""
    candidate: Candidate | None = None


class _Search:
    def __init__(
        self, simulator: Simulator, families: Sequence[Family], options: PlanOptions, best: Best, pool: Pool
    ) -> None:
        self.simulator, self.costs = simulator, simulator.costs
        self.families, self.options, self.best, self.pool = families, options, best, pool
        self.places = Places(self.costs, pool)
        self.tables: dict[int, SuffixTables] = {}
        self.heap: list[_SearchNode] = []
        self.sequence = self.candidates = 0
        self.work_left = BEST_FIRST * options.effort if options.gap > 0 else float("inf")
        """Work that may yet be done."""
        self.gap = least_gap(options)
        self.enough = max(ENOUGH, options.gap) if options.effort == 1 else options.gap
        self.pacing = PACES * options.effort
        """Work that may yet be done to look for plans that keep a pace."""
        self.floor_s = float("inf")
        """The least bound of what is not looked at: plans not all of whose depths are tried, and large families."""
        self.least_bound_s = float("inf")
        self.placed_stages: dict[tuple[int, _Step], tuple[CandidateStage, StageTerms] | None] = {}

    def go(self) -> SearchResult:
        """Search; see :func:`search`."""
        for index in self._promising_first():
            self._begin(index)
        expansions = 0
        most = EXPANSIONS if self.options.gap > 0 else EXPANSIONS_WHEN_EXACT
        limit = self.options.candidate_limit
        while self.heap and self.candidates < limit and expansions < most and self.work_left > 0:
            proved_s = min(self.heap[0].bound_s, self.floor_s)
            if self.best.step_s <= self.heap[0].bound_s or (
                self.best.step_s <= (1 + self.gap) * proved_s and self.candidates >= LEAST_CANDIDATES
            ):
                break
            node = heapq.heappop(self.heap)
            if node.candidate is not None:
                self._judge(node.bound_s, node.candidate)
                continue
            # Down to a whole plan at once: what is below a promising prefix is soon known, and prunes the rest.
            below: _SearchNode | None = node
            while below is not None and below.layers_left > 0:
                expansions += 1
                below = self._open(below)
            if below is not None:
                self._complete(below)
        ahead = self.heap[0].bound_s if self.heap else float("inf")
        return SearchResult(min(self.best.step_s, self.floor_s, ahead), self.least_bound_s)

    def _promising_first(self) -> list[int]:
        """Return the families, those first of which the best plans are known: others are the sooner left out."""
        known = {
            count: found.step_s for (trait, count), found in self.best.by_trait.items() if trait == "micro_batches"
        }
        counts = [family.micro_batches for family in self.families]
        return sorted(range(len(counts)), key=lambda at: known.get(counts[at], float("inf")))

    def _begin(self, index: int) -> None:
        """Push a family whose plans are to be looked through one by one."""
        family = self.families[index]
        bound_s = work_s(self.costs, family)
        if bound_s >= self.best.step_s:
            self.floor_s = min(self.floor_s, bound_s)
        elif self._prepare(index):
            tables = self.tables[index]
            bound_s = max(bound_s, tables.least_s + self.costs.profile.step_overhead_s)
            self._push(_SearchNode(bound_s, self.costs.layer_count, 0.0, 0, index))

    def _push(self, node: _SearchNode) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, node._replace(sequence=self.sequence))

    def _judge(self, bound_s: float, candidate: Candidate) -> float | None:
        self.least_bound_s = min(self.least_bound_s, bound_s)
        self.candidates += 1
        self.work_left -= simulated_us(candidate)
        return self.best.judge(self.simulator, candidate)

    def _complete(self, node: _SearchNode) -> None:
        """Push the candidates of a plan that is whole but for its depths."""
        path = self._path(node)
        if path is None:
            return
        family = self.families[node.family]
        paths = path.stages()
        stages = [each.stage for each in paths]
        exact = self.options.gap == 0
        spans = [self._span(node.family, each.step) for each in paths]
        found = depth_choices(self.costs, family, stages, spans, exact=exact)
        self.work_left -= fitted_us(len(stages))
        tried: list[float] = []
        for candidate in found.candidates:
            bound_s = max(node.bound_s, candidate_bound_s(self.costs, candidate))
            if bound_s < self.best.step_s and exact:
                self._push(_SearchNode(bound_s, -1, 0.0, 0, node.family, candidate=candidate))
            elif bound_s < self.best.step_s and (not tried or min(tried) < HOPELESS * self.best.step_s):
                # Where the first choices of depths are far behind, the others are not tried.
                tried.append(self._judge(bound_s, candidate) or 0.0)
        if found.closest is not None:
            self.best.miss(*found.closest)
        if not found.complete:
            self.floor_s = min(
                self.floor_s, max(node.bound_s, candidate_bound_s(self.costs, self._frame(node.family, stages)))
            )

    def _span(self, family: int, step: _Step) -> Span:
        """How many layers of a stage may be recomputed; of similar stages that are taken together, all."""
        tables = self.tables[family].stages
        low, high = tables.recompute_range(step.way, step.first, step.stop)
        levels = self.costs.recompute_levels(self.families[family].micro_batch_size, tables.ways[step.way].kind)
        return Span(levels, low, high if tables.apart or self.options.recompute == "none" else None)

    def _place(self, family: int, step: _Step) -> tuple[CandidateStage, StageTerms] | None:
        """Return a chosen stage with as much in flight as fits, and the least recomputation of its choice."""
        if (family, step) not in self.placed_stages:
            tables, rows = self.tables[family].stages, self.families[family].micro_batch_size
            kind, _, choice, width, _, variant = tables.ways[step.way]
            devices = self.pool.devices(step.state, kind, width, variant)
            depth = tables.depth_of(step.way, step.first, step.stop, self.costs.limit_bytes(devices))
            shares = self.costs.shares(rows, width, choice.division)
            recompute = self._span(family, step).within(step.first, step.stop)[0]
            stage = CandidateStage(
                step.first, step.stop, devices, shares, depth, recompute, choice.shard, choice.division
            )
            terms = stage_terms(self.costs, stage, self.families[family].micro_batches) if depth else None
            self.placed_stages[family, step] = None if terms is None else (stage, terms)
        return self.placed_stages[family, step]

    def _path(self, node: _SearchNode) -> _StagePath | None:
        """Return a node's stages; None where the last one fits only if it is wider than it is tried."""
        assert node.step is not None
        placed = self._place(node.family, node.step)
        if placed is None:
            return None
        link = None
        if node.path is not None:
            frame = self._frame(node.family, (node.path.stage, placed[0]))
            link = link_terms(self.costs, node.path.stage, placed[0], frame)
        return _StagePath(node.path, node.step, *placed, link)

    def _prepare(self, index: int) -> bool:
        """Make a family's tables; return whether its plans are to be looked through one by one."""
        family = self.families[index]
        if self.options.gap == 0:
            stages = StageTables(self.costs, self.pool, family, self.options, places=self.places)
            self.tables[index] = SuffixTables(stages, self.options)
            return True
        apart = looked_at(self.costs, self.pool, family, self.options) <= MOST_APART
        if len(self.families) > 1:
            # Tables that tell fewer recomputations apart are sooner made.
            rough = self._opening(family, ROUGH)
            if rough is None:
                return False
            least_s = 0.0 if rough.tables is None else rough.tables.least_s + self.costs.profile.step_overhead_s
            if not apart and self.pacing <= 0 and self.best.step_s <= (1 + self.enough) * least_s:
                self.floor_s = min(self.floor_s, least_s)
                return False
        opening = self._opening(family, None if apart else FINE)
        if opening is None:
            return False
        if self.pacing > 0:
            # However long it takes, for the most promising family.
            self.pacing -= opening.try_paces()
        tables = opening.tables
        if not apart:
            found = opening.prove_bound()
            # Not every plan is a node, but none is below this.
            self.floor_s, tables = min(self.floor_s, found.lower_bound_s), found.tables
        if tables is not None:
            self.tables[index] = tables
        return tables is not None

    def _opening(self, family: Family, fineness: Fineness | None) -> FamilySearch | None:
        """Open a family; none where no plan of it can be better than the best one."""
        stages = StageTables(self.costs, self.pool, family, self.options, fineness=fineness, places=self.places)
        opening = FamilySearch(self.simulator, stages, self.options, self.best)
        if not opening.hopeless:
            return opening
        self.floor_s = min(self.floor_s, self.best.step_s * (1 - ROUNDING if opening.large else 1))
        return None

    def _open(self, node: _SearchNode) -> _SearchNode | None:
        """Push every choice of the next stage but the best one; return that."""
        tables, path = self.tables[node.family], None
        stop = state = 0
        if node.step is not None:
            path = self._path(node)
            if path is None:
                return None
            stop, state = node.step.stop, tables.after(node.step.way, node.step.state)
        found: list[_SearchNode] = []
        for behind in tables.behinds(node.behind):
            # Behind as many as are told apart there may be more: too few cannot be known, too many can.
            count = behind + 1 + (0 if path is None else path.count)
            if count < self.options.min_stages or count > tables.stages.constraints.most_stages:
                continue
            following, terms = tables.terms(stop, state, behind)
            for at, bound_s, trip_s in self._promising(node, path, terms):
                after = stop + int(following.length[at])
                step = _Step(stop, after, int(following.way[at]), state)
                left = self.costs.layer_count - after
                found.append(_SearchNode(bound_s, left, trip_s, len(found), node.family, path, step, behind))
        if not found:
            return None
        found.sort()
        for each in found[1 : None if tables.stages.apart else MOST_PUSHED]:
            self._push(each)
        return found[0]

    def _promising(
        self, node: _SearchNode, path: _StagePath | None, terms: Terms
    ) -> Iterator[tuple[int, float, float]]:
        """Yield the next stages that may beat the best plan, with their bounds and round trips."""
        if path is not None:
            tables = self.tables[node.family].stages
            terms = fold(
                path.terms, tables.link(path.step.way, path.step.first, path.step.stop, path.step.state), terms
            )
        bounds = np.asarray(terms.step_s if path is None else path.prefix.step_s(terms))
        bounds = bounds + self.costs.profile.step_overhead_s
        trips = np.asarray(terms.trip_s) + (0.0 if path is None else path.trip_s)
        some = np.flatnonzero(bounds < self.best.step_s)
        least = np.maximum(node.bound_s, bounds[some]).tolist()
        return zip(some.tolist(), least, trips[some].tolist(), strict=True)

    def _frame(self, family: int, stages: Sequence[CandidateStage]) -> Candidate:
        return Candidate(*self.families[family], tuple(stages))


def tables_of(
    costs: CostModel,
    family: Family,
    options: PlanOptions,
    pool: Pool,
    cap_s: float = float("inf"),
    *,
    late: bool = False,
    most: int = MOST_BOUNDED,
) -> SuffixTables | None:
    """Return tables of a family's plans of fewer seconds than a cap; none where they would take long.

    ``late`` as of :class:`StageTables`; ``most`` are the stages, in all states, of which tables are made.
    """
    if looked_at(costs, pool, family, options) > most:
        return None
    places = Places(costs, pool)
    for fineness in (None,) if options.gap == 0 else (ROUGH, FINE):
        stages = StageTables(costs, pool, family, options, fineness=fineness, late=late, places=places)
        tables = SuffixTables(stages, options, CappedStages(stages, cap_s))
        told = any(choice.recomputes for own in stages.choices.values() for choice in own)
        if tables.least_s == float("inf") or not told:
            break
    return tables


def looked_at(costs: CostModel, pool: Pool, family: Family, options: PlanOptions) -> int:
    """Return about how many stages there are, over all states of the pool, were each told apart."""
    widths = min(len(costs.devices), family.micro_batch_size) + min(len(costs.devices), family.micro_batches)
    return pool.states * widths * len(options.shards) * costs.layer_count**2 // 2


def search(simulator: Simulator, families: Sequence[Family], options: PlanOptions, best: Best) -> SearchResult:
    """Improve on ``best``.

    The bound holds for every plan of the families, whatever ended the search: the best plan was proved best or close
    enough, or as many plans were simulated as the options allow.
    """
    pool = pool_of(simulator.costs, exact=options.gap == 0, use_all=options.use_all)
    return _Search(simulator, families, options, best, pool).go()


Least = Callable[[CostModel, Family, float], float]
"""The least bound of any plan of a family under a cost model, if it is below some seconds."""


def least_bound_s(options: PlanOptions, most: int = MOST_BOUNDED) -> Least:
    """Return what bounds the plans that the options admit, by the search's tables; their work where these are large.

    ``most`` as of :func:`tables_of`.
    """

    def least(costs: CostModel, family: Family, below_s: float) -> float:
        pool = pool_of(costs, exact=options.gap == 0, use_all=options.use_all)
        found = work_s(costs, family)
        for late in (False, True) if splits_backward(family.schedule) else (False,):
            tables = tables_of(costs, family, options, pool, below_s, late=late, most=most)
            if tables is None:
                return work_s(costs, family)
            found = max(found, min(below_s, costs.profile.step_overhead_s + tables.least_s))
            if found >= below_s:
                break
        return found

    return least


def bounds_of_families(costs: CostModel, families: Sequence[Family], least: Least, step_s: float) -> Bounds:
    """Return the bounds of all plans of some families; none is above ``step_s``, the step of one of them.

    Each drops something that only costs time: the bound without links and memory limits drops both, the next one the
    limits. A family whose weaker bound is not below the least stronger one met is left out; most are.
    """
    known = {family: work_s(costs, family) for family in families}
    work = min(step_s, *known.values())
    contiguous = max(work, least_of_families_s(known, least, costs.without(links=True, memory=True), step_s))
    linked = max(contiguous, least_of_families_s(known, least, costs.without(memory=True), step_s))
    return Bounds(work_s=work, contiguous_s=contiguous, linked_s=linked)


def least_of_families_s(
    bounds_s: dict[Family, float], least: Least, costs: CostModel, most_s: float, *, descending: bool = False
) -> float:
    """Return the least bound of all families, but at most ``most_s``; ``bounds_s`` bounds become those of ``costs``.

    Families of low known bounds are looked at first, or, ``descending``, last: where these are of few micro-batches
    that do not fit, they are the sooner left out.
    """
    best = most_s
    for family in sorted(bounds_s, key=lambda each: (bounds_s[each], each), reverse=descending):
        if bounds_s[family] >= best:
            continue
        bounds_s[family] = max(bounds_s[family], least(costs, family, best))
        best = min(best, bounds_s[family])
    return best
