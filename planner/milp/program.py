"""Program: the least bound of all paths as a mixed-integer linear program, as data; no solver is known here.

A path is a plan of one family: arcs, each a stage, from no layer placed and no device taken to all layers placed. A
node is (layers placed, state of the pool); so an arc's devices, and with them its levels, are known. With x one for the
arcs of the path, and sums over the arcs that begin at layer p, or over what meets at cut q,

    R(p) >= sum t x + R'(p+1)                       R'(q) >= R(q) + sum (c + c')
    U(p) >= sum max(M t, M t / k) x                 U'(q) >= U(q) + sum (c + c')
    U(p) >= sum t x + U'(p+1)                       G(q) >= R(q) + sum max(M c + c', c + M c'), G(q+1)
    U(p) >= sum t x + G(p+1)
    U(p) >= M R(p) / k                              where an arc with that k is taken
    V(p) >= U(p) + sum a x, sum f x + V'(p+1)       V'(q) >= V(q) + sum c
    T >= V(1), sum w x

say the bound of docs/design/bound.md without asking at which layers there are cuts: where there is none, all sums are
empty, and each quantity is that of the next cut, which the stage before takes into account anyway. Only M R / k, and
cuts where no gradient or nothing at all passes, take a constant that is large enough to make a row hold by itself. Of
stages on several kinds of devices, all are those of a micro-batch's last row, and w is what the slowest replica takes:
the bound of such a path, which looks along other rows, too, may be larger. Rows beyond these are implied by them for
whole x, and bring the solver's relaxation near.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, product
from operator import attrgetter
from typing import NamedTuple

from autopar.options.plan import PlanOptions
from autopar.ownership import Replicas
from autopar.planner.bounds import LinkTerms, StageTerms, link_terms, placed_terms
from autopar.planner.candidate import Candidate, CandidateStage, Family, replicas_of, within
from autopar.planner.constraints import Constraints
from autopar.planner.costs.model import CostModel
from autopar.planner.costs.queues import Value
from autopar.planner.placement import stage_place
from autopar.planner.pool import Pool
from autopar.planner.search.configs import mixtures_of
from autopar.planner.shares import by_speed

MOST_ARCS = 20_000
MOST_PRICED = 100_000
"""Layers by devices that are looked at for them, many of which may not fit."""

Node = tuple[int, int]
"""Layers placed, state of the pool."""


class Arc(NamedTuple):
    """A stage with as much in flight as fits, and its terms."""

    begin: Node
    end: Node
    stage: CandidateStage
    terms: StageTerms


class NodeCrossing(NamedTuple):
    """Arcs before and behind one node between which the same travels, whichever of them meet."""

    cut: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    terms: LinkTerms


class ArcNetwork(NamedTuple):
    """All arcs of a family, and by node its crossings: each pair of arcs that meet is in one."""

    family: Family
    layers: int
    arcs: tuple[Arc, ...]
    crossings: tuple[tuple[NodeCrossing, ...], ...]


def network(
    costs: CostModel, pool: Pool, family: Family, options: PlanOptions, constraints: Constraints
) -> ArcNetwork | None:
    """Return the arcs that fit and are allowed, and their crossings; none if there are too many.

    Memory is that of a stage by itself; what neighbours add to it is left to whoever decodes a path.
    """
    pricing = _Pricing(costs, pool, family, options, constraints)
    found: list[Arc] = []
    reached: list[set[int]] = [{0}, *(set[int]() for _ in range(costs.layer_count))]
    priced = 0
    for first in range(costs.layer_count):
        for state in sorted(reached[first]):
            priced += sum(pool.kind_devices_left(state, kind) for kind in pool.kinds) * (costs.layer_count - first)
            if priced > MOST_PRICED:
                return None
            for arc in pricing.leaving((first, state)):
                stop, after = arc.end
                if stop == costs.layer_count and options.use_all and after != pool.empty:
                    continue
                reached[stop].add(after)
                found.append(arc)
            if len(found) > MOST_ARCS:
                return None
    arcs = _ending(found, costs.layer_count)
    return ArcNetwork(family, costs.layer_count, arcs, tuple(_crossings(costs, family, arcs)))


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

    def __init__(
        self, costs: CostModel, pool: Pool, family: Family, options: PlanOptions, constraints: Constraints
    ) -> None:
        self.costs, self.pool, self.family, self.options = costs, pool, family, options
        self.constraints = constraints
        self.priced_stages: dict[tuple[object, ...], list[tuple[CandidateStage, StageTerms]]] = {}

    def leaving(self, node: Node) -> Iterator[Arc]:
        """Yield the arcs from a node."""
        first, state = node
        for kinds, devices, after in self._devices_taken(state):
            teams = [team for team in self.costs.teams if self._stands(devices, team)]
            for stop, team in product(range(first + 1, self.costs.layer_count + 1), teams):
                for stage, terms in self._ways(first, stop, kinds, devices, team):
                    own = tuple(devices[at] for at in stage.devices)
                    yield Arc(node, (stop, after), stage._replace(devices=own), terms)

    def _devices_taken(self, state: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Yield the kinds and devices that a stage may take, and the state behind: of one kind, and then of several."""
        left = {kind: self.pool.kind_devices_left(state, kind) for kind in self.pool.kinds}
        several = mixtures_of(left, len(self.costs.devices), None) if self.costs.mixes else []
        every = [((kind, count),) for kind, most in left.items() for count in range(1, most + 1)]
        for taken in (*every, *(mixture.taken(1) for mixture in several)):
            for variant, after in self.pool.variants(state, taken):
                yield tuple(kind for kind, _ in taken), self.pool.devices(state, taken, variant), after

    def _stands(self, devices: tuple[int, ...], team: Replicas) -> bool:
        """Whether devices make whole teams, each of one kind where it may stand."""
        counts = Counter(self.costs.kind_of[device] for device in devices)
        whole = all(count % team.team == 0 for count in counts.values())
        return whole and stage_place(self.costs, devices, team.team) is not None

    def _ways(
        self, first: int, stop: int, kinds: tuple[int, ...], devices: tuple[int, ...], team: Replicas
    ) -> list[tuple[CandidateStage, StageTerms]]:
        """Return the stages on some devices, which are numbered by their places among these."""
        key = (first, stop, kinds, tuple(self.costs.devices[device] for device in devices), team)
        if key not in self.priced_stages:
            found = self.priced_stages[key] = []
            width = len(devices) // team.team
            for each in replicas_of(self.family, width, self.options.shards, divisible=self.costs.divisible):
                if len(kinds) > 1 and each.division != "split":
                    # In turn, replicas of several kinds are as fast as the slowest.
                    continue
                shares, replicas = self.costs.shares(self.family.micro_batch_size, each), each.run_by(team)
                stage = by_speed(self.costs, CandidateStage.of(first, stop, devices, shares, 1, replicas), self.family)
                if self.constraints.allows(first, stop, kinds, stage.shares, replicas):
                    order = tuple(map(devices.index, stage.devices))
                    found += [(deep._replace(devices=order), terms) for deep, terms in self._levels(stage)]
        return self.priced_stages[key]

    def _levels(self, stage: CandidateStage) -> Iterator[tuple[CandidateStage, StageTerms]]:
        """Yield the stage with ever more recomputed, as far as more fits in flight for it."""
        levels = self.costs.recompute_levels(self.family.micro_batch_size, self.costs.form_of(stage))
        last = len(levels) - 1
        asked = {"auto": range(last + 1), "none": range(1), "full": range(last, last + 1)}[self.options.recompute]
        deepest, before = 0, None
        for level in asked:
            recompute = within(levels[level], stage.first, stage.stop)
            if recompute == before or deepest == stage.replicas.most(self.family.micro_batches):
                continue
            before = recompute
            depth = self._depth(stage._replace(recompute=recompute))
            if depth > deepest:
                deepest = depth
                deep = stage._replace(recompute=recompute, warmup=depth)
                yield deep, placed_terms(self.costs, deep, self.family.micro_batches)

    def _depth(self, stage: CandidateStage) -> int:
        """Return the most in flight that fits: all, or found by halving; 0 if none does."""
        most = stage.replicas.most(self.family.micro_batches)
        if self._fits(stage, most):
            return most
        if self.family.schedule == "gpipe" or most == 1 or not self._fits(stage, 1):
            return 0
        return 1 + bisect_left(range(2, most), True, key=lambda depth: not self._fits(stage, depth))

    def _fits(self, stage: CandidateStage, depth: int) -> bool:
        alone = Candidate(*self.family, (stage._replace(warmup=depth),))
        return self.costs.shortfall(alone, 0) <= 0


