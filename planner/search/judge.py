"""Judge: candidates judged by memory and simulation, the best of them by several traits, and those listed beside it.

What bounds a search is a sum of about how long its parts take, in microseconds of a core, counted and not timed: so the
same question has the same answer on every machine.

Listed beside the chosen plan are those that anyone would try first, given stages in every way to run them, those met in
the search, or made of the chosen one, that differ from it in a single respect, and the simplest of those about as fast.

Why: docs/design/decisions.md, "Search: A count ends the search".
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice, pairwise, product
from math import prod
from operator import itemgetter
from typing import NamedTuple, TypeVar

from autopar.formats.prediction import Alternative, MetPlan
from autopar.options.plan import PLANNED, PlanOptions, division_refusal
from autopar.ownership import DIVISIONS, SHARDS, Division, Replicas, Shard, even_shares
from autopar.planner.bounds import candidate_bound_s, least_s
from autopar.planner.candidate import (
    Candidate,
    CandidateStage,
    Family,
    counts_beside,
    equal_widths,
    groups,
    place,
    plain,
    replicas_of,
    with_depth,
    with_depths,
    within,
)
from autopar.planner.constraints import crossed_limit
from autopar.planner.costs.model import CostModel
from autopar.planner.infeasible import explain
from autopar.planner.search.depths import ROUNDING, depth_choices, span_of
from autopar.planner.shares import by_speed
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules import SCHEDULES

NEAR, MOST_NEAR = 0.01, 10_000
"""A plan is about as fast as the best one if its step is longer by this share at most; so many such plans are kept."""
MOST_MET = 256
"""Who asks for the plans that were met is given so many of those about as fast as the best one."""
Key = TypeVar("Key")
Trait = tuple[str, int]
EQUAL_WIDTHS: Trait = ("equal widths", 1)
TEAM = "largest team"
"""The trait of candidates by the most devices that run a replica."""
Met = Callable[[tuple[MetPlan, ...]], None]
"""Called with the plans that a search met and kept, when it is over; nothing depends on what is told."""


class SimulatedPlan(NamedTuple):
    """A simulated candidate."""

    step_s: float
    candidate: Candidate


class Best:
    """The best candidates simulated so far, at large and by traits, for alternatives; the first of equals stays."""

    def __init__(self, cap_s: float = float("inf")) -> None:
        """Begin with no candidate; only those quicker than ``cap_s`` are of interest."""
        self._cap_s = cap_s
        self.fastest: SimulatedPlan | None = None
        self.by_stages: dict[int, SimulatedPlan] = {}
        self.by_ways: dict[tuple[int, bool], SimulatedPlan] = {}
        """By the number of stages, and whether replicas take turns."""
        self.alike: dict[tuple[str, int, int], SimulatedPlan] = {}
        """By schedule, micro-batches and the number of stages."""
        self.by_trait: dict[Trait, SimulatedPlan] = {}
        self.near: dict[Candidate, float] = {}
        """Candidates about as fast as the best one was, and their seconds, or lower bounds of these."""
        self.closest: tuple[int, Candidate] | None = None
        """The least shortfall of memory among candidates that do not fit."""

    @property
    def step_s(self) -> float:
        """Seconds of the best candidate, or of the cap while there is none."""
        return self.fastest.step_s if self.fastest else self._cap_s

    def judge(self, simulator: Simulator, candidate: Candidate) -> float | None:
        """Simulate a candidate; return its seconds per step, or None where it does not fit, or breaks a share limit.

        Of one that is not the best of its number of stages, the seconds may be a lower bound.
        """
        if crossed_limit(simulator.costs, candidate.stages) is not None:
            return None
        short = max(simulator.costs.shortfalls(candidate))
        if short > 0:
            self.miss((short, candidate))
            return None
        rival = self.by_stages.get(len(candidate.stages))
        found = SimulatedPlan(simulator.step_s(candidate, math.inf if rival is None else rival.step_s), candidate)
        self.consider(found)
        return found.step_s

    def judge_each(
        self,
        simulator: Simulator,
        candidates: Iterable[Candidate],
        below_s: float | None = None,
        bound_s: Callable[[CostModel, Candidate], float] = candidate_bound_s,
    ) -> Iterator[SimulatedPlan | None]:
        """Simulate candidates in the order of their lower bounds; yield them, or None where :meth:`judge` does.

        Those only that may take less than the ones before, and than ``below_s``, or, without, the best one so far.
        """
        below_s = self.step_s if below_s is None else below_s
        bounded = [(bound_s(simulator.costs, each), each) for each in candidates]
        for bounded_s, candidate in sorted(bounded, key=itemgetter(0)):
            if bounded_s >= below_s:
                return
            step_s = self.judge(simulator, candidate)
            below_s = below_s if step_s is None else min(below_s, step_s)
            yield None if step_s is None else SimulatedPlan(step_s, candidate)

    def miss(self, closest: tuple[int, Candidate] | None) -> None:
        """Note a candidate that does not fit, and how many bytes it lacks, if there is one."""
        if closest is not None and (self.closest is None or closest[0] < self.closest[0]):
            self.closest = closest

    def consider(self, simulated_plan: SimulatedPlan) -> None:
        """Keep a simulated candidate if it is the best in any respect, or about as fast as the best one."""
        stages = simulated_plan.candidate.stages
        _keep(self.by_stages, len(stages), simulated_plan)
        own = simulated_plan.candidate
        _keep(self.alike, (own.schedule, own.micro_batches, len(stages)), simulated_plan)
        _keep(self.by_ways, (len(stages), any(stage.period > 1 for stage in stages)), simulated_plan)
        for trait in traits_of(simulated_plan.candidate):
            _keep(self.by_trait, trait, simulated_plan)
        if simulated_plan.step_s < self.step_s:
            self.fastest = simulated_plan
        if simulated_plan.step_s <= self.step_s * (1 + NEAR):
            self.near.setdefault(simulated_plan.candidate, simulated_plan.step_s)
            if len(self.near) > MOST_NEAR:
                self.near = {each: step_s for each, step_s in self.near.items() if step_s <= self.step_s * (1 + NEAR)}

    @property
    def equal(self) -> SimulatedPlan | None:
        """The best candidate whose stages have as many replicas each, which run and shard alike."""
        return self.by_trait.get(EQUAL_WIDTHS)


def _keep(best: dict[Key, SimulatedPlan], key: Key, simulated_plan: SimulatedPlan) -> None:
    """Keep a candidate if it is the first of its kind, or faster than the one that was."""
    if key not in best or simulated_plan.step_s < best[key].step_s:
        best[key] = simulated_plan


def traits_of(candidate: Candidate) -> list[Trait]:
    """Return what tells a candidate from others, beside the number of its stages."""
    stages = candidate.stages
    found: list[Trait] = [
        ("micro_batches", candidate.micro_batches),
        ("devices", len(set(candidate.devices))),
        ("recompute", any(stage.recompute for stage in stages)),
        ("shard", max(SHARDS.index(stage.shard) for stage in stages)),
        (TEAM, max(stage.team for stage in stages)),
    ]
    return [*found, EQUAL_WIDTHS, (f"equal widths, {candidate.schedule}", 1)] if equal_widths(stages) else found


ENOUGH = 0.05
"""The search ends at this gap to the lower bound, unless more effort is asked for."""
EXACT_GAP = 1e-3
"""The gap at which it ends where the fastest plan is asked for."""
START, PACES, BEST_FIRST, CLIMB, EQUAL = 1_000_000.0, 2_000_000.0, 1_500_000.0, 3_000_000.0, 500_000.0
"""The work of an effort of one: even splits, paces, plans opened best first, local moves, and those of equal widths."""
MOST_CLIMB = 5_000_000.0
"""The most work of local moves, where a plan takes long to simulate."""
WHEN_EXACT = 2
"""Local moves do so many times that work where the fastest plan is asked for."""
SCORED, PRICED, FITTED = 5, 60, 700
"""The work, by stage, of a score, of a candidate's lower bound, and of finding its depths and what it recomputes."""
TABLES = 20_000_000.0
"""The work of an effort of one on tables of families."""
TABLED, TABLED_APART = 0.08, 0.24
"""The work of a table, by stage and state of the pool; the second where some tensors pass stages by."""
MOST_TABLED = 5_000_000.0
"""Where tensors pass stages by, a family whose table takes more work than this is bounded by its work alone."""
SWEPT = 0.004
"""The work of looking for a plan that keeps a pace, by stage and state of the pool."""
SHORTENED = 12
ACTION, LEVEL, PROGRAM = 1.2, 45, 1_000
"""The work of a simulation: by action, or by level of actions that are simulated at once, beside that of a program."""


