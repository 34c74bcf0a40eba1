"""Local: good plans from several starts, and moves from the best of them, judged by the simulator.

A move is priced by what it changes: what the stages it touches would compute with as much in flight as the stages there
have now, recomputing what then does not fit. The most promising ones are simulated. Of plans as fast as each other, one
is better whose slow stages are fewer: so several moves may follow each other before a step gets shorter.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from heapq import heapify, heapreplace, nsmallest
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np

from autopar.options.plan import PlanOptions
from autopar.ownership import DIVISIONS, SINGLE, Division, Replicas, even_shares, shards_of
from autopar.planner.bounds import candidate_bound_s, link_terms
from autopar.planner.candidate import Candidate, CandidateStage, Family, Shape, counts_beside, devices_of, replicas_of
from autopar.planner.constraints import Constraints
from autopar.planner.costs import memoize
from autopar.planner.costs.activations import Numbers
from autopar.planner.costs.model import CostModel
from autopar.planner.placement import may_stand, stage_place
from autopar.planner.search import moves
from autopar.planner.search.depths import depth_choices, recompute_least, span_of
from autopar.planner.search.judge import (
    CLIMB,
    ENOUGH,
    EQUAL,
    FITTED,
    MOST_CLIMB,
    PRICED,
    SCORED,
    START,
    WHEN_EXACT,
    Best,
    SimulatedPlan,
    least_gap,
    shortened_us,
    simulated_us,
)
from autopar.planner.shares import by_speed
from autopar.planner.simulator.simulate import Simulator

Element = TypeVar("Element")
MOST_EDGES = 1024
BUSY = 6
"""So many of the stages that compute longest are given devices, or divided."""
MOST_PASSED = 256
"""A layer is passed on in about so many ways; in more, where the busiest stages alone have more."""
FEW_TRIES, TRIES = 12, 96
"""So many of a plan's most promising neighbours are simulated: few at first, more where these led nowhere."""
NORM = 16
"""A mean of this power stands for the slowest stage, so that it grows with how many stages are about as slow."""
SIDEWAYS = 2e-3
"""A move may make a plan slower by this share if fewer of its stages are slow then."""
MOST_SIDEWAYS, TRIES_BESIDE = 12, 3
"""So many such moves may follow each other; and once one is known, so many further neighbours are simulated."""


class _SearchState(NamedTuple):
    """Where a climb stands."""

    simulated_plan: SimulatedPlan
    family: Family
    shape: Shape
    order: tuple[int, ...]
    """All devices, in the order in which stages take them."""


class _PlacedStage(NamedTuple):
    """A stage of a shape where it stands."""

    first: int
    stop: int
    replicas: Replicas
    in_flight: int
    """Micro-batches, on all replicas."""
    devices: tuple[int, ...]


class _StagePrice(NamedTuple):
    """What a stage, or the boundary before it, adds to a step."""

    load_s: float
    """Per micro-batch, how long it is occupied."""
    forward_s: float
    backward_s: float
    """One micro-batch's way through it, and back."""
    closing_s: float
    """Reduction that is left after the last backward, and the update."""