def _crossings(costs: CostModel, family: Family, arcs: Sequence[Arc]) -> Iterator[tuple[NodeCrossing, ...]]:
    """Yield the crossings of every node that lies between arcs."""
    entering: dict[Node, list[int]] = {}
    leaving: dict[Node, list[int]] = {}
    for index, arc in enumerate(arcs):
        entering.setdefault(arc.end, []).append(index)
        leaving.setdefault(arc.begin, []).append(index)
    known: dict[tuple[object, ...], LinkTerms] = {}

    def link(one: CandidateStage, other: CandidateStage) -> LinkTerms:
        flow = costs.flows.between(one.first, one.stop, other.first, other.stop)
        key = (flow, one.devices, one.division, one.team, other.devices, other.division, other.team)
        if key not in known:
            known[key] = link_terms(costs, one, other, Candidate(*family, (one, other)))
        return known[key]

    for node in sorted(entering.keys() & leaving.keys()):
        before = _ports(arcs, entering[node])
        after = _ports(arcs, leaving[node])
        rows = [tuple(link(arcs[one[0]].stage, arcs[other[0]].stage) for other in after) for one in before]
        before, rows = _merge_groups(before, rows)
        after, columns = _merge_groups(after, list(zip(*rows, strict=True)))
        yield tuple(
            NodeCrossing(node[0], one, other, columns[right][left])
            for left, one in enumerate(before)
            for right, other in enumerate(after)
        )


