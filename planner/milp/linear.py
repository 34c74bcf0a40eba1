"""Linear: the least bound of all paths as a mixed-integer linear program, as data; no solver is known here.

With x one for the arcs of the path, and sums over the arcs that begin at layer p, or over what meets at cut q,

    R(p) >= sum t x + R'(p+1)                       R'(q) >= R(q) + sum (c + c')
    U(p) >= sum max(M t, M t / k) x                 U'(q) >= U(q) + sum (c + c')
    U(p) >= sum t x + U'(p+1)                       G(q) >= R(q) + sum max(M c + c', c + M c'), G(q+1)
    U(p) >= sum t x + G(p+1)
    U(p) >= M R(p) / k                              where an arc with that k is taken
    V(p) >= U(p) + sum a x, sum f x + V'(p+1)       V'(q) >= V(q) + sum c
    T >= V(1)

say the bound of docs/planning.md without asking at which layers there are cuts: where there is none, all sums are
empty, and each quantity is that of the next cut, which the stage before takes into account anyway. Only M R / k, and
cuts where no gradient or nothing at all passes, take a constant that is large enough to make a row hold by itself.
Rows beyond these are implied by them for whole x, and bring the solver's relaxation near.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from autopar.planner.bounds.chain import LinkTerms
from autopar.planner.constraints import Constraints
from autopar.planner.milp.arcs import Arc, Crossing, Network

Sum = dict[int, float]
"""Coefficients by column."""

ROUND = 1000.0
"""What the largest step time becomes, so that solvers' tolerances mean little."""


class Row(NamedTuple):
    """The sum of columns times coefficients is ``least`` at least; or exactly, if ``equal``."""

    terms: tuple[tuple[int, float], ...]
    least: float
    equal: bool = False


class Linear(NamedTuple):
    """Make the last column least, with all columns at least 0 and the first ``whole`` ones 0 or 1."""

    columns: int
    whole: int
    rows: tuple[Row, ...]
    most: float
    """Of the last column."""
    unit_s: float
    """Seconds per one of the last column."""

    def without(self, path: Iterable[int]) -> Linear:
        """Return the program in which one path is forbidden: no other holds all of its arcs."""
        arcs = sorted(path)
        return self._replace(rows=(*self.rows, Row(tuple((arc, -1.0) for arc in arcs), 1.0 - len(arcs))))

    def below(self, seconds: float) -> Linear:
        """Return the program without solutions above ``seconds``."""
        return self._replace(most=min(self.most, seconds / self.unit_s))


def linear(network: Network, constraints: Constraints, most_s: float) -> Linear:
    """Return the program of a network; its least solution is the least bound, but for ``step_overhead_s``.

    Only bounds up to ``most_s``, which may be infinite, are solutions.
    """
    return _Writer(network, constraints, most_s).write()


