"""Search: candidates in the order of their lower bounds, judged by the simulator."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.bounds import LinkTerms, StageTerms, Terms, fold
from autopar.planner.candidate import Candidate, Family, place
from autopar.planner.costs import CostModel
from autopar.planner.judge import Best
from autopar.planner.options import PlanOptions
from autopar.planner.simulate import Simulator
from autopar.planner.tables import FlowTables, SizeTables, SuffixTables
from autopar.schedules.route import even_shares

__all__ = ["search"]

EXPANSIONS_PER_CANDIDATE = 20
ROUNDING = 1e-12


class _Step(NamedTuple):
    """A chosen stage."""

    first: int
    stop: int
    width: int
    offset: int


class _Node(NamedTuple):
    """A family, or one with its first stages chosen; the heap's order is the fields' order."""

    bound_s: float
    remaining: int
    """Stages yet to choose; the deepest of equals is first, so that plateaus yield plans."""
    trip_s: float
    sequence: int
    family: int
    steps: tuple[_Step, ...]


class _Search:
    def __init__(self, costs: CostModel, families: list[Family], options: PlanOptions, best: Best) -> None:
        self.costs, self.families, self.options, self.best = costs, families, options, best
        self.most_stages = min(costs.layer_count, len(costs.devices))
        self.flows = FlowTables(costs)
        self.sizes: dict[int, SizeTables] = {}
        self.tables: dict[int, SuffixTables] = {}
        self.heap: list[_Node] = []
        self.sequence = 0

    def go(self, simulator: Simulator) -> float:
        """Search; return the lower bound of all candidates."""
        for index, family in enumerate(self.families):
            self._push(_Node(_least_work(self.costs, family), self.most_stages, 0.0, 0, index, ()))
        candidates = expansions = 0
        limit = self.options.candidate_limit
        while self.heap and candidates < limit and expansions < limit * EXPANSIONS_PER_CANDIDATE:
            next_bound = self.heap[0].bound_s
            if self.best.step_s <= next_bound or self.best.step_s <= (1 + self.options.gap) * next_bound:
                break
            node = heapq.heappop(self.heap)
            if node.steps and node.remaining == 0:
                candidates += 1
                self.best.judge(simulator, self._candidate(node))
            else:
                expansions += 1
                self._open(node)
        return min(self.best.step_s, self.heap[0].bound_s if self.heap else float("inf"))

    def _candidate(self, node: _Node) -> Candidate:
        cuts, widths = (tuple(step[field] for step in node.steps) for field in (1, 2))
        return place(self.families[node.family], cuts, widths)

    def _push(self, node: _Node) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, node._replace(sequence=self.sequence))

    def _open(self, node: _Node) -> None:
        tables = self._tables(node.family)
        if node.steps:
            self._push_children(node, node.remaining - 1, tables)
        else:
            for stages in range(self.options.min_stages, self.most_stages + 1):
                self._push_children(node, stages - 1, tables)

    def _tables(self, index: int) -> SuffixTables:
        if index not in self.tables:
            family = self.families[index]
            size = family.micro_batch_size
            if size not in self.sizes:
                self.sizes[size] = SizeTables(self.costs, self.flows, family.micro_batches, size)
            self.tables[index] = SuffixTables(self.sizes[size], family, self.most_stages, self.options.use_all)
        return self.tables[index]

    def _push_children(self, node: _Node, behind: int, tables: SuffixTables) -> None:
        """Push every choice of the next stage, with ``behind`` more to choose after it."""
        stop = node.steps[-1].stop if node.steps else 0
        offset = node.steps[-1].offset + node.steps[-1].width if node.steps else 0
        if offset >= len(self.costs.devices) or stop >= self.costs.layer_count:
            return
        widths = min(tables.sizes.widths, len(self.costs.devices) - offset)
        terms = Terms(*tables.chosen[behind][:, offset, :widths, stop, :])
        for stage, link in self._prefix(node.steps, behind, tables):
            terms = fold(stage, link, terms, tables.sizes.micro_batches)
        bounds = np.asarray(terms.step_s) + self.costs.profile.step_overhead_s
        trips = np.asarray(terms.trip_s)
        for width, next_stop in zip(*np.nonzero(bounds < self.best.step_s), strict=True):
            step = _Step(stop, int(next_stop), int(width) + 1, offset)
            bound_s = max(node.bound_s, float(bounds[width, next_stop]))
            trip_s = float(trips[width, next_stop])
            self._push(_Node(bound_s, behind, trip_s, 0, node.family, (*node.steps, step)))

    def _prefix(
        self, steps: tuple[_Step, ...], behind: int, tables: SuffixTables
    ) -> Iterator[tuple[StageTerms, LinkTerms]]:
        """Yield the chosen stages with the transfers behind them, the last stage first."""
        sizes = tables.sizes
        for index in range(len(steps) - 1, -1, -1):
            step = steps[index]
            depth = tables.family.depths[len(steps) - index + behind]
            at = (step.first, step.stop)
            stage = sizes.stage(step.width, step.offset, depth).at(at)
            if index == len(steps) - 1:
                yield stage, sizes.links_after(step.first, step.stop, step.width, step.offset)
            else:
                after = steps[index + 1]
                yield stage, sizes.link_to((*at, after.stop), step.width, step.offset, after.width)


def search(simulator: Simulator, families: Iterable[Family], options: PlanOptions, best: Best) -> float:
    """Improve on ``best`` until it is proved to be within the gap, or the candidates run out; return the lower bound.

    Best first: a heap holds families, stages chosen from the left, and whole plans, by their lower bounds, so whole
    plans are simulated in the order of theirs. No plan of these families takes less than what is returned.
    """
    return _Search(simulator.costs, list(families), options, best).go(simulator)


def _least_work(costs: CostModel, family: Family) -> float:
    """Seconds that remain if every device computes without pause and every layer is divided as suits it best."""
    work: npt.NDArray[np.float64] | None = None
    for width in range(1, min(len(costs.devices), family.micro_batch_size) + 1):
        total = np.zeros(costs.layer_count)
        adding = costs.adding(family.micro_batches, width)
        for rows in even_shares(family.micro_batch_size, width):
            total += np.diff(costs.layers.forward_sums(rows)) + np.diff(costs.layers.backward_sums(rows, adding))
        work = total if work is None else np.minimum(work, total)
    assert work is not None
    seconds = float(work.sum()) * family.micro_batches / len(costs.devices) * (1 - ROUNDING)
    return costs.profile.step_overhead_s + seconds