def _ports(arcs: Sequence[Arc], indices: Sequence[int]) -> list[tuple[int, ...]]:
    """Group arcs between whose stages no message can tell the difference."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index in indices:
        stage = arcs[index].stage
        found.setdefault((stage.first, stage.stop, stage.devices, stage.division, stage.team), []).append(index)
    return [tuple(group) for group in found.values()]


def _merge_groups(
    groups: Sequence[tuple[int, ...]], rows: Sequence[tuple[LinkTerms, ...]]
) -> tuple[list[tuple[int, ...]], list[tuple[LinkTerms, ...]]]:
    """Join groups whose rows are alike."""
    found: dict[tuple[LinkTerms, ...], tuple[int, ...]] = {}
    for group, row in zip(groups, rows, strict=True):
        found[row] = (*found.get(row, ()), *group)
    return list(found.values()), list(found)


Sum = dict[int, float]
"""Coefficients by column."""

ROUND = 1000.0
"""What the largest step time becomes, so that solvers' tolerances mean little."""


class ProgramRow(NamedTuple):
    """The sum of columns times coefficients is ``least`` at least; or exactly, if ``equal``."""

    terms: tuple[tuple[int, float], ...]
    least: float
    equal: bool = False


class Linear(NamedTuple):
    """Make the last column least, with all columns at least 0 and the first ``whole`` ones 0 or 1."""

    columns: int
    whole: int
    rows: tuple[ProgramRow, ...]
    most: float
    """Of the last column."""
    unit_s: float
    """Seconds per one of the last column."""

    def without(self, path: Iterable[int]) -> Linear:
        """Return the program in which one path is forbidden: no other holds all of its arcs."""
        arcs = sorted(path)
        return self._replace(rows=(*self.rows, ProgramRow(tuple((arc, -1.0) for arc in arcs), 1.0 - len(arcs))))

    def below(self, seconds: float) -> Linear:
        """Return the program without solutions above ``seconds``."""
        return self._replace(most=min(self.most, seconds / self.unit_s))


def linear(network: ArcNetwork, constraints: Constraints, most_s: float) -> Linear:
    """Return the program of the least bound up to ``most_s``, which may be infinite, but for ``step_overhead_s``."""
    return _Writer(network, constraints, most_s).write()