def least_gap(options: PlanOptions) -> float:
    """Return the gap to the lower bound at which plans are opened no more, and local moves where these go on."""
    return min(EXACT_GAP, options.gap) if options.exact else options.gap


def shortened_us(layers: int) -> float:
    """Return the work of finding how few of a stage's layers are to be recomputed for it to fit."""
    return 4 * PRICED + SHORTENED * layers * layers.bit_length()


def simulated_us(candidate: Candidate) -> float:
    """Return the work of simulating a candidate."""
    count, stages = candidate.micro_batches, len(candidate.stages)
    return PROGRAM + min(ACTION * 2 * count * stages, LEVEL * (count + stages))


MOST_FRAMES = 64


class Reference(NamedTuple):
    """A plan to compare with: one that can be run, or the one that comes closest and why it cannot, or only why."""

    name: str
    candidate: Candidate | None
    step_s: float | None
    """None where it cannot be run."""
    reason: str | None = None

    @classmethod
    def of(cls, name: str, best: Best, costs: CostModel, otherwise: str) -> Reference:
        """Return the fastest of some plans, or why none fits; ``otherwise`` is why there are none."""
        if best.fastest is not None:
            return cls(name, best.fastest.candidate, best.fastest.step_s)
        if best.closest is not None:
            return cls(name, best.closest[1], None, explain(costs, best.closest[1]))
        return cls(name, None, None, otherwise)

    @property
    def simulated_plan(self) -> SimulatedPlan | None:
        """The plan, where there is one that can be run."""
        if self.candidate is None or self.step_s is None:
            return None
        return SimulatedPlan(self.step_s, self.candidate)

    def record(self, costs: CostModel) -> Alternative:
        """Return it as the plan file lists it."""
        if self.simulated_plan is None:
            return Alternative(name=self.name, infeasible=self.reason)
        step_s, candidate = self.simulated_plan
        return Alternative(
            name=self.name,
            step_s=step_s,
            stages=costs.text(candidate),
            micro_batches=candidate.micro_batches,
            schedule=candidate.schedule,
        )