class LocalSearch:
    """Moves from plan to plan; what it meets is kept in ``best``."""

    def __init__(
        self, simulator: Simulator, options: PlanOptions, best: Best, work: float, *, equal: bool = False
    ) -> None:
        """Prepare to do ``work``, in counted microseconds of a core; ``equal``: stages stay as wide, and run alike."""
        self.simulator, self.costs, self.options, self.best = simulator, simulator.costs, options, best
        self.work_left, self.equal = work, equal
        self.rules = Constraints.of(self.costs, options)
        self.edges = self.rules.edges(MOST_EDGES)
        self._prices: dict[tuple[object, ...], _StagePrice | None] = {}
        self._links: dict[tuple[object, ...], _StagePrice] = {}
        self._tried_shapes: set[tuple[Family, Shape, tuple[int, ...]]] = set()

    def climb(self, simulated_plan: SimulatedPlan, enough_s: float = 0.0, tries: int = FEW_TRIES) -> None:
        """Move on while that makes a plan faster, or its slow stages fewer; ``tries`` moves are simulated of each."""
        at = self._state_of(simulated_plan)
        # Who found the plan may have looked at fewer depths.
        own = self.judge(at.family, at.shape, at.order, simulated_plan.step_s)
        at = at if own is None or own.step_s >= simulated_plan.step_s else at._replace(simulated_plan=own)
        sideways = 0
        while self.work_left > 0 and at.simulated_plan.step_s > enough_s:
            after = self._next(at, tries)
            if after is None:
                return
            sideways = 0 if after.simulated_plan.step_s < at.simulated_plan.step_s * (1 - 1e-6) else sideways + 1
            if sideways > MOST_SIDEWAYS:
                return
            at = after

    def deepen(self, simulated_plan: SimulatedPlan) -> None:
        """Judge a plan's stages with more choices of what is in flight than a climb looks at."""
        at = self._state_of(simulated_plan)
        self._tried_shapes.discard((at.family, at.shape, at.order))
        self.judge(at.family, at.shape, at.order, simulated_plan.step_s, few=False)

    def judge(
        self, family: Family, shape: Shape, order: tuple[int, ...], below_s: float, *, few: bool = True
    ) -> SimulatedPlan | None:
        """Return the fastest plan of a shape that was not judged, if it may take less than ``below_s``, and fits."""
        if (family, shape, order) in self._tried_shapes:
            return None
        self._tried_shapes.add((family, shape, order))
        frame = self._frame(family, shape, order)
        self.work_left -= PRICED * len(shape.cuts)
        if frame is None or candidate_bound_s(self.costs, Candidate(*family, frame)) >= below_s:
            return None
        spans = [span_of(self.costs, family, self.options, stage) for stage in frame]
        choices = depth_choices(self.costs, family, frame, spans, exact=False, few=few)
        self.work_left -= FITTED * len(frame)
        self.best.miss(choices.closest)
        met = []
        for found in self.best.judge_each(self.simulator, choices.candidates, below_s):
            self.work_left -= simulated_us(choices.candidates[0])
            met += [found] if found is not None else []
        return min(met, key=lambda each: each.step_s, default=None)

    def _next(self, at: _SearchState, tries: int) -> _SearchState | None:
        """Return the first of the most promising neighbours that is faster, or as fast with fewer slow stages."""
        # Each layer with as much in flight as now.
        stages = at.simulated_plan.candidate.stages
        depths = [stage.in_flight for stage in stages for _ in range(stage.first, stage.stop)]
        untried = (each for each in self._near(at) if (at.family, each, at.order) not in self._tried_shapes)
        near = {each: self.score(at.family, each, at.order, depths) for each in (at.shape, *untried)}
        own_s = near.pop(at.shape)
        beside: _SearchState | None = None
        further = tries
        for shape in nsmallest(tries, near, key=near.__getitem__):
            if self.work_left <= 0 or further == 0 or near[shape] == float("inf"):
                break
            further -= 1
            found = self.judge(at.family, shape, at.order, at.simulated_plan.step_s * (1 + SIDEWAYS))
            if found is None:
                continue
            after = at._replace(simulated_plan=found, shape=shape)
            if found.step_s < at.simulated_plan.step_s * (1 - 1e-6):
                return after
            if beside is None and near[shape] < own_s * (1 - 1e-6):
                beside, further = after, min(further, TRIES_BESIDE)
        return self._otherwise(at) or beside

    def _otherwise(self, at: _SearchState) -> _SearchState | None:
        """Return the shape with other micro-batches, or other ways of running replicas, if that is faster."""
        changed = moves.replicas_changed(at.shape, self.ways(), () if self.equal else self._busy(at)[:2])
        ways = [(at.family, shape) for shape in changed]
        if self.options.micro_batches is None:
            batch, (count, _, schedule) = self.costs.batch, at.family
            ways += [(Family(each, batch // each, schedule), at.shape) for each in counts_beside(batch, count)]
        for family, shape in ways:
            found = self.judge(family, shape, at.order, at.simulated_plan.step_s)
            if found is not None and found.step_s < at.simulated_plan.step_s * (1 - 1e-6):
                return at._replace(simulated_plan=found, family=family, shape=shape)
        return None

    def _near(self, at: _SearchState) -> Iterator[Shape]:
        shape, busy = at.shape, self._busy(at)
        some = busy[:BUSY]
        inner = range(len(shape.cuts) - 1)
        for cuts in moves.cuts_moved(shape.cuts, self.edges, inner, 2):
            yield shape._replace(cuts=cuts)
        givers = busy[: max(BUSY, MOST_PASSED // len(shape.cuts))]
        for cuts in moves.layers_passed(shape.cuts, self.edges, givers):
            yield shape._replace(cuts=cuts)
        if self.equal:
            return
        idle = len(at.order) - sum(shape.devices)
        for devices in moves.devices_moved(shape.devices, idle, some, all_used=self.options.use_all):
            moved = shape.with_devices(devices)
            if moved is not None:
                yield moved
        yield from moves.stages_joined(shape, inner)
        forwards = partial(self._forwards_s, at.family)
        yield from moves.stages_divided(shape, some, forwards, idle, self.options.shards)
        if len(self.costs.teams) > 1:
            yield from moves.teams_changed(shape, self.costs.teams, range(len(shape.cuts)))

    def _forwards_s(self, family: Family, replicas: Replicas) -> Sequence[float]:
        """Return running sums of the seconds of layers' forwards of all rows of a micro-batch."""
        return self.costs.seconds.running(family.micro_batch_size, 1.0, self.costs.form(0, replicas))[0]

    def ways(self) -> list[Replicas]:
        """Return the ways in which replicas may be run, of two each."""
        divisions = DIVISIONS[:1] if self.costs.divisible else DIVISIONS
        return [Replicas(2, each, shard) for each in divisions for shard in shards_of(each, self.options.shards)]

    def _busy(self, at: _SearchState) -> list[int]:
        """Return the stages, those first that compute longest."""
        loads = [self._price_of(at.family, stage).load_s for stage in at.simulated_plan.candidate.stages]
        return sorted(range(len(loads)), key=lambda index: -loads[index])

    def _price_of(self, family: Family, stage: CandidateStage) -> _StagePrice:
        turns, at = stage.replicas.most(family.micro_batches), self.costs.slowest(stage)
        forward_s, backward_s = self.costs.forward_s(stage, at), self.costs.backward_s(stage, at, turns)
        load_s = (forward_s + backward_s) * turns / family.micro_batches
        closing_s = self.costs.replica_exposed_s(stage, at) + self.costs.update_s(stage)
        return _StagePrice(load_s, forward_s, backward_s, closing_s)

    def score(self, family: Family, shape: Shape, order: tuple[int, ...], depths: Sequence[int]) -> float:
        """Return about how long a step takes, more where many stages are slow; infinite where one does not fit.

        ``depths`` are how many micro-batches are in flight, by layer.
        """
        self.work_left -= SCORED * len(shape.cuts)
        loads, trip_s, back_s, closing_s = [], 0.0, 0.0, 0.0
        before: _PlacedStage | None = None
        for stage in _placed_stages(shape, order, depths):
            price = self._price(family, before, stage)
            if price is None:
                return float("inf")
            if before is not None:
                sent = self._link_price(family, before, stage)
                loads.append(sent.load_s)
                trip_s += sent.forward_s + sent.backward_s
                back_s += sent.backward_s
            loads.append(price.load_s)
            trip_s += price.forward_s + price.backward_s
            # Behind a stage's last backward are those of the stages before it, beside which it reduces and updates.
            closing_s = max(closing_s, price.closing_s - back_s)
            back_s += price.backward_s
            before = stage
        slowest = max(loads)
        if slowest <= 0:
            return 0.0
        mean: float = (sum((load / slowest) ** NORM for load in loads) / len(loads)) ** (1 / NORM) * slowest
        return (family.micro_batches - 1) * mean + trip_s + closing_s

    def _link_price(self, family: Family, before: _PlacedStage, stage: _PlacedStage) -> _StagePrice:
        """Return the price of the tensors of a boundary, which occupy a queue each way."""
        level = self.costs.links.level((before.devices[-1], stage.devices[-1]))
        key = family, *before[:3], *stage[:3], level
        if key not in self._links:
            self.work_left -= PRICED
            sender, receiver = self._place_stage(family, before), self._place_stage(family, stage)
            assert sender is not None
            assert receiver is not None
            link = link_terms(self.costs, sender, receiver, Candidate(*family, (sender, receiver)))
            work_s = max(float(link.forth_work_s), float(link.back_work_s))
            self._links[key] = _StagePrice(work_s / family.micro_batches, float(link.forth_s), float(link.back_s), 0.0)
        return self._links[key]

    def _price(self, family: Family, before: _PlacedStage | None, stage: _PlacedStage) -> _StagePrice | None:
        """Return a stage's price with so many in flight, recomputing as little as fits; None where nothing fits."""
        where = self._where(stage.devices, stage.replicas.team)
        lead = None if before is None else (before.in_flight, before.replicas.period)
        key = family, *stage[:4], lead, where
        if key not in self._prices:
            self.work_left -= shortened_us(stage.stop - stage.first)
            self._prices[key] = None if where is None else self._least(family, before, stage)
        return self._prices[key]

    def _least(self, family: Family, before: _PlacedStage | None, stage: _PlacedStage) -> _StagePrice | None:
        placed = self._place_stage(family, stage)
        if placed is None:
            return None
        # The stage before is there for what it leads by.
        leading = None if before is None else self._place_stage(family, before)
        near = [placed] if leading is None else [leading, placed]
        span = span_of(self.costs, family, self.options, placed)
        fits = recompute_least(self.costs, family, near, len(near) - 1, span) <= 0
        return self._price_of(family, near[-1]) if fits else None

    def _place_stage(self, family: Family, stage: _PlacedStage) -> CandidateStage | None:
        """Return a stage with as much in flight as is said; None where a replica would have nothing to do."""
        first, stop, replicas, in_flight, devices = stage
        alone, team = (
            replicas._replace(team=1, sliced=False),
            replicas._replace(width=1, division="split", shard="none"),
        )
        every = replicas_of(family, replicas.width, (replicas.shard,), divisible=self.costs.divisible)
        if alone not in every or team not in self.costs.teams:
            return None
        depth = min(replicas.most(family.micro_batches), max(1, -(-in_flight // replicas.period)))
        shares = self.costs.shares(family.micro_batch_size, replicas)
        placed = CandidateStage.of(first, stop, devices, shares, depth, replicas)
        # In turn, replicas of several kinds are as fast as the slowest.
        in_turn = replicas.division != "split" and self.costs.is_mixed(placed)
        return None if in_turn else by_speed(self.costs, placed, family)

    @memoize
    def _where(self, devices: tuple[int, ...], team: int) -> tuple[object, ...] | None:
        """Return what of its devices a stage's price depends on; None where no stage can have them."""
        if not may_stand(self.costs, devices, team):
            return None
        stands = stage_place(self.costs, devices, team)
        kinds = {self.costs.kind_of[device] for device in devices}
        if len(kinds) == 1:
            return (*kinds, stands)
        own = Counter((self.costs.kind_of[device], self.costs.limits_bytes[device]) for device in devices)
        return frozenset(own.items()), stands

    def _state_of(self, simulated_plan: SimulatedPlan) -> _SearchState:
        candidate = simulated_plan.candidate
        used = candidate.devices
        idle = sorted(set(range(len(self.costs.devices))) - set(used))
        return _SearchState(simulated_plan, candidate.family, Shape.of(candidate), (*used, *idle))

    def _frame(self, family: Family, shape: Shape, order: tuple[int, ...]) -> tuple[CandidateStage, ...] | None:
        """Return the stages of a shape, with all in flight and nothing recomputed; None where it cannot be."""
        if self.options.use_all and sum(shape.devices) < len(order):
            return None
        stages = []
        for each in _placed_stages(shape, order, [2**31] * self.costs.layer_count):
            stage = self._place_stage(family, each)
            if stage is None or self._where(each.devices, each.replicas.team) is None:
                return None
            stages.append(stage)
        return None if self.rules.broken(stages, self.costs.kind_of) is not None else tuple(stages)


def _placed_stages(shape: Shape, order: Sequence[int], depths: Sequence[int]) -> Iterator[_PlacedStage]:
    """Return the stages of a shape, which take devices in an order; ``depths`` are by layer."""
    firsts = (0, *shape.cuts[:-1])
    in_flight = map(depths.__getitem__, firsts)
    return map(_PlacedStage, firsts, *shape, in_flight, devices_of(shape.devices, order))


SEEDS, MOST_SEEDS = 4, 1_000
"""Local moves begin with the fastest plan of each number of stages, with and without replicas that take turns.

With so many of them first, and with the others while there is work left.
"""
SIMULATIONS = 120
"""Local moves may take as long as so many simulations of the best plan, within limits."""
FAR, NEAR = 1.5, 1.02
"""No local moves begin with plans that take so many times the best step; and in the end, only plans within the second
are judged with more choices of depths."""
FEW_STAGES = 16
"""Every number of stages up to this one is tried, and of larger ones those that are about a sixteenth apart."""
FEW_JUDGED, JUDGED = 4, 32
"""So many of the most promising even splits are simulated: few where that takes long."""


def judge_even_splits(simulator: Simulator, families: Sequence[Family], options: PlanOptions, best: Best) -> None:
    """Judge even splits: every number of stages, as equal as can be, on equal widths or all devices, sharded alike."""
    climb = LocalSearch(simulator, options, best, START * options.effort)
    orders = cache(partial(orders_of, simulator.costs))
    alike = len(set(zip(simulator.costs.kind_of, simulator.costs.limits_bytes, strict=True))) == 1
    shapes = [each for team in simulator.costs.teams for each in even_shapes(simulator.costs, max(families), team)]
    quick = sorted(
        (quick_s, at, family, division)
        for family in families
        for division in dict.fromkeys(each.division for each in climb.ways())
        for at, quick_s in enumerate(_quick_steps_s(simulator.costs, family, division, shapes))
    )
    some = [each for each in quick if each[0] < FAR * best.step_s]
    priced: list[tuple[float, int, Family, Shape, tuple[int, ...]]] = []
    # Where many do not fit, the quickest of each kind come before others.
    for _, at, family, division in in_turn(some, lambda each: (_sizes(shapes[each[1]]), each[3])):
        if climb.work_left <= START * options.effort / 2:
            break
        own = [how for how in climb.ways() if how.division == division]
        for how in own if max(shapes[at].widths) > 1 else own[:1]:
            shape = shapes[at].run(how)
            for order, score in _scores_by_order(climb, family, shape, orders(shape.replicas[0].team), alike=alike):
                priced.append((score, len(priced), family, shape, order))
    # Local moves change widths slowly, and divisions and orders of devices not at all.
    ranked = in_turn(
        sorted(priced), lambda each: (_sizes(each[3]), tuple(how.division for how in each[3].replicas), each[4])
    )
    for at, (score, _, family, shape, order) in enumerate(ranked[: JUDGED * options.effort]):
        if score < FAR * best.step_s and (climb.work_left > 0 or at < FEW_JUDGED):
            climb.judge(family, shape, order, float("inf"))


def _sizes(shape: Shape) -> tuple[tuple[int, ...], Replicas]:
    """Return the replicas of an even split's stages, and the team that runs each."""
    return shape.widths, SINGLE.run_by(shape.replicas[0])


def _scores_by_order(
    climb: LocalSearch, family: Family, shape: Shape, orders: Sequence[tuple[int, ...]], *, alike: bool
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield orders in which stages may take devices, and a shape's score with each; ``alike``: all devices are."""
    depths = least_depths(family, shape)
    for order in orders if max(shape.widths) > 1 else orders[:1]:
        score = climb.score(family, shape, order, depths)
        if score == float("inf") and alike:
            # Nor does it fit on others.
            return
        yield order, score


def least_depths(family: Family, shape: Shape) -> list[int]:
    """Return how many micro-batches, by layer, `1f1b` keeps in flight at least not to wait."""
    behind = (len(shape.cuts) - bisect_right(shape.cuts, layer) for layer in range(shape.cuts[-1]))
    return [min(family.micro_batches, each) for each in behind]


def in_turn(elements: Iterable[Element], kind: Callable[[Element], object]) -> list[Element]:
    """Return the first of every kind, in their order, then the second ones, and so on.

    >>> in_turn(["aa", "ab", "ba", "ac", "ca", "bb"], lambda each: each[0])
    ['aa', 'ba', 'ca', 'ab', 'bb', 'ac']
    """
    ranks: defaultdict[object, Iterator[int]] = defaultdict(itertools.count)
    return sorted(elements, key=lambda each: next(ranks[kind(each)]))


def orders_of(costs: CostModel, team: int = 1) -> list[tuple[int, ...]]:
    """Return the orders in which stages may take devices: node by node, and one of every node in turn (scatter first).

    Stages of the second order have their replicas on several nodes, and their neighbours beside them. Where stages may
    have devices of several kinds, in the third they have about as much of each; those that run a replica stay together.
    """
    nodes = costs.links.topology.nodes
    along = range(len(nodes))
    found = [tuple(along), tuple(in_turn(along, nodes.__getitem__))]
    if costs.mixes:
        teams = [each for kind in sorted(set(costs.kind_of)) for each in _spread_teams(costs, kind, team)]
        found.append(tuple(device for _, own in sorted(teams) for device in own))
    return list(dict.fromkeys(found))


def _spread_teams(costs: CostModel, kind: int, team: int) -> list[tuple[float, tuple[int, ...]]]:
    """Return the teams of a kind's devices, evenly spread from 0 to 1; devices that make none are last."""
    every = costs.devices_of(kind)
    teams = [tuple(every[at : at + team]) for at in range(0, len(every), team)]
    whole = len(every) // team
    return [((at + 0.5) / whole if at < whole else 2.0, each) for at, each in enumerate(teams)]


def even_shapes(costs: CostModel, family: Family, team: Replicas = SINGLE) -> Iterator[Shape]:
    """Yield splits into stages that take about as long, or have as many layers, on equal widths, or on all devices.

    Equal widths are as many replicas as there are devices for each, as fill as many whole nodes, or one node. On all
    devices, widths are as equal as can be, or go by the time that stages take. Each replica is run as ``team`` is.
    """
    every_node = Counter(costs.links.topology.nodes).values()
    node, edges = max(every_node) // team.team, list(range(costs.layer_count + 1))
    devices = len(costs.devices) // team.team if costs.across_nodes else sum(each // team.team for each in every_node)
    running = moves.running_s(costs, family.micro_batch_size, team)
    for count in stage_counts(min(costs.layer_count, devices)) if devices else ():
        # Replicas that take turns wait for each other at every change of width, of which one is best.
        ascending = tuple(sorted(even_shares(devices, count)))
        most = devices // count
        equal = [(each,) * count for each in (most, most // node * node if node else 0, min(node, most)) if each]
        widths = [*equal, ascending, ascending[::-1]]
        layers = even_shares(costs.layer_count, count)
        alike = [tuple(accumulate(each)) for each in (layers, layers[::-1])]
        every = {
            each: dict.fromkeys((moves.balanced_shape(costs, family, _run(each, team), 1, edges).cuts, *alike))
            for each in dict.fromkeys(widths)
        }
        for each, own in every.items():
            for cuts in own:
                yield Shape(cuts, _run(each, team))
        for cuts in every[equal[0]]:
            seconds = np.diff(running[[0, *cuts]]).tolist()
            yield Shape(cuts, _run(widths_by_time(seconds, devices), team))


def _run(widths: Sequence[int], team: Replicas) -> tuple[Replicas, ...]:
    """Return so many replicas of every stage, each run as a team is."""
    return tuple(map(team.so_many, widths))


def widths_by_time(seconds: Sequence[float], devices: int) -> tuple[int, ...]:
    """Return how many devices stages get that take so long on one, so that the slowest is about as quick as can be.

    >>> widths_by_time([1.0, 3.0, 2.0], 12), widths_by_time([1.0, 1.0], 5)
    ((2, 6, 4), (3, 2))
    """
    total, more = sum(seconds), devices - len(seconds)
    widths = [1 + int(more * each / total) if total > 0 else 1 for each in seconds]
    slowest = [(-each / width, at) for at, (each, width) in enumerate(zip(seconds, widths, strict=True))]
    heapify(slowest)
    for _ in range(devices - sum(widths)):
        at = slowest[0][1]
        widths[at] += 1
        heapreplace(slowest, (-seconds[at] / widths[at], at))
    return tuple(widths)


def _quick_steps_s(costs: CostModel, family: Family, division: Division, shapes: Iterable[Shape]) -> Iterator[float]:
    """Yield about how long the steps of shapes take in which replicas divide micro-batches in a way.

    Were there no limit of memory; infinite where a shape cannot be, or has no replicas that could take turns.
    """
    count, rows = family.micro_batches, family.micro_batch_size

    @cache
    def sums_of(replicas: Replicas) -> Numbers:
        shares = costs.shares(rows, replicas._replace(division=division))
        return moves.running_s(costs, max(shares), replicas)

    for shape in shapes:
        edges, widths, own_s = np.array((0, *shape.cuts)), np.array(shape.widths), np.zeros(len(shape.cuts))
        if all(how.division != division for how in replicas_of(family, max(shape.widths), divisible=costs.divisible)):
            yield float("inf")
            continue
        for replicas in set(shape.replicas):
            some, sums = widths == replicas.width, sums_of(replicas)
            own_s[some] = sums[edges[1:][some]] - sums[edges[:-1][some]]
        turns = 1.0 if division == "split" else -(-count // widths) / count
        yield float((count - 1) * (own_s * turns).max() + own_s.sum())


def stage_counts(most: int) -> list[int]:
    """Return numbers of stages to try: all, but of many those that are about a sixteenth apart.

    >>> stage_counts(5), stage_counts(40)[29:]
    ([1, 2, 3, 4, 5], [30, 31, 32, 34, 36, 38, 40])
    """
    found = [1]
    while found[-1] < most:
        found.append(min(most, found[-1] + max(1, found[-1] // FEW_STAGES)))
    return found


def _seed(best: Best, done: set[tuple[int, bool]], most: int) -> tuple[int, bool] | None:
    """Return of which number of stages, with turns or without, the fastest plan is the best one that is not done.

    Of the ``most`` best ones.
    """
    seeds = nsmallest(most, best.by_ways.items(), key=lambda each: (each[1].step_s, each[0]))
    return next((seed for seed, each in seeds if seed not in done and each.step_s < FAR * best.step_s), None)


def search_locally(simulator: Simulator, options: PlanOptions, best: Best, lower_bound_s: float) -> None:
    """Make local moves from the best plans, until one is close enough to the lower bound or the work is done.

    From the best one of equal widths, too, which stay equal.
    """
    if best.fastest is None:
        return
    gap = least_gap(options) if options.effort > 1 or options.exact else max(ENOUGH, options.gap)
    enough_s = lower_bound_s * (1 + gap)
    if best.equal is not None:
        LocalSearch(simulator, options, best, EQUAL * options.effort, equal=True).climb(best.equal, enough_s)
    if options.equal_widths:
        return
    # Where simulations take long, enough for a number of them.
    work = min(MOST_CLIMB, max(CLIMB, SIMULATIONS * simulated_us(best.fastest.candidate)))
    more = WHEN_EXACT if options.exact else 1
    climb = LocalSearch(simulator, options, best, more * work * options.effort)
    done: dict[int, set[tuple[int, bool]]] = {FEW_TRIES: set(), TRIES: set()}
    # From the best plans first, then from all others that are not far behind.
    for tries, most in ((FEW_TRIES, SEEDS), (TRIES, SEEDS), (FEW_TRIES, MOST_SEEDS), (TRIES, MOST_SEEDS)):
        while climb.work_left > 0 and best.step_s > enough_s:
            seed = _seed(best, done[tries], most)
            if seed is None:
                break
            done[tries].add(seed)
            climb.climb(best.by_ways[seed], enough_s, tries)
    for each in nsmallest(SEEDS, best.by_ways.values(), key=lambda each: each.step_s):
        if each.step_s < NEAR * best.step_s:
            climb.deepen(each)