class _Writer:
    def __init__(self, network: ArcNetwork, constraints: Constraints, most_s: float) -> None:
        self.network, self.constraints = network, constraints
        self.layers, self.arcs = network.layers, network.arcs
        self.rows: list[ProgramRow] = []
        self.columns = len(self.arcs)
        bound_s, trip_s, self.queue_s = _largest(network)
        self.most_s, self.trip_s = min(most_s, bound_s), min(most_s, trip_s)
        self.unit_s = self.most_s / ROUND or 1.0
        self.crossings: list[list[tuple[LinkTerms, Sum]]] = [[] for _ in range(self.layers + 1)]
        """By cut, what may travel there, and the sum that is one if it does."""

    def write(self) -> Linear:
        """Write all rows."""
        self._flow()
        for crossings in self.network.crossings:
            self._meet(crossings)
        names = ("R", "R'", "U", "U'", "G", "V", "V'", "forward", "around")
        self.of = {name: self._new(self.layers + 1) for name in names}
        self.goal = self._new(1)[0]
        for layer in range(self.layers):
            self._stage(layer)
            self._layer_rows(layer)
        for cut in range(1, self.layers):
            self._cut(cut)
        self._row({self.goal: 1.0, self.of["V"][0]: -1.0})
        return Linear(self.columns, len(self.arcs), tuple(self.rows), self.most_s / self.unit_s, self.unit_s)

    def _new(self, count: int) -> list[int]:
        self.columns += count
        return list(range(self.columns - count, self.columns))

    def _row(self, terms: Sum, least: float = 0.0, *, equal: bool = False) -> None:
        self.rows.append(ProgramRow(tuple(sorted((at, each) for at, each in terms.items() if each)), least, equal))

    def _above(self, larger: int, *sums: Sum) -> None:
        """The column is at least the sums together."""
        self._row(_total({larger: 1.0}, *({at: -each for at, each in terms.items()} for terms in sums)))

    def _flow(self) -> None:
        """One path, with as many stages as are allowed."""
        nodes: dict[tuple[int, int], Sum] = {}
        for index, arc in enumerate(self.arcs):
            nodes.setdefault(arc.begin, {})[index] = 1.0
            nodes.setdefault(arc.end, {})[index] = -1.0
        for node, terms in sorted(nodes.items()):
            if node[0] < self.layers:
                self._row(terms, 1.0 if node[0] == 0 else 0.0, equal=True)
        stages = range(len(self.arcs))
        if self.constraints.least_stages > 1:
            self._row(dict.fromkeys(stages, 1.0), self.constraints.least_stages)
        if self.constraints.most_stages < self.layers:
            self._row(dict.fromkeys(stages, -1.0), -self.constraints.most_stages)

    def _meet(self, crossings: tuple[NodeCrossing, ...]) -> None:
        """One crossing of a node is met if both its sides are; where one side is all arcs, if the other is."""
        befores = dict.fromkeys(each.before for each in crossings)
        afters = dict.fromkeys(each.after for each in crossings)
        several = len(befores) > 1 and len(afters) > 1
        sides = {side: dict.fromkeys(side, -1.0) for side in (*befores, *afters)}
        for each in crossings:
            if several:
                met = {self._new(1)[0]: 1.0}
                sides[each.before] |= met
                sides[each.after] |= met
            else:
                met = dict.fromkeys(each.after if len(befores) == 1 else each.before, 1.0)
            self.crossings[each.cut].append((each.terms, met))
        for terms in sides.values() if several else ():
            self._row(terms, equal=True)

    def _seconds(self, arcs: Iterable[int], seconds: Callable[[StageTerms], Value]) -> Sum:
        """The sum of what the stages of the path take that are among some arcs."""
        return {index: float(seconds(self.arcs[index].terms)) / self.unit_s for index in arcs}

    def _stage(self, layer: int) -> None:
        """What the stage that begins with a layer takes."""
        arcs = [index for index, arc in enumerate(self.arcs) if arc.begin[0] == layer]
        trips = self._seconds(arcs, _own_s)
        trip, busy, done = (self.of[name][layer] for name in ("R", "U", "V"))
        self._above(trip, trips, {self.of["R'"][layer + 1]: 1.0})
        self._above(busy, self._seconds(arcs, _busy_s))
        self._above(busy, {trip: 1.0}, self._seconds(arcs, attrgetter("beside_s")))
        self._above(busy, trips, {self.of["U'"][layer + 1]: 1.0})
        self._above(busy, trips, {self.of["G"][layer + 1]: 1.0})
        self._above(done, {busy: 1.0}, self._seconds(arcs, attrgetter("closing_s")))
        self._above(done, self._seconds(arcs, attrgetter("forward_s")), {self.of["V'"][layer + 1]: 1.0})
        unlike = [index for index in arcs if self.arcs[index].terms.slowest_s is not None]
        if unlike:
            self._above(self.goal, self._seconds(unlike, attrgetter("slowest_s")))
        rates = {index: float(self.arcs[index].terms.rate) for index in arcs}
        for rate in sorted({*rates.values()} - {1.0}):
            most = rate * self.trip_s / self.unit_s
            taken = {index: -most for index in arcs if rates[index] >= rate}
            self._row(_total({busy: 1.0, trip: -rate}, taken), -most)

    def _cut(self, cut: int) -> None:
        """What passes between the stages that meet before a layer; nothing where none do."""
        around, forth, queued, unreturned, unread = self._passing(cut)
        of = {name: columns[cut] for name, columns in self.of.items()}
        self._above(of["R'"], {of["R"]: 1.0}, around, unreturned)
        self._above(of["U'"], {of["U"]: 1.0}, around, unreturned)
        self._above(of["G"], {of["R"]: 1.0}, queued, unreturned)
        self._above(of["G"], {self.of["G"][cut + 1]: 1.0}, unreturned)
        self._above(of["V'"], {of["V"]: 1.0}, forth, unread)
        if unread:
            self._above(self.goal, {of["V"]: 1.0})

    def _passing(self, cut: int) -> tuple[Sum, Sum, Sum, Sum, Sum]:
        """Sums of c + c', c, and the queues; and what makes rows hold where no gradient, and where nothing, passes."""
        found: tuple[Sum, Sum, Sum, Sum, Sum] = ({}, {}, {}, {}, {})
        most = self.most_s + self.queue_s
        for terms, met in self.crossings[cut]:
            forth, back = float(terms.forth_s), float(terms.back_s)
            queued = max(float(terms.forth_work_s) + back, forth + float(terms.back_work_s))
            amounts = (forth + back, forth, queued, 0.0 if terms.back else -most, 0.0 if terms.forth else -most)
            for total, seconds in zip(found, amounts, strict=True):
                for at, each in met.items():
                    if seconds:
                        total[at] = total.get(at, 0.0) + each * seconds / self.unit_s
        return found

    def _layer_rows(self, layer: int) -> None:
        """Implied: the path's way to the stage that holds a layer, that stage's work, and the way's end."""
        around, forth, _, unreturned, unread = self._passing(layer)
        there, both = self.of["forward"][layer], self.of["around"][layer]
        if layer > 0:
            arcs = [index for index, arc in enumerate(self.arcs) if arc.end[0] == layer]
            forwards, trips = self._seconds(arcs, attrgetter("forward_s")), self._seconds(arcs, _own_s)
            self._above(there, {self.of["forward"][layer - 1]: 1.0}, forwards, forth, unread)
            self._above(both, {self.of["around"][layer - 1]: 1.0}, trips, around, unreturned)
        else:
            first = [index for index, arc in enumerate(self.arcs) if arc.begin[0] == 0]
            self._above(both, self._seconds(first, attrgetter("closing_s")))
        holding = [index for index, arc in enumerate(self.arcs) if arc.begin[0] <= layer < arc.end[0]]
        busy = self._seconds(holding, _busy_s)
        self._above(self.goal, {there: 1.0}, busy, self._seconds(holding, attrgetter("closing_s")))
        self._above(self.goal, {both: 1.0}, busy)


