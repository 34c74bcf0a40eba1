"""Search: candidates in the order of their lower bounds, judged by the simulator.

Best first over prefixes of stages, all families on one heap. A whole plan is a node of its own, still without depths:
its bound has in flight what fits. It opens into the candidates that differ in depths, each with its exact bound.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from autopar.formats.prediction import Bounds
from autopar.options.plan import PlanOptions
from autopar.planner.bounds import LinkTerms, StageTerms, Terms, candidate_bound_s, fold, link_terms, work_s
from autopar.planner.candidate import Candidate, CandidateStage, Family
from autopar.planner.costs.layers import Span
from autopar.planner.costs.model import CostModel
from autopar.planner.placement import Places
from autopar.planner.pool import Pool, pool_of
from autopar.planner.search.configs import COARSE, FINE, ROUGH, Fineness
from autopar.planner.search.depths import depth_choices
from autopar.planner.search.judge import BEST_FIRST, ENOUGH, FITTED, PACES, TABLES, Best, least_gap, simulated_us
from autopar.planner.search.pace import FamilySearch
from autopar.planner.search.stages import StageTables, Step
from autopar.planner.search.tables import ROUNDING, CappedStages, SuffixTables
from autopar.planner.simulator.simulate import Simulator

MANY_ROUNDED = 5_000_000
"""Bounds without limits of memory are in single precision for more stages, in all states of the pool, than this."""
MOST_APART = 4_000_000
"""Of more stages, in all states of the pool, similar ones are bounded together."""
MOST_PACED = 12_000_000
"""Of more stages, plans that keep a pace are looked for only where even splits speak for the family."""
MOST_IN_TEAMS = 100_000_000
"""Of more stages where teams may run them, such plans are looked for only if the fastest plan is asked for."""
MOST_FINE = 10_000_000.0
"""Where a table takes more work, and tensors pass stages by, fewer sorts of stages are told apart in it."""
MOST_BOUNDED, MOST_CLOSELY_BOUNDED = 10_000_000, 1_000_000_000
"""Tables that serve a bound alone, and no search, are made of at most so many stages in all states of the pool."""
MOST_PUSHED = 20
"""Where similar stages are taken together, so many of the best next ones are kept of every beginning of a plan."""
MOST_MIXED = 64
"""Numbers of replicas on several kinds that are told apart; of more, similar ones are taken together."""
EXPANSIONS = 1_000
EXPANSIONS_WHEN_EXACT = 2_000_000
HOPELESS = 1.1
FAR = 1.5
"""Large families are left out of which only plans are known that take so many times the best step or more."""
LEAST_CANDIDATES = 60
"""So many candidates are simulated even if fewer prove the gap that is asked for: to close more of it costs little."""


class SearchResult(NamedTuple):
    """What a search proves."""

    lower_bound_s: float
    """No plan that was searched takes less."""
    least_bound_s: float
    """The least bound of any plan that fits; infinite where none does, or none was met."""
    linked_s: dict[Family, float]
    """Of families that were looked at: what none of their plans falls below, nor the best step then, in any memory."""
    notes: tuple[str, ...] = ()


class _StagePath(NamedTuple):
    """The first stages of a plan."""

    steps: tuple[Step, ...]
    stages: tuple[CandidateStage, ...]
    terms: StageTerms
    """Of the last one."""
    before: tuple[tuple[StageTerms, LinkTerms], ...] = ()
    """Of those before, and of the boundaries behind them."""
    trip_s: float = 0.0
    """Over those before, and the boundaries behind them."""


class _SearchNode(NamedTuple):
    """A family with its first stages chosen, or a candidate; the heap's order is the fields' order."""

    bound_s: float
    layers_left: int
    """Layers yet to place; the deepest of equals is first, so that plateaus yield plans. -1 for a candidate."""
    trip_s: float
    sequence: int
    tables: SuffixTables
    """Of its family."""
    path: _StagePath | None = None
    step: Step | None = None
    """The last stage, behind those of the path."""
    behind: int | None = None
    """Stages yet to choose, as the tables tell them apart; none: any number."""
    candidate: Candidate | None = None


class DepthSearch:
    """Tries the depths of whole plans, in the order of their bounds where all of them are asked for."""

    def __init__(self, simulator: Simulator, options: PlanOptions, best: Best) -> None:
        self.simulator, self.costs, self.options, self.best = simulator, simulator.costs, options, best
        self.candidates, self.exact = 0, options.gap == 0
        self.work_left = 0.0
        """Work that may yet be done."""
        self.floor_s = float("inf")
        """The least bound of what is not looked at: plans not all of whose depths are tried, and large families."""
        self.least_bound_s = float("inf")

    def judge(self, bound_s: float, candidate: Candidate) -> float | None:
        """Simulate a candidate."""
        self.least_bound_s = min(self.least_bound_s, bound_s)
        self.candidates += 1
        self.work_left -= simulated_us(candidate)
        return self.best.judge(self.simulator, candidate)

    def try_depths(
        self, frame: Candidate, spans: Sequence[Span], least_s: float = 0.0
    ) -> Iterator[tuple[float, Candidate]]:
        """Judge the candidates of a plan that is whole but for its depths, whose bound is ``least_s``.

        Yields them with their bounds, not judged, where all depths are asked for.
        """
        found = depth_choices(self.costs, frame.family, frame.stages, spans, exact=self.exact)
        self.work_left -= FITTED * len(frame.stages)
        tried: list[float] = []
        for candidate in found.candidates:
            bound_s = max(least_s, candidate_bound_s(self.costs, candidate))
            if bound_s < self.best.step_s and self.exact:
                yield bound_s, candidate
            elif bound_s < self.best.step_s and (not tried or min(tried) < HOPELESS * self.best.step_s):
                # Where the first choices of depths are far behind, the others are not tried.
                tried.append(self.judge(bound_s, candidate) or 0.0)
        self.best.miss(found.closest)
        if not found.complete:
            self.floor_s = min(self.floor_s, max(least_s, candidate_bound_s(self.costs, frame)))


class Search(DepthSearch):
    """The search of all families; see :func:`search`."""

    def __init__(self, simulator: Simulator, families: Sequence[Family], options: PlanOptions, best: Best) -> None:
        super().__init__(simulator, options, best)
        self.families = families
        self.places = places_of(self.costs, options)
        self.unlimited = self.costs.without(memory=True)
        self.heap: list[_SearchNode] = []
        self.sequence = 0
        self.enough = max(ENOUGH, options.gap) if options.effort == 1 else options.gap
        self.pacing_left, self.last_us = PACES * options.effort, 0.0
        self.tables_left = TABLES * options.effort
        """Work that may yet be done to look for plans that keep a pace; and what the last family took."""
        self.far_s = FAR * best.step_s
        """How slow the best plan known of a large family may be for others to be looked for."""
        self.lowest: tuple[float, FamilySearch] | None = None
        """Of large families of which no plans were looked for, and soon would be, the least bound."""
        self.linked_s: dict[Family, float] = {}

    def go(self) -> SearchResult:
        """Search; see :func:`search`."""
        for index, family in enumerate(sorted(self.families, key=self._known_s), 1):
            self.simulator.progress(f"bounding family {index} of {len(self.families)}", 0.2)
            self._begin(family)
        if self.lowest is not None and self.lowest[0] < self.best.step_s:
            # What bounds a family of tight memory tells more of its plans than what even splits there are.
            self.lowest[1].try_paces()
        expansions, gap, limit = 0, least_gap(self.options), self.options.candidate_limit
        most = EXPANSIONS if self.options.gap > 0 else EXPANSIONS_WHEN_EXACT
        self.work_left = BEST_FIRST * self.options.effort if self.options.gap > 0 else float("inf")
        while self.heap and self.candidates < limit and expansions < most and self.work_left > 0:
            proved_s = min(self.heap[0].bound_s, self.floor_s)
            if self.best.step_s <= self.heap[0].bound_s or (
                self.best.step_s <= (1 + gap) * proved_s and self.candidates >= LEAST_CANDIDATES
            ):
                break
            if self.options.gap == 0:
                left = self.best.step_s / proved_s - 1 if proved_s > 0 else float("inf")
                self.simulator.progress(f"proving the best plan: {expansions} plans opened, {left:.1%} left", 0.4)
            node = heapq.heappop(self.heap)
            if node.candidate is not None:
                self.judge(node.bound_s, node.candidate)
                continue
            # Down to a whole plan at once: what is below a promising prefix is soon known, and prunes the rest.
            below: _SearchNode | None = node
            while below is not None and below.layers_left > 0:
                expansions += 1
                below = self._open(below)
            if below is not None:
                self._complete(below)
        ahead = self.heap[0].bound_s if self.heap else float("inf")
        return SearchResult(min(self.best.step_s, self.floor_s, ahead), self.least_bound_s, self.linked_s)

    def _known_s(self, family: Family) -> float:
        """The best step known of as many micro-batches: others are the sooner left out, once such a family is done."""
        found = self.best.by_trait.get(("micro_batches", family.micro_batches))
        return float("inf") if found is None else found.step_s

    def _begin(self, family: Family) -> None:
        """Push a family whose plans are to be looked through one by one."""
        bound_s = work_s(self.costs, family)
        if bound_s >= self.best.step_s:
            self.floor_s = min(self.floor_s, bound_s)
            return
        found = self._tables_of(family)
        if found is not None:
            tables, proved_s = found
            bound_s = max(bound_s, proved_s, tables.least_s + self.costs.profile.step_overhead_s)
            self._push(_SearchNode(bound_s, self.costs.layer_count, 0.0, 0, tables))

    def _push(self, node: _SearchNode) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, node._replace(sequence=self.sequence))

    def _complete(self, node: _SearchNode) -> None:
        """Push the candidates of a plan that is whole but for its depths."""
        path = self._path(node)
        if path is None:
            return
        frame = Candidate(*node.tables.stages.family, path.stages)
        spans = [self._span(node.tables.stages, step) for step in path.steps]
        for bound_s, candidate in self.try_depths(frame, spans, node.bound_s):
            self._push(_SearchNode(bound_s, -1, 0.0, 0, node.tables, candidate=candidate))

    def _span(self, stages: StageTables, step: Step) -> Span:
        """How many layers of a stage may be recomputed; of similar stages that are taken together, all."""
        span = stages.span(step)
        return span if stages.apart or self.options.recompute == "none" else span._replace(high=None)

    def _path(self, node: _SearchNode) -> _StagePath | None:
        """Return a node's stages; None where the last one fits only if it is wider than it is tried."""
        assert node.step is not None
        stages, before = node.tables.stages, node.path
        stage, terms = stages.placed_stage(node.step)
        if terms is None:
            return None
        if before is None:
            return _StagePath((node.step,), (stage,), terms)
        beside, own = (before.stages[-1], stage), before.terms
        link = link_terms(self.costs, *beside, Candidate(*stages.family, beside))
        trip_s = before.trip_s + float(own.forward_s + own.backward_s + link.forth_s + link.back_s)
        folded = (*before.before, (own, link))
        return _StagePath((*before.steps, node.step), (*before.stages, stage), terms, folded, trip_s)

    def _tables_of(self, family: Family) -> tuple[SuffixTables, float] | None:
        """Return a family's tables and a lower bound; none where its plans are not to be looked through one by one."""
        if self.options.gap == 0:
            stages = StageTables(self.costs, self.places, family, self.options)
            return SuffixTables(stages, self.options), 0.0
        size = looked_at(self.costs, self.places.pool, family, self.options)
        apart, paces = size <= MOST_APART, self._is_paced(family, size)
        looked_through = apart or paces
        if not looked_through and len(self.costs.teams) > 1:
            # Of so many more ways to run stages, tables that look for no plan take longer than they tell.
            self.floor_s = min(self.floor_s, work_s(self.costs, family))
            return None
        # Where no plan is looked for, what does not lower the bound of all need not be known.
        cap_s = self.best.step_s if looked_through else min(self.best.step_s, self.floor_s)
        # In memory without limits nothing is recomputed, and any depth fits: that bound is soon known.
        least_s = 0.0
        if len(self.families) > 1:
            least_s = _tables_bound_s(self.unlimited, self.places, family, self.options, cap_s)
            self.linked_s[family] = least_s
        enough = not looked_through and self.best.step_s <= (1 + self.enough) * least_s
        if enough or least_s >= cap_s or self.tables_left <= 0:
            self.floor_s = min(self.floor_s, least_s)
            return None
        opening = self._opening(family, None if apart else finenesses(self.costs)[-1], least_s)
        if opening is None:
            return None
        if paces:
            opening.try_paces()
            self.last_us = opening.pacing_us
            self.pacing_left -= self.last_us
        if apart and opening.tables is not None:
            found: tuple[SuffixTables, float] | None = opening.tables, least_s
        else:
            found = self._prove(opening, least_s, paces=paces)
        self.tables_left -= opening.tabled_us
        return found

    def _is_paced(self, family: Family, size: int) -> bool:
        """Whether plans of a family that keep a pace are looked for.

        For the most promising family however long it takes; of large ones, for those that even splits speak for.
        """
        if self.pacing_left <= 0 or 2 * self.pacing_left < self.last_us:
            return False
        if len(self.costs.teams) > 1 and size > MOST_IN_TEAMS and not self.options.exact:
            return False
        return size <= MOST_PACED or self._known_s(family) <= self.far_s

    def _prove(self, opening: FamilySearch, least_s: float, *, paces: bool) -> tuple[SuffixTables, float] | None:
        """Count the bound of a family, at least ``least_s``; return it behind tables, unless these are too large."""
        lower_bound_s, tables = opening.prove_bound()
        lower_bound_s = max(lower_bound_s, least_s)
        # Not every plan is a node, but none is below this.
        self.floor_s = min(self.floor_s, lower_bound_s)
        soon = opening.pacing_us <= PACES * self.options.effort
        if not paces and soon and (self.lowest is None or lower_bound_s < self.lowest[0]):
            self.lowest = lower_bound_s, opening
        return None if tables is None else (tables, lower_bound_s)

    def _opening(self, family: Family, fineness: Fineness | None, least_s: float) -> FamilySearch | None:
        """Open a family; none where no plan of it can be better than the best one."""
        stages = StageTables(self.costs, self.places, family, self.options, fineness)
        if not (stages.apart or stages.chain) and stages.table_us > MOST_FINE:
            stages = StageTables(self.costs, self.places, family, self.options, COARSE)
        if not (stages.apart or stages.is_tabled):
            self.floor_s = min(self.floor_s, max(least_s, work_s(self.costs, family)))
            return None
        opening = FamilySearch(self.simulator, stages, self.options, self.best)
        if not opening.hopeless:
            return opening
        self.floor_s = min(self.floor_s, self.best.step_s * (1 - ROUNDING if opening.large else 1))
        return None

    def _open(self, node: _SearchNode) -> _SearchNode | None:
        """Push every choice of the next stage but the best one; return that."""
        tables, path, limits = node.tables, None, node.tables.stages.constraints
        stop = state = 0
        if node.step is not None:
            path = self._path(node)
            if path is None:
                return None
            stop, state = node.step.stop, int(tables.states.after[node.step.way, node.step.state])
        found: list[_SearchNode] = []
        following, every = tables.terms(stop, state)
        for behind in tables.behinds(node.behind):
            # Behind as many as are told apart there may be more: too few cannot be known, too many can.
            count = behind + 1 + (0 if path is None else len(path.steps))
            if not limits.least_stages <= count <= limits.most_stages:
                continue
            for at, bound_s, trip_s in self._promising(node, path, every[behind]):
                after = stop + int(following.length[at])
                step = Step(stop, after, int(following.way[at]), state)
                left = self.costs.layer_count - after
                found.append(_SearchNode(bound_s, left, trip_s, len(found), tables, path, step, behind))
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
            terms = fold(path.terms, node.tables.stages.link(path.steps[-1]), terms)
        trips = np.asarray(terms.trip_s) + (0.0 if path is None else path.trip_s)
        for stage, link in reversed(() if path is None else path.before):
            terms = fold(stage, link, terms)
        bounds = np.asarray(terms.step_s) + self.costs.profile.step_overhead_s
        some = np.flatnonzero(bounds < self.best.step_s)
        least = np.maximum(node.bound_s, bounds[some]).tolist()
        return zip(some.tolist(), least, trips[some].tolist(), strict=True)