class _Writer:
    def __init__(self, network: Network, constraints: Constraints, most_s: float) -> None:
        self.network, self.constraints = network, constraints
        self.layers, self.arcs = network.layers, network.arcs
        self.rows: list[Row] = []
        self.columns = len(self.arcs)
        largest = _largest(network)
        self.most_s, self.trip_s = min(most_s, largest.bound_s), min(most_s, largest.trip_s)
        self.queue_s = largest.queue_s
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
            self._covered(layer)
        for cut in range(1, self.layers):
            self._cut(cut)
        self._row({self.goal: 1.0, self.of["V"][0]: -1.0})
        return Linear(self.columns, len(self.arcs), tuple(self.rows), self.most_s / self.unit_s, self.unit_s)

    def _new(self, count: int) -> list[int]:
        self.columns += count
        return list(range(self.columns - count, self.columns))

    def _row(self, terms: Sum, least: float = 0.0, *, equal: bool = False) -> None:
        self.rows.append(Row(tuple(sorted((at, each) for at, each in terms.items() if each)), least, equal))

    def _above(self, larger: int, *sums: Sum) -> None:
        """The column is at least the sums together."""
        self._row(_added({larger: 1.0}, *({at: -each for at, each in terms.items()} for terms in sums)))

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

    def _meet(self, crossings: tuple[Crossing, ...]) -> None:
        """One crossing of a node is met if both its sides are; where one side is all arcs, if the other is."""
        befores = list(dict.fromkeys(each.before for each in crossings))
        afters = list(dict.fromkeys(each.after for each in crossings))
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], Sum] = {}
        for each in crossings:
            if len(befores) == 1 or len(afters) == 1:
                met = dict.fromkeys(each.after if len(befores) == 1 else each.before, 1.0)
            else:
                met = {self._new(1)[0]: 1.0}
            found[each.before, each.after] = met
            self.crossings[each.cut].append((each.terms, met))
        if len(befores) > 1 and len(afters) > 1:
            for one in befores:
                met = _added(*(found[one, other] for other in afters))
                self._row(_added(met, dict.fromkeys(one, -1.0)), equal=True)
            for other in afters:
                met = _added(*(found[one, other] for one in befores))
                self._row(_added(met, dict.fromkeys(other, -1.0)), equal=True)

    def _seconds(self, arcs: Iterable[tuple[int, float]]) -> Sum:
        return {index: seconds / self.unit_s for index, seconds in arcs}

    def _stage(self, layer: int) -> None:
        """What the stage that begins with a layer takes."""
        arcs = [(index, arc) for index, arc in enumerate(self.arcs) if arc.begin[0] == layer]
        trips = self._seconds((index, _own(arc)) for index, arc in arcs)
        forwards = self._seconds((index, float(arc.terms.forward_s)) for index, arc in arcs)
        closings = self._seconds((index, float(arc.terms.closing_s)) for index, arc in arcs)
        trip, busy, done = (self.of[name][layer] for name in ("R", "U", "V"))
        self._above(trip, trips, {self.of["R'"][layer + 1]: 1.0})
        self._above(busy, self._seconds((index, _busy(arc)) for index, arc in arcs))
        self._above(busy, {trip: 1.0}, self._seconds((index, float(arc.terms.beside_s)) for index, arc in arcs))
        self._above(busy, trips, {self.of["U'"][layer + 1]: 1.0})
        self._above(busy, trips, {self.of["G"][layer + 1]: 1.0})
        self._above(done, {busy: 1.0}, closings)
        self._above(done, forwards, {self.of["V'"][layer + 1]: 1.0})
        for rate in sorted({float(arc.terms.rate) for _, arc in arcs} - {1.0}):
            most = rate * self.trip_s / self.unit_s
            taken = {index: most for index, arc in arcs if float(arc.terms.rate) >= rate}
            self._row(_added({busy: 1.0, trip: -rate}, {at: -each for at, each in taken.items()}), -most)

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

    def _covered(self, layer: int) -> None:
        """Implied: the path's way to the stage that holds a layer, that stage's work, and the way's end."""
        arcs = list(enumerate(self.arcs))
        holding = [(index, arc) for index, arc in arcs if arc.begin[0] <= layer < arc.end[0]]
        ended = [(index, arc) for index, arc in arcs if arc.end[0] == layer]
        around, forth, _, unreturned, unread = self._passing(layer)
        there, both = self.of["forward"][layer], self.of["around"][layer]
        if layer > 0:
            forwards = self._seconds((index, float(arc.terms.forward_s)) for index, arc in ended)
            trips = self._seconds((index, _own(arc)) for index, arc in ended)
            self._above(there, {self.of["forward"][layer - 1]: 1.0}, forwards, forth, unread)
            self._above(both, {self.of["around"][layer - 1]: 1.0}, trips, around, unreturned)
        else:
            first = [(index, float(arc.terms.closing_s)) for index, arc in arcs if arc.begin[0] == 0]
            self._above(both, self._seconds(first))
        busy = self._seconds((index, _busy(arc)) for index, arc in holding)
        closing = self._seconds((index, float(arc.terms.closing_s)) for index, arc in holding)
        self._above(self.goal, {there: 1.0}, busy, closing)
        self._above(self.goal, {both: 1.0}, busy)


def _own(arc: Arc) -> float:
    return float(arc.terms.forward_s) + float(arc.terms.backward_s)


def _busy(arc: Arc) -> float:
    """Seconds that a stage computes or waits for itself, were it alone."""
    return float(np.maximum(arc.terms.work_s, arc.terms.rate * (arc.terms.forward_s + arc.terms.backward_s)))


def _added(*sums: Sum) -> Sum:
    found: Sum = {}
    for terms in sums:
        for at, each in terms.items():
            found[at] = found.get(at, 0.0) + each
    return found


class _Largest(NamedTuple):
    """Seconds that no path exceeds."""

    bound_s: float
    trip_s: float
    queue_s: float


def _largest(network: Network) -> _Largest:
    trip_s = work_s = queue_s = 0.0
    rate = max((float(arc.terms.rate) for arc in network.arcs), default=1.0)
    for layer in range(network.layers):
        arcs = [arc for arc in network.arcs if arc.begin[0] == layer]
        trip_s += max(map(_own, arcs), default=0.0)
        work_s += max((_busy(arc) + float(arc.terms.closing_s) for arc in arcs), default=0.0)
    cuts: dict[int, list[LinkTerms]] = {}
    for crossing in (each for crossings in network.crossings for each in crossings):
        cuts.setdefault(crossing.cut, []).append(crossing.terms)
    for terms in cuts.values():
        trip_s += max(float(each.forth_s) + float(each.back_s) for each in terms)
        queue_s += max(float(each.forth_work_s) + float(each.back_work_s) for each in terms)
    return _Largest((rate + 1) * trip_s + work_s + queue_s, trip_s, trip_s + queue_s)
