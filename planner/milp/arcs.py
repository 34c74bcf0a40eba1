"""Arcs: every stage that a plan of one family may hold, and what passes between any two, for the mixed-integer program.

A plan is a path of arcs from no layer placed and no device taken to all layers placed. A node is (layers placed, state
of the pool); so an arc's devices, and with them its levels, are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from autopar.formats.plan import SHARDS, Division, shards_of
from autopar.planner.bounds.chain import LinkTerms, StageTerms, link_terms, stage_terms
from autopar.planner.candidate import Candidate, Family, Placed, within
from autopar.planner.constraints import Constraints
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.placement.pool import Pool
from autopar.planner.search.choices import DIVISIONS

MOST_ARCS = 20_000
MOST_PRICED = 100_000
"""Layers by devices that are looked at for them, many of which may not fit."""

Node = tuple[int, int]
"""Layers placed, state of the pool."""


class Arc(NamedTuple):
    """A stage with as much in flight as fits, and its terms."""

    begin: Node
    end: Node
    stage: Placed
    level: int
    """Of :meth:`CostModel.recompute_levels`, what it recomputes."""
    terms: StageTerms


class Crossing(NamedTuple):
    """Arcs before and behind one node between which the same travels, whichever of them meet."""

    cut: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    terms: LinkTerms


class Network(NamedTuple):
    """All arcs of a family, and by node its crossings: each pair of arcs that meet is in one."""

    family: Family
    layers: int
    arcs: tuple[Arc, ...]
    crossings: tuple[tuple[Crossing, ...], ...]


def asked_levels(count: int, recompute: Literal["auto", "none", "full"]) -> range:
    """Return which of so many levels of recomputation an option admits.

    >>> asked_levels(3, "auto"), asked_levels(3, "none"), asked_levels(3, "full")
    (range(0, 3), range(0, 1), range(2, 3))
    """
    return {"auto": range(count), "none": range(1), "full": range(count - 1, count)}[recompute]


def network(
    costs: CostModel, pool: Pool, family: Family, options: PlanOptions, constraints: Constraints
) -> Network | None:
    """Return the arcs that fit and are allowed, and their crossings; none if there are too many.

    Memory is that of a stage by itself; what neighbours add to it is left to whoever decodes a path.
    """
    pricing = _Pricing(costs, pool, family, options)
    found: list[Arc] = []
    reached: list[set[int]] = [{0}, *(set[int]() for _ in range(costs.layer_count))]
    priced = 0
    for first in range(costs.layer_count):
        for state in sorted(reached[first]):
            priced += sum(pool.left(state, kind) for kind in pool.kinds) * (costs.layer_count - first)
            if priced > MOST_PRICED:
                return None
            for arc in pricing.leaving((first, state), constraints):
                stop, after = arc.end
                if stop == costs.layer_count and options.use_all and after != pool.empty:
                    continue
                reached[stop].add(after)
                found.append(arc)
            if len(found) > MOST_ARCS:
                return None
    arcs = _ending(found, costs.layer_count)
    return Network(family, costs.layer_count, arcs, tuple(_crossings(costs, family, arcs)))


def _ending(arcs: Sequence[Arc], layers: int) -> tuple[Arc, ...]:
    """Leave out arcs from which no path leads to the end."""
    useful: set[Node] = {arc.end for arc in arcs if arc.end[0] == layers}
    found = []
    for arc in sorted(arcs, key=lambda each: each.begin, reverse=True):
        if arc.end in useful:
            useful.add(arc.begin)
            found.append(arc)
    return tuple(reversed(found))


class _Pricing:
    """Stages of one family, each priced once for all devices that are alike."""

    def __init__(self, costs: CostModel, pool: Pool, family: Family, options: PlanOptions) -> None:
        self.costs, self.pool, self.family = costs, pool, family
        self.shards = options.shards
        self.recompute = options.recompute
        self.divisions: tuple[Division, ...] = DIVISIONS[:1] if costs.divisible else DIVISIONS
        self.known: dict[tuple[object, ...], list[tuple[Placed, int, StageTerms]]] = {}

    def leaving(self, node: Node, constraints: Constraints) -> Iterator[Arc]:
        """Yield the arcs from a node."""
        first, state = node
        for kind in self.pool.kinds:
            every = range(first + 1, constraints.layers + 1)
            for width in range(1, self.pool.left(state, kind) + 1):
                for variant, after in self.pool.variants(state, kind, width):
                    devices = self.pool.devices(state, kind, width, variant)
                    for stop in every:
                        for stage, level, terms in self._ways(first, stop, kind, devices, constraints):
                            yield Arc(node, (stop, after), stage._replace(devices=devices), level, terms)

    def _ways(
        self, first: int, stop: int, kind: int, devices: tuple[int, ...], constraints: Constraints
    ) -> list[tuple[Placed, int, StageTerms]]:
        alike = tuple(self.costs.devices[device] for device in devices)
        key = (first, stop, kind, alike)
        if key not in self.known:
            found = self.known[key] = []
            for division in self.divisions:
                shares = self.costs.shares(self.family.micro_batch_size, len(devices), division)
                if not self._takes(len(devices), division) or not constraints.allows(first, stop, kind, shares):
                    continue
                for shard in shards_of(division, self.shards) if len(devices) > 1 else SHARDS[:1]:
                    found += self._levels(Placed(first, stop, devices, shares, 1, (), shard, division), kind)
        return self.known[key]

    def _takes(self, width: int, division: Division) -> bool:
        if division == "round-robin":
            return 1 < width <= self.family.micro_batches
        return self.costs.divisible or width <= self.family.micro_batch_size

    def _levels(self, stage: Placed, kind: int) -> Iterator[tuple[Placed, int, StageTerms]]:
        """Yield the stage with ever more recomputed, as far as more fits in flight for it."""
        levels = self.costs.recompute_levels(self.family.micro_batch_size, kind)
        deepest, before = 0, None
        for level in asked_levels(len(levels), self.recompute):
            recompute = within(levels[level], stage.first, stage.stop)
            if recompute == before or deepest == stage.turns(0, self.family.micro_batches):
                continue
            before = recompute
            depth = self._depth(stage._replace(recompute=recompute))
            if depth > deepest:
                deepest = depth
                deep = stage._replace(recompute=recompute, warmup=depth)
                yield deep, level, stage_terms(self.costs, deep, self.family.micro_batches)

    def _depth(self, stage: Placed) -> int:
        """Return the most in flight that fits: all, or found by halving; 0 if none does."""
        most = stage.turns(0, self.family.micro_batches)
        if self._fits(stage, most):
            return most
        if self.family.schedule == "gpipe" or most == 1 or not self._fits(stage, 1):
            return 0
        fits, exceeds = 1, most
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            if self._fits(stage, middle):
                fits = middle
            else:
                exceeds = middle
        return fits

    def _fits(self, stage: Placed, depth: int) -> bool:
        alone = Candidate(*self.family, (stage._replace(warmup=depth),))
        return self.costs.shortfall(alone, 0) <= 0


def _crossings(costs: CostModel, family: Family, arcs: Sequence[Arc]) -> Iterator[tuple[Crossing, ...]]:
    """Yield the crossings of every node that lies between arcs."""
    entering: dict[Node, list[int]] = {}
    leaving: dict[Node, list[int]] = {}
    for index, arc in enumerate(arcs):
        entering.setdefault(arc.end, []).append(index)
        leaving.setdefault(arc.begin, []).append(index)
    links = _Links(costs, family)
    for node in sorted(entering.keys() & leaving.keys()):
        before = _ports(arcs, entering[node])
        after = _ports(arcs, leaving[node])
        rows = [tuple(links.between(arcs[one[0]].stage, arcs[other[0]].stage) for other in after) for one in before]
        before, rows = _merged(before, rows)
        after, columns = _merged(after, list(zip(*rows, strict=True)))
        yield tuple(
            Crossing(node[0], one, other, links.terms[columns[right][left]])
            for left, one in enumerate(before)
            for right, other in enumerate(after)
        )


def _ports(arcs: Sequence[Arc], indices: Sequence[int]) -> list[tuple[int, ...]]:
    """Group arcs between whose stages no message can tell the difference."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index in indices:
        stage = arcs[index].stage
        found.setdefault((stage.first, stage.stop, stage.devices, stage.division), []).append(index)
    return [tuple(group) for group in found.values()]


def _merged(
    groups: Sequence[tuple[int, ...]], rows: Sequence[tuple[int, ...]]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Join groups whose rows are alike."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for group, row in zip(groups, rows, strict=True):
        found[row] = (*found.get(row, ()), *group)
    return list(found.values()), list(found)


class _Links:
    """What travels between stages, each different one priced once and numbered."""

    def __init__(self, costs: CostModel, family: Family) -> None:
        self.costs, self.family = costs, family
        self.terms: list[LinkTerms] = []
        self._numbers: dict[LinkTerms, int] = {}
        self._known: dict[tuple[object, ...], int] = {}

    def between(self, before: Placed, after: Placed) -> int:
        """Return the number of the terms between two stages."""
        flow = self.costs.flows.between(before.first, before.stop, after.first, after.stop)
        key = (flow, before.devices, before.division, after.devices, after.division)
        if key not in self._known:
            terms = link_terms(self.costs, before, after, Candidate(*self.family, (before, after)))
            if terms not in self._numbers:
                self._numbers[terms] = len(self.terms)
                self.terms.append(terms)
            self._known[key] = self._numbers[terms]
        return self._known[key]