def looked_at(costs: CostModel, pool: Pool, family: Family, options: PlanOptions) -> int:
    """Return about how many stages there are, over all states of the pool, were each told apart."""
    most = [len(costs.devices) // team.team for team in costs.teams]
    widths = sum(min(each, family.micro_batch_size) + min(each, family.micro_batches) for each in most)
    if costs.mixes:
        counts = [costs.kind_of.count(kind) for kind in set(costs.kind_of)]
        widths += min(MOST_MIXED, math.prod(count + 1 for count in counts) - sum(counts) - 1)
    return pool.states * widths * len(options.shards) * costs.layer_count**2 // 2


def search(simulator: Simulator, families: Sequence[Family], options: PlanOptions, best: Best) -> SearchResult:
    """Improve on ``best``.

    The bound holds for every plan of the families, whatever ended the search: the best plan was proved best or close
    enough, or as many plans were simulated as the options allow.
    """
    return Search(simulator, families, options, best).go()


def finenesses(costs: CostModel) -> tuple[Fineness, Fineness]:
    """Return how many stages are told apart where not every one is, at first and then.

    Fewer where teams run them in many more ways.
    """
    return (ROUGH, FINE) if len(costs.teams) == 1 else (COARSE._replace(ranges=ROUGH.ranges), COARSE)


def places_of(costs: CostModel, options: PlanOptions) -> Places:
    """Return where the stages of plans that the options admit may stand."""
    return Places(costs, pool_of(costs, exact=options.gap == 0))


Least = Callable[[CostModel, Family, float], float]
"""The least bound of any plan of a family under a cost model, if it is below some seconds."""


def least_bound_s(costs: CostModel, options: PlanOptions, most: int = MOST_BOUNDED) -> Least:
    """Return what bounds the plans that the options admit: tables of up to ``most`` stages in all states, or work.

    It serves a cost model, and the same one without links or limits of memory.
    """
    places = cache(partial(places_of, costs, options))

    def least(model: CostModel, family: Family, below_s: float) -> float:
        known_s = work_s(model, family)
        if known_s >= below_s or looked_at(model, places().pool, family, options) > most:
            return known_s
        return max(known_s, _tables_bound_s(model, places(), family, options, below_s))

    return least


def _tables_bound_s(costs: CostModel, places: Places, family: Family, options: PlanOptions, cap_s: float) -> float:
    """Return the least bound of a family's plans of fewer seconds than a cap, or the cap."""
    exact, found_s = options.gap == 0, 0.0
    # First what bounds most soonest.
    for fineness in (None,) if exact else finenesses(costs):
        stages = StageTables(costs, places, family, options, fineness)
        if not (exact or stages.is_tabled):
            return min(cap_s, max(found_s, work_s(costs, family)))
        capped_stages, large = CappedStages(stages, cap_s), not exact and stages.size > MANY_ROUNDED
        tables = SuffixTables(stages, options, capped_stages, single_precision=large)
        found_s = max(found_s, costs.profile.step_overhead_s + tables.least_s)
        if found_s >= cap_s or not any(way.recompute.recomputes for way in stages.ways):
            break
    return min(cap_s, found_s)


def bounds_of_families(
    costs: CostModel,
    families: Sequence[Family],
    least: Least,
    step_s: float,
    linked_s: Mapping[Family, float] | None = None,
    work: Callable[[CostModel, Family], float] = work_s,
) -> Bounds:
    """Return the bounds of all plans of some families; none is above ``step_s``, the step of one of them.

    Of the families in ``linked_s``, the bound without limits of memory is known. Each bound drops something that only
    costs time: the one without links and memory limits drops both, the next one the limits. A family whose weaker bound
    is not below the least stronger one met is left out; most are. ``work`` returns the weakest one of a family.
    """
    known = {family: work(costs, family) for family in families}
    work_bound_s = min(step_s, *known.values())
    contiguous = max(work_bound_s, least_of_families_s(known, least, costs.without(links=True, memory=True), step_s))
    linked_s = linked_s or {}
    others = {family: bound_s for family, bound_s in known.items() if family not in linked_s}
    most_s = min((step_s, *linked_s.values()))
    linked = max(contiguous, least_of_families_s(others, least, costs.without(memory=True), most_s))
    return Bounds(work_s=work_bound_s, contiguous_s=contiguous, linked_s=linked)


def least_of_families_s(
    bounds_s: dict[Family, float], least: Least, costs: CostModel, most_s: float, near: int | None = None
) -> float:
    """Return the least bound of all families, but at most ``most_s``; ``bounds_s`` bounds become those of ``costs``.

    Families of low known bounds are looked at first, or those of about as many micro-batches as ``near``: where low
    bounds are those of few micro-batches that do not fit, these are the sooner left out.
    """

    def order(family: Family) -> tuple[float, Family]:
        return bounds_s[family] if near is None else abs(math.log(family.micro_batches / near)), family

    best = most_s
    for family in sorted(bounds_s, key=order):
        if bounds_s[family] >= best:
            continue
        bounds_s[family] = max(bounds_s[family], least(costs, family, best))
        best = min(best, bounds_s[family])
    return best
