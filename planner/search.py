"""Search: candidates in the order of their lower bounds, judged by the simulator.

Best first over prefixes of stages, all families on one heap. A whole plan is a node of its own, still without depths:
its bound has in flight what fits. It opens into the candidates that differ in depths, each with its exact bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from autopar.planner.bounds import LinkTerms, StageTerms, Terms, bound, fold, link_terms, stage_terms
from autopar.planner.candidate import Candidate, Family, Placed, within
from autopar.planner.choices import Choice
from autopar.planner.depths import depth_choices
from autopar.planner.judge import Best
from autopar.planner.options import PlanOptions
from autopar.planner.placement import pool_of
from autopar.planner.pool import Pool
from autopar.planner.simulate import Simulator
from autopar.planner.tables import StageTables, SuffixTables
from autopar.planner.work import work_s

__all__ = ["Searched", "search"]

EXPANSIONS = 1_000
EXPANSIONS_WHEN_EXACT = 2_000_000
HOPELESS = 1.1
LEAST_CANDIDATES = 60
"""Simulated even where fewer certify the gap: what is left of it costs little to try for."""


class Searched(NamedTuple):
    """What a search proves."""

    lower_bound_s: float
    """No plan that was searched takes less."""
    least_bound_s: float
    """The least bound of any plan that fits; infinite where none does, or none was met."""


class _Step(NamedTuple):
    """A chosen stage, without its depth."""

    first: int
    stop: int
    kind: int
    width: int
    variant: int
    """Which of the ways of taking so many devices."""
    choice: int
    state: int
    """Of the pool, before."""


class _Node(NamedTuple):
    """A family with its first stages chosen, or a candidate; the heap's order is the fields' order."""

    bound_s: float
    left: int
    """Layers yet to place; the deepest of equals is first, so that plateaus yield plans. -1 for a candidate."""
    trip_s: float
    sequence: int
    family: int
    steps: tuple[_Step, ...]
    behind: int | None = None
    """Stages yet to choose, as the tables tell them apart; none: any number."""
    candidate: Candidate | None = None


class _Search:
    def __init__(
        self, simulator: Simulator, families: Sequence[Family], options: PlanOptions, best: Best, pool: Pool
    ) -> None:
        self.simulator, self.costs = simulator, simulator.costs
        self.families, self.options, self.best, self.pool = families, options, best, pool
        self.tables: dict[int, SuffixTables] = {}
        self.heap: list[_Node] = []
        self.sequence = self.candidates = 0
        self.floor_s = float("inf")
        """The least bound of whole plans not all of whose depths are tried."""
        self.least_bound_s = float("inf")
        self.placed: dict[tuple[int, _Step], tuple[Placed, StageTerms]] = {}
        self.between: dict[tuple[int, _Step, _Step], LinkTerms] = {}

    def go(self) -> Searched:
        """Search; see :func:`search`."""
        for index, family in enumerate(self.families):
            self._push(_Node(work_s(self.costs, family), self.costs.layer_count, 0.0, 0, index, ()))
        expansions = 0
        most = EXPANSIONS if self.options.gap > 0 else EXPANSIONS_WHEN_EXACT
        limit = self.options.candidate_limit
        while self.heap and self.candidates < limit and expansions < most:
            proved_s = min(self.heap[0].bound_s, self.floor_s)
            if self.best.step_s <= self.heap[0].bound_s or (
                self.best.step_s <= (1 + self.options.gap) * proved_s and self.candidates >= LEAST_CANDIDATES
            ):
                break
            node = heapq.heappop(self.heap)
            if node.candidate is not None:
                self._judge(node.bound_s, node.candidate)
                continue
            # Down to a whole plan at once: what is below a promising prefix is soon known, and prunes the rest.
            below: _Node | None = node
            while below is not None and below.left > 0:
                expansions += 1
                below = self._open(below)
            if below is not None:
                self._complete(below)
        ahead = self.heap[0].bound_s if self.heap else float("inf")
        return Searched(min(self.best.step_s, self.floor_s, ahead), self.least_bound_s)

    def _push(self, node: _Node) -> None:
        self.sequence += 1
        bound_s, left, trip_s, _, family, steps, behind, candidate = node
        heapq.heappush(self.heap, _Node(bound_s, left, trip_s, self.sequence, family, steps, behind, candidate))

    def _judge(self, bound_s: float, candidate: Candidate) -> float | None:
        self.least_bound_s = min(self.least_bound_s, bound_s)
        self.candidates += 1
        return self.best.judge(self.simulator, candidate)

    def _complete(self, node: _Node) -> None:
        """Push the candidates of a plan that is whole but for its depths."""
        family = self.families[node.family]
        stages = [self._placed(step, node.family)[0] for step in node.steps]
        exact = self.options.gap == 0
        found = depth_choices(self.costs, family, stages, self._levels(node), exact=exact)
        tried: list[float] = []
        for candidate in found.candidates:
            bound_s = max(node.bound_s, bound(self.costs, candidate))
            if bound_s < self.best.step_s and exact:
                self._push(_Node(bound_s, -1, 0.0, 0, node.family, (), None, candidate))
            elif bound_s < self.best.step_s and (not tried or min(tried) < HOPELESS * self.best.step_s):
                # Where the first choices of depths are far behind, the others are not tried.
                tried.append(self._judge(bound_s, candidate) or 0.0)
        if found.closest is not None:
            self.best.miss(*found.closest)
        if not found.complete:
            self.floor_s = min(self.floor_s, max(node.bound_s, bound(self.costs, self._frame(node.family, stages))))

    def _levels(self, node: _Node) -> list[list[frozenset[int]]]:
        """By stage, the sets of layers to recompute, from the fewest up."""
        rows = self.families[node.family].micro_batch_size
        found = []
        for step in node.steps:
            choice = self._choice(node.family, step)
            levels = self.costs.recompute_levels(rows, step.kind)
            found.append(levels[choice.first_level : choice.last_level + 1])
        return found

    def _choice(self, family: int, step: _Step) -> Choice:
        return self._tables(family).stages.choices[step.kind][step.choice]

    def _placed(self, step: _Step, family: int) -> tuple[Placed, StageTerms]:
        """Return a chosen stage with as much in flight as fits, and the least recomputation of its choice."""
        if (family, step) not in self.placed:
            stage = self._place(step, family)
            self.placed[family, step] = stage, stage_terms(self.costs, stage, self.families[family].micro_batches)
        return self.placed[family, step]

    def _place(self, step: _Step, family: int) -> Placed:
        tables = self._tables(family).stages
        choice, rows = self._choice(family, step), self.families[family].micro_batch_size
        devices = self.pool.devices(step.state, step.kind, step.width, step.variant)
        limit = self.costs.limit_bytes(devices)
        depth = int(tables.depth(choice, step.kind, step.width, limit)[step.first, step.stop])
        shares = self.costs.shares(rows, step.width, choice.division)
        level = self.costs.recompute_levels(rows, step.kind)[choice.first_level]
        recompute = within(level, step.first, step.stop)
        return Placed(step.first, step.stop, devices, shares, depth, recompute, choice.shard, choice.division)

    def _tables(self, index: int) -> SuffixTables:
        if index not in self.tables:
            stages = StageTables(self.costs, self.pool, self.families[index], self.options)
            self.tables[index] = SuffixTables(stages, self.options)
        return self.tables[index]

    def _open(self, node: _Node) -> _Node | None:
        """Push every choice of the next stage but the best one; return that."""
        tables = self._tables(node.family)
        stop = node.steps[-1].stop if node.steps else 0
        state = self._after(node.steps[-1]) if node.steps else 0
        found: list[_Node] = []
        for behind in range(tables.counts)[tables.behinds(node.behind)]:
            if behind + 1 + len(node.steps) < self.options.min_stages:
                continue
            for kind in self.pool.kinds:
                moves = tables.stages.moves[kind].of(state)
                for number, choice in enumerate(tables.stages.choices[kind]) if moves else ():
                    terms = self._ahead(node, Terms(*tables.terms(state, kind, choice, behind, stop)))
                    for move, after, bound_s, trip_s in self._promising(node, terms):
                        step = _Step(stop, after, kind, *moves[move][:2], number, state)
                        left, steps = self.costs.layer_count - after, (*node.steps, step)
                        found.append(_Node(bound_s, left, trip_s, len(found), node.family, steps, behind))
        if not found:
            return None
        best = min(found)
        for each in found:
            if each is not best:
                self._push(each)
        return best

    def _promising(self, node: _Node, terms: Terms) -> Iterator[tuple[int, int, float, float]]:
        """Yield the moves and stops of next stages that may beat the best plan, with their bounds and round trips."""
        bounds = np.asarray(terms.step_s) + self.costs.profile.step_overhead_s
        moves, stops = np.nonzero(bounds < self.best.step_s)
        least = np.maximum(node.bound_s, bounds[moves, stops]).tolist()
        trips = np.asarray(terms.trip_s)[moves, stops].tolist()
        return zip(moves.tolist(), stops.tolist(), least, trips, strict=True)

    def _after(self, step: _Step) -> int:
        return self.pool.take(step.state, step.kind, step.width, step.variant)

    def _ahead(self, node: _Node, terms: Terms) -> Terms:
        """Fold the chosen stages onto terms of what may follow, ``[move, stop]``."""
        if not node.steps:
            return terms
        tables, step = self._tables(node.family).stages, node.steps[-1]
        link = tables.links(step.state, step.kind, self._choice(node.family, step))
        moves = tables.moves[step.kind].of(step.state)
        move = next(at for at, each in enumerate(moves) if each[:2] == (step.width, step.variant))
        terms = fold(self._placed(step, node.family)[1], link.at((move, step.first, step.stop)), terms)
        for before, after in zip(node.steps[-2::-1], node.steps[:0:-1], strict=True):
            terms = fold(self._placed(before, node.family)[1], self._link(node.family, before, after), terms)
        return terms

    def _link(self, family: int, before: _Step, after: _Step) -> LinkTerms:
        key = (family, before, after)
        if key not in self.between:
            stages = self._placed(before, family)[0], self._placed(after, family)[0]
            self.between[key] = link_terms(self.costs, *stages, self._frame(family, stages))
        return self.between[key]

    def _frame(self, family: int, stages: Sequence[Placed]) -> Candidate:
        return Candidate(*self.families[family], tuple(stages))


def search(simulator: Simulator, families: Sequence[Family], options: PlanOptions, best: Best) -> Searched:
    """Improve on ``best``.

    The bound holds for every plan of the families, whatever ended the search: the best plan was proved best or close
    enough, or as many plans were simulated as the options allow.
    """
    pool = pool_of(simulator.costs, exact=options.gap == 0, use_all=options.use_all)
    return _Search(simulator, families, options, best, pool).go()