class GivenStages(NamedTuple):
    """Stages of which it is given where they end, and how many replicas each has."""

    cuts: Sequence[int]
    widths: Sequence[int]
    order: Sequence[int] | None = None
    """Devices in the order in which stages take them, that of their numbers if not given."""
    divisions: Sequence[Division] = DIVISIONS
    """Of micro-batches, which are tried."""
    teams: Sequence[Replicas] = ()
    """A replica of each stage, where several devices run it."""

    def frames(self, costs: CostModel, family: Family, options: PlanOptions) -> list[tuple[CandidateStage, ...]]:
        """Return the stages with all in flight and nothing recomputed, in each division and sharding."""
        every_way = [replicas_of(family, width, options.shards, divisible=costs.divisible) for width in self.widths]
        ways = [[how for how in own if how.width == 1 or how.division in self.divisions] for own in every_way]
        every: Iterable[Sequence[Replicas]] = product(*ways)
        if prod(map(len, ways)) > MOST_FRAMES:
            # Too many to mix: the same in all stages that can.
            alike = dict.fromkeys(how[1:] for each in ways for how in each)
            every = [[next((one for one in each if one[1:] == how), each[0]) for each in ways] for how in alike]
        if self.teams:
            every = ([own.run_by(team) for own, team in zip(each, self.teams, strict=True)] for each in every)
        placed = (place(family, self.cuts, each, self.order, divisible=costs.divisible) for each in every)
        return [tuple(by_speed(costs, stage, family) for stage in stages) for stages in placed]


def try_stages(simulator: Simulator, families: Iterable[Family], options: PlanOptions, given: GivenStages) -> Best:
    """Judge given stages in every family."""
    best = Best()
    for family in families:
        for frame in given.frames(simulator.costs, family, options):
            spans = [span_of(simulator.costs, family, options, stage) for stage in frame]
            found = depth_choices(simulator.costs, family, frame, spans, exact=False)
            for candidate in found.candidates:
                best.judge(simulator, candidate)
            best.miss(found.closest)
    return best