def _own_s(terms: StageTerms) -> float:
    return float(terms.forward_s) + float(terms.backward_s)


def _busy_s(terms: StageTerms) -> float:
    """Seconds that a stage computes or waits for itself, were it alone."""
    return max(float(terms.work_s), float(terms.rate) * _own_s(terms))


def _total(*sums: Sum) -> Sum:
    found: Sum = {}
    for terms in sums:
        for at, each in terms.items():
            found[at] = found.get(at, 0.0) + each
    return found


def _largest(network: ArcNetwork) -> tuple[float, float, float]:
    """Return seconds that no path's bound, round trip and queues exceed."""
    trip_s = work_s = queue_s = 0.0
    rate = max((float(arc.terms.rate) for arc in network.arcs), default=1.0)
    for layer in range(network.layers):
        stages = [arc.terms for arc in network.arcs if arc.begin[0] == layer]
        trip_s += max(map(_own_s, stages), default=0.0)
        work_s += max((_busy_s(each) + float(each.closing_s) for each in stages), default=0.0)
    cuts: dict[int, list[LinkTerms]] = {}
    for crossing in chain.from_iterable(network.crossings):
        cuts.setdefault(crossing.cut, []).append(crossing.terms)
    for terms in cuts.values():
        trip_s += max(float(each.forth_s) + float(each.back_s) for each in terms)
        queue_s += max(float(each.forth_work_s) + float(each.back_work_s) for each in terms)
    return (rate + 1) * trip_s + work_s + queue_s, trip_s, trip_s + queue_s