def references(simulator: Simulator, families: Sequence[Family], options: PlanOptions) -> list[Reference]:
    """Return pure and sharded data parallelism on all devices, and an equal split into stages of one device."""
    costs = simulator.costs
    layers, devices = costs.layer_count, len(costs.devices)
    stages = min(layers, devices)
    equal = tuple(accumulate(even_shares(layers, stages)))
    otherwise = f"no micro-batch of a batch of {costs.batch} has a sample for each of {devices}"
    if costs.share_limits:
        otherwise = costs.share_limits[0].text
    # Of several kinds, replicas in turn are as fast as the slowest; none is looked for.
    divisions = DIVISIONS[:1] if costs.mixes else DIVISIONS
    named: dict[str, Shard] = {"pure data parallelism": "none"}
    if devices > 1 and division_refusal(costs.profile) is None:
        named["sharded data parallelism"] = "parameters"
    if devices > 1 and costs.single:
        reason = next(iter(costs.single.values())).reason
        found = [Reference(name, None, None, reason) for name in named]
    else:
        whole = GivenStages((layers,), (devices,), divisions=divisions)
        tried = {
            name: try_stages(simulator, families, replace(options, shard=shard), whole) for name, shard in named.items()
        }
        found = [Reference.of(name, best, costs, otherwise) for name, best in tried.items()]
    split = try_stages(simulator, families, options, GivenStages(equal, (1,) * stages))
    return [*found, Reference.of("equal split", split, costs, otherwise)]


MOST_NEIGHBOURS = 5
FEW_DROPPED = 4
"""Groups of devices of which one is taken away, to see what a device is worth."""
SHALLOWER = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares of a plan's depths that are tried where it does not fit with all of them."""


def neighbours(simulator: Simulator, best: Best, candidate: Candidate) -> list[Reference]:
    """Return plans beside the chosen one that change one thing, under its own schedule.

    On the same stages, the next smaller and larger numbers of micro-batches, a device fewer, no recomputation, and less
    that is sharded, as far as plans with such were met; with fewer micro-batches in flight, or recomputing all, where
    it would not fit. Of those met with as many micro-batches, the fastest with fewer and with more stages. At most
    five, the fastest first; and the fastest whose stages are equally wide, if the chosen one's are not. Beside a
    schedule that is found by trying, the fastest of `1f1b`.
    """
    rows: dict[Candidate, Reference] = {}
    for name, found in _named_neighbours(simulator, best, candidate):
        if found is not None and found.candidate != candidate:
            step_s = simulator.step_s(found.candidate) if simulator.sharing else found.step_s
            rows.setdefault(found.candidate, Reference(name, found.candidate, step_s))
    every = sorted(rows.values(), key=lambda each: each.step_s or 0.0)
    equal = [each for each in every[MOST_NEIGHBOURS:] if each.name == "equal widths"]
    return [*every[: MOST_NEIGHBOURS - len(equal)], *equal]


def _named_neighbours(
    simulator: Simulator, best: Best, candidate: Candidate
) -> Iterator[tuple[str, SimulatedPlan | None]]:
    schedule, own = candidate.schedule, len(candidate.stages)
    yield "equal widths", best.by_trait.get((f"equal widths, {schedule}", 1), best.equal)
    other = best.fastest is not None and best.fastest.candidate != candidate
    if other and best.step_s < simulator.step_s(candidate):
        yield "fastest", best.fastest
    if not plain(schedule):
        every = (each for key, each in best.alike.items() if key[0] == "1f1b")
        yield "1f1b", min(every, default=None, key=lambda each: each.step_s)
    counts = sorted(count for *like, count in best.alike if like == [schedule, candidate.micro_batches])
    for count in (*[each for each in counts if each < own][-1:], *[each for each in counts if each > own][:1]):
        found = best.alike[schedule, candidate.micro_batches, count]
        yield f"{count} stage{'s' if count > 1 else ''}", found
    for name, trait, changed in _changes(simulator.costs, candidate):
        if trait in best.by_trait:
            yield name, _fastest_of(simulator, changed, again=trait != ("recompute", 0))
    if any(stage.team > 1 for stage in candidate.stages):
        yield "one device a replica", best.by_trait.get((TEAM, 1))
    used = len(set(candidate.devices))
    if any(kind == "devices" and count < used for kind, count in best.by_trait):
        fewer = _without_replica(simulator.costs, candidate)
        left = max((len(set(each.devices)) for each in fewer), default=used - 1)
        some = [each for each in fewer if len(set(each.devices)) == left]
        yield f"{left} device{'s' if left > 1 else ''}", _fastest_of(simulator, some)


def _changes(costs: CostModel, candidate: Candidate) -> Iterator[tuple[str, Trait, list[Candidate]]]:
    """Yield what may be changed of a candidate on its devices, and what tells plans for which that was changed."""
    devices = [stage.devices for stage in candidate.stages]
    for count in counts_beside(costs.batch, candidate.micro_batches):
        name = f"{count} micro-batch{'es' if count > 1 else ''}"
        yield name, ("micro_batches", count), _with_devices(costs, candidate, devices, count)
    if any(stage.recompute for stage in candidate.stages):
        whole = candidate._replace(stages=tuple(stage._replace(recompute=()) for stage in candidate.stages))
        yield "no recomputation", ("recompute", 0), [whole]
    shards = [SHARDS.index(stage.shard) for stage in candidate.stages]
    for less in range(max(shards)):
        stages = (
            stage._replace(shard=SHARDS[min(less, own)]) for stage, own in zip(candidate.stages, shards, strict=True)
        )
        name = f"shards {SHARDS[less]}" if less else "shards nothing"
        yield name, ("shard", less), [candidate._replace(stages=tuple(stages))]


def _without_replica(costs: CostModel, candidate: Candidate) -> list[Candidate]:
    """Return a candidate with a replica taken from each group that has several; of as many as are worth trying."""
    found, devices = list[Candidate](), [stage.devices for stage in candidate.stages]
    for chunks in groups(candidate.stages):
        first = candidate.stages[chunks[0]]
        if first.replicas.width > 1:
            # Of several kinds, the last replica is among the fastest, and the first among the slowest.
            left = [first.devices[: -first.team], first.devices[first.team :]]
            for each in left[: 1 + costs.is_mixed(first)]:
                fewer = [each if index in chunks else own for index, own in enumerate(devices)]
                found += _with_devices(costs, candidate, fewer, candidate.micro_batches)
    return found


def _with_devices(
    costs: CostModel, candidate: Candidate, devices: Sequence[tuple[int, ...]], count: int
) -> list[Candidate]:
    """Return a candidate on other devices and with ``count`` micro-batches; none where a replica would idle."""
    size = costs.batch // count
    family, stages = Family(count, size, candidate.schedule), []
    for stage, own in zip(candidate.stages, devices, strict=True):
        most = stage.replicas.most(candidate.micro_batches)
        replicas = stage.replicas.so_many(len(own) // stage.team)
        if replicas.width > (size if replicas.division == "split" else count) and not costs.divisible:
            return []
        deepest = replicas.most(count)
        depth = deepest if stage.warmup == most else min(stage.warmup, deepest)
        moved = stage._replace(devices=own, shares=costs.shares(size, replicas), warmup=depth, shard=replicas.shard)
        stages.append(by_speed(costs, moved._replace(division=replicas.division), family))
    if plain(candidate.schedule):
        return [Candidate(*family, tuple(stages))]
    parts = groups(candidate.stages)
    every = SCHEDULES[candidate.schedule].warmups(len(parts), len(parts[0]), count).values()
    return [with_depths(family, stages, depths) for depths in every]


def _fastest_of(simulator: Simulator, candidates: Iterable[Candidate], *, again: bool = True) -> SimulatedPlan | None:
    """Return the fastest of some candidates, as they fit; see :func:`_fitting`."""
    fitting = (_fitting(simulator.costs, each, again=again) for each in candidates)
    own = Best()
    judged = own.judge_each(simulator, [each for each in fitting if each is not None], bound_s=least_s)
    for _ in islice(judged, FEW_DROPPED):
        pass
    return own.fastest


def _fitting(costs: CostModel, candidate: Candidate, *, again: bool) -> Candidate | None:
    """Return a candidate as it fits, with less in flight where its schedule allows, or recomputing all; else None."""
    stages = candidate.stages
    level = costs.recompute_levels(candidate.micro_batch_size, costs.form_of(stages[0]))[-1]
    every = tuple(stage._replace(recompute=within(level, stage.first, stage.stop)) for stage in stages)
    shares = SHALLOWER if candidate.schedule == "1f1b" else SHALLOWER[:1]
    for own, share in product((stages, every) if again else (stages,), shares):
        depths = [max(1, int(share * stage.warmup)) for stage in own]
        found = with_depths(candidate.family, own, depths)
        # One with fewer in flight than the stage behind would wait for ever.
        waits = plain(found.schedule) and any(
            min(behind.in_flight, found.micro_batches) > stage.in_flight for stage, behind in pairwise(found.stages)
        )
        if not waits and max(costs.shortfalls(found)) <= 0:
            return found
    return None


def simplicity(costs: CostModel, candidate: Candidate) -> tuple[int, ...]:
    """Return how simple a candidate is, what counts most first; less is simpler.

    Counted are stages on several kinds of devices; those that are neither within one node nor on whole nodes; whether
    replicas run on single devices, on teams of one size, of falling sizes, or of others; different numbers of replicas,
    stages whose replicas take unequal shares, and those whose replicas take turns; what is sharded: none, optimizer,
    gradients, parameters; whether the schedule is other than `1f1b`; and stages, and layers that are run forward again.
    """
    stages = candidate.stages
    return (
        sum(map(costs.is_mixed, stages)),
        len(straddling(costs, stages)),
        _team_order([stage.team for stage in stages]),
        len({stage.replicas.width for stage in stages}),
        sum(len(set(stage.shares)) > 1 for stage in stages),
        sum(stage.period > 1 for stage in stages),
        max(SHARDS.index(stage.shard) for stage in stages),
        candidate.schedule not in PLANNED,
        len(stages),
        sum(len(stage.recompute) for stage in stages),
    )


def _team_order(teams: Sequence[int]) -> int:
    """Return 0 for single devices, 1 for teams of one size, 2 for falling sizes, 3 for others.

    >>> [_team_order(each) for each in ((1, 1), (2, 2), (4, 1), (1, 4))]
    [0, 1, 2, 3]
    """
    if len(set(teams)) == 1:
        return min(1, teams[0] - 1)
    return 2 if all(one >= other for one, other in pairwise(teams)) else 3


def met_plans(costs: CostModel, *bests: Best) -> tuple[MetPlan, ...]:
    """Return what is known of the plans that were met and kept, the fastest first."""
    found: dict[Candidate, float] = {}
    for best in bests:
        kept = (*best.by_stages.values(), *best.by_ways.values(), *best.by_trait.values())
        near = sorted(best.near.items(), key=itemgetter(1))[:MOST_MET]
        found |= dict(near) | {each.candidate: each.step_s for each in kept}
    every = (MetPlan(step_s, simplicity(costs, each), each.micro_batches) for each, step_s in found.items())
    return tuple(sorted(set(every)))


def tell(met: Met | None, costs: CostModel, *bests: Best) -> None:
    """Tell who asks which plans were met and kept."""
    if met is not None:
        met(met_plans(costs, *bests))


def straddling(costs: CostModel, stages: Sequence[CandidateStage]) -> list[int]:
    """Return the stages that take some devices of several nodes, and not all of each."""
    nodes = costs.links.topology.nodes
    used = [{nodes[device] for device in stage.devices} for stage in stages]
    return [
        index
        for index, (stage, own) in enumerate(zip(stages, used, strict=True))
        if len(own) > 1 and len(stage.devices) < sum(map(nodes.count, own))
    ]


def simplest(simulator: Simulator, best: Best) -> SimulatedPlan:
    """Return the simplest of all candidates that were met within 1 % of the best one; of equals the fastest."""
    assert best.fastest is not None
    most_s = best.step_s * (1 + NEAR)
    near = [(candidate, step_s) for candidate, step_s in best.near.items() if step_s <= most_s]
    for candidate, known_s in sorted(near, key=lambda each: (simplicity(simulator.costs, each[0]), each[1])):
        # What was not the best of its number of stages may have been simulated without contention.
        step_s = simulator.step_s(candidate) if simulator.sharing else known_s
        if step_s <= most_s:
            return SimulatedPlan(step_s, candidate)
    return best.fastest


def shallowest(simulator: Simulator, simulated_plan: SimulatedPlan) -> SimulatedPlan:
    """Return the plan with as few micro-batches in flight as leave it no slower.

    The depths that the search tries follow from paces, and may be more than the plan needs: memory that serves nobody.
    From the last stage to the first, each gets the least depth that the one behind allows and that costs no time.
    """
    step_s, candidate = simulated_plan
    if candidate.schedule != "1f1b":
        return simulated_plan
    most_s = step_s * (1 + ROUNDING)

    def is_as_fast(index: int, depth: int) -> bool:
        other = with_depth(candidate, index, depth)
        return max(simulator.costs.shortfalls(other)) <= 0 and simulator.step_s(other, most_s) <= most_s

    for index in reversed(range(len(candidate.stages))):
        stage, behind = candidate.stages[index], candidate.stages[index + 1 : index + 2]
        # One with fewer in flight than the stage behind would wait for ever.
        least = -(-max([min(each.in_flight, candidate.micro_batches) for each in behind], default=1) // stage.period)
        if least < stage.warmup and is_as_fast(index, stage.warmup - 1):
            depth = bisect_left(range(stage.warmup - 1), True, lo=least, key=partial(is_as_fast, index))
            candidate = with_depth(candidate, index, depth)
    if candidate is simulated_plan.candidate:
        return simulated_plan
    return SimulatedPlan(simulator.step_s(candidate), candidate)
