"""Trials: plans of schedules that no table bounds, asked for by name or as an improvement on what was found.

Of schedules whose ranks run several stages, or whose backwards are in halves, shapes are priced by their own lower
bounds and simulated in the order of these; then cuts, devices and micro-batch counts are moved as long as that helps.
A count of simulated actions ends it, so that the same question has the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, combinations, product
from math import comb
from operator import itemgetter

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.prediction import Bounds
from autopar.options.plan import PlanOptions
from autopar.ownership import SINGLE, Replicas
from autopar.planner.bounds import least_s, stages_work_s, work_s
from autopar.planner.candidate import (
    Candidate,
    Family,
    Shape,
    chunk_counts,
    counts_beside,
    has_chunks,
    plain,
    splits_backward,
    with_depths,
)
from autopar.planner.constraints import (
    Constraints,
    Question,
    Rule,
    order_of,
    refusal_of_all,
    runnable,
    shape_of,
    too_wide,
)
from autopar.planner.costs.layers import Sets
from autopar.planner.costs.model import CostModel
from autopar.planner.dictated import FixedStages
from autopar.planner.infeasible import Fits, explain, needed_bytes, nothing_fits, remedies
from autopar.planner.search import moves
from autopar.planner.search.best_first import (
    MOST_CLOSELY_BOUNDED,
    bounds_of_families,
    least_bound_s,
    least_of_families_s,
)
from autopar.planner.search.depths import span_of
from autopar.planner.search.judge import Best, GivenStages, Reference, SimulatedPlan, try_stages
from autopar.planner.search.memory_bound import memory_bound_s
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules import SCHEDULES

Start = tuple[Family, Shape]
MOST_PARTS = 16
"""A rank recomputes a whole number of so many parts of what it may."""

FEW_GROUPS, MOST_GROUPS = 8, 64
"""Every number of groups up to the first is tried, and none above the second."""
MOST_EDGES = 1024
FEW_CUTS = 12
"""Where there are no more ways to cut the layers, all of them are tried."""
KEPT = 4
"""Moves go on from so many of the fastest plans."""


class Trials:
    """The search of one schedule's plans."""

    def __init__(
        self,
        simulator: Simulator,
        schedule: str,
        options: PlanOptions,
        first: Sequence[int] = (),
        teams: Sequence[Replicas] | None = None,
    ) -> None:
        """Prepare; groups take the devices ``first`` before others, and are run as some ``teams``, if not as any.

        Raises:
            UsageError: the profile lacks what the schedule needs.
        """
        self.simulator, self.costs, self.schedule, self.options = simulator, simulator.costs, schedule, options
        if not _runs(self.costs, schedule):
            raise UsageError(
                f"`schedule={schedule!r}` has backwards in two halves, which the profile does not hold for every "
                "layer; measure them with `autopar profile`, or choose gpipe, 1f1b or interleaved"
            )
        self.order = tuple(dict.fromkeys((*first, *range(len(self.costs.devices)))))
        self.best = Best()
        self.actions_left = 0
        """Actions that may yet be simulated."""
        self.count = 0
        self.chunks = (options.chunks,) if options.chunks is not None else chunk_counts(schedule)
        """How many stages a rank may run."""
        halved = splits_backward(schedule)
        every = self.costs.teams if teams is None else teams
        self.teams = tuple(each for each in every if not halved or self._has_halves(each))
        """A replica of every sort that is looked at."""
        self._rules = cache(self._new_rules)
        self._tried_starts: set[Start] = set()

    def _new_rules(self, chunks: int) -> Constraints:
        found = Constraints.of(self.costs, self.options, chunks)
        return found if self.options.stages is None else found.dictated()

    def run(self, starts: Iterable[Start], actions: int, below_s: float = float("inf")) -> Best:
        """Return the best plans that the starts and moves from them lead to.

        Only what may be quicker than ``below_s`` is simulated, until about so many ``actions`` were.
        """
        self.actions_left = actions
        untried = (start for start in dict.fromkeys(starts) if start not in self._tried_starts)
        priced = [(self._bound_s(*start), start) for start in untried]
        known: list[tuple[float, Start]] = []
        for bound_s, start in sorted(priced, key=itemgetter(0)):
            if bound_s >= min(below_s, self.best.step_s) or self._over:
                break
            step_s = self._judge(*start)
            if step_s is not None:
                known.append((step_s, start))
        known.sort(key=itemgetter(0))
        # The quickest of every number of groups and of stages: moves change neither.
        kept: dict[tuple[int, int], tuple[float, Start]] = {}
        for each in known:
            kept.setdefault((len(each[1][1].replicas), len(each[1][1].cuts)), each)
        for step_s, start in dict.fromkeys((*kept.values(), *known[:KEPT])):
            self._climb(step_s, start, below_s)
        return self.best

    def run_all(self, starts: Iterable[Start]) -> Best:
        """Return the best plans of some shapes, all of them simulated."""
        for start in starts:
            if self._serves(start[0], start[1].widths) and self._runs(start[1]) and self.broken(*start) is None:
                self._judge(*start)
        return self.best

    def starts_of_shape(self, family: Family, shape: Shape) -> Iterator[Start]:
        """Yield a shape, or, of several stages a rank, a balanced one of its groups, with as few stages as may be."""
        chunks = self.chunks[0]
        edges = self._rules(chunks).edges(MOST_EDGES)
        if chunks == 1:
            yield family, shape
        elif len(shape.replicas) * chunks < len(edges) and self._serves(family, shape.widths):
            yield family, moves.balanced_shape(self.costs, family, shape.replicas, chunks, edges)

    def starts(self, families: Sequence[Family], seeds: Sequence[Candidate], counts: Iterable[int]) -> Iterator[Start]:
        """Yield balanced shapes of these numbers of groups, and, of one stage a rank, the shapes of candidates."""
        for count in counts:
            yield from self._balanced_starts(families, count)
        for seed, family in product(seeds if self.chunks == (1,) else (), families):
            if self._serves(family, seed.widths):
                yield family, Shape(seed.cuts, Shape.of(seed).sharded("none"))

    def _balanced_starts(self, families: Sequence[Family], count: int) -> Iterator[Start]:
        for team, chunks in product(self.teams, self.chunks):
            devices = len(self.order) // team.team
            edges, stages = self._rules(chunks).edges(MOST_EDGES), count * chunks
            some = count <= min(MOST_GROUPS, devices) and stages < len(edges)
            for family in families if some else ():
                most = devices if self.costs.divisible else family.micro_batch_size
                for widths in moves.widths_of(devices, count, most, all_used=self.options.use_all):
                    replicas = tuple(map(team.so_many, widths))
                    if comb(len(edges) - 2, stages - 1) <= FEW_CUTS:
                        for cuts in combinations(edges[1:-1], stages - 1):
                            yield family, Shape((*cuts, edges[-1]), replicas)
                    else:
                        yield family, moves.balanced_shape(self.costs, family, replicas, chunks, edges)

    def candidates(self, family: Family, shape: Shape) -> Iterator[Candidate]:
        """Yield what a shape may be run as: with every depth that the schedule names, recomputing what does not fit."""
        for depths in self._warmups(family, shape):
            for shard in self.options.shards:
                stages = moves.place_shape(self.costs, family, shape, self.order, shard)
                found = self._fitting(with_depths(family, stages, depths))
                yield found
                if max(self.costs.shortfalls(found)) <= 0:
                    break

    def _warmups(self, family: Family, shape: Shape) -> Iterable[Sequence[int]]:
        return SCHEDULES[self.schedule].warmups(len(shape.replicas), shape.chunks, family.micro_batches).values()

    def bound_s(self, costs: CostModel, family: Family, shape: Shape) -> float:
        """Return a lower bound of what a shape may be run as, under a cost model.

        As deep as the schedule lets it be and with nothing recomputed: no other candidate has a smaller bound.
        """
        if not self._serves(family, shape.widths):
            return float("inf")
        deepest = [max(each) for each in zip(*self._warmups(family, shape), strict=True)]
        shard = "none" if self.options.shard == "auto" else self.options.shard
        stages = moves.place_shape(self.costs, family, shape, self.order, shard)
        return least_s(costs, with_depths(family, stages, deepest))

    def shape_work_s(self, shape: Shape) -> Callable[[CostModel, Family], float]:
        """Return what bounds a shape, which teams may run, in any family by its work alone."""

        def work(costs: CostModel, family: Family) -> float:
            if not self._serves(family, shape.widths):
                return float("inf")
            return stages_work_s(costs, Candidate(*family, moves.place_shape(costs, family, shape, self.order)))

        return work

    def broken(self, family: Family, shape: Shape) -> Rule | None:
        """Return the first of the user's rules that a shape does not obey."""
        stages = moves.place_shape(self.costs, family, shape, self.order)
        return self._rules(shape.chunks).broken(stages, self.costs.kind_of)

    def _runs(self, shape: Shape) -> bool:
        """Whether the profile has of a shape's teams what the schedule needs; of dictated ones that is found later."""
        dictated, teams = self.options.stages is not None, {SINGLE.run_by(each) for each in shape.replicas}
        return dictated or not splits_backward(self.schedule) or all(map(self._has_halves, teams))

    def _has_halves(self, team: Replicas) -> bool:
        forms = (self.costs.form(kind, team) for kind in set(self.costs.kind_of))
        return all(self.costs.layers[form].has_halves for form in forms)

    @property
    def _over(self) -> bool:
        """Whether as much was simulated as may be."""
        return self.actions_left <= 0 or self.count >= self.options.candidate_limit

    def _serves(self, family: Family, widths: Sequence[int]) -> bool:
        """Whether every replica has a sample of a micro-batch."""
        return self.costs.divisible or max(widths) <= family.micro_batch_size

    def _bound_s(self, family: Family, shape: Shape) -> float:
        idle = len(self.order) - sum(shape.devices)
        if (
            not self._runs(shape)
            or not moves.stands(self.costs, shape, self.order)
            or self.broken(family, shape) is not None
            or (idle and self.options.use_all)
        ):
            return float("inf")
        return self.bound_s(self.costs, family, shape)

    def _judge(self, family: Family, shape: Shape) -> float | None:
        """Simulate a shape's candidates; return the least seconds per step of those that fit."""
        self._tried_starts.add((family, shape))
        found = []
        for candidate in self.candidates(family, shape):
            step_s = self.best.judge(self.simulator, candidate)
            if step_s is not None:
                found.append(step_s)
                self.count += 1
                self.actions_left -= 4 * family.micro_batches * len(shape.cuts) * max(shape.widths)
        return min(found, default=None)

    def _climb(self, step_s: float, start: Start, below_s: float) -> None:
        """Move from a shape to the best of those beside it, as long as that is quicker."""
        better: Start | None = start
        while better is not None and not self._over:
            start, better = better, None
            near = [(self._bound_s(*each), each) for each in self._beside(*start) if each not in self._tried_starts]
            for bound_s, each in sorted(near, key=itemgetter(0)):
                if bound_s >= min(below_s, step_s) or self._over:
                    break
                found = self._judge(*each)
                if found is not None and found < step_s:
                    step_s, better = found, each

    def _beside(self, family: Family, shape: Shape) -> Iterator[Start]:
        edges = self._rules(shape.chunks).edges(MOST_EDGES)
        idle, groups = len(self.order) - sum(shape.devices), range(len(shape.replicas))
        for cuts in moves.cuts_moved(shape.cuts, sorted({*edges, *shape.cuts}), range(len(shape.cuts) - 1)):
            yield family, shape._replace(cuts=cuts)
        every = moves.devices_moved(shape.devices, idle, groups, all_used=self.options.use_all)
        moved: Iterable[Shape | None] = map(shape.with_devices, every)
        if len(self.teams) > 1:
            moved = chain(moved, moves.teams_changed(shape, self.teams, groups))
        for each in moved:
            if each is not None and self._serves(family, each.widths):
                yield family, each
        if self.options.micro_batches is None:
            batch = self.costs.batch
            for count in counts_beside(batch, family.micro_batches):
                other_family = Family(count, batch // count, self.schedule)
                if self._serves(other_family, shape.widths):
                    yield other_family, shape

    def _fitting(self, frame: Candidate) -> Candidate:
        """Return the candidate of some stages and depths that recomputes least and fits, or that comes closest.

        More is recomputed on all stages of a rank, until it fits; what a rank holds depends on its own stages only.
        """
        spans = [span_of(self.costs, frame.family, self.options, stage) for stage in frame.stages]
        sets = [span.within(stage.first, stage.stop) for span, stage in zip(spans, frame.stages, strict=True)]
        low, high = [0] * len(sets), [0] * len(sets)
        if any(len(each) > 1 for each in sets):
            high = [MOST_PARTS if short > 0 else 0 for short in self.costs.shortfalls(frame)]
        while any(each + 1 < most for each, most in zip(low, high, strict=True)):
            middle = [(each + most) // 2 for each, most in zip(low, high, strict=True)]
            for at, short in enumerate(self.costs.shortfalls(_recomputing(frame, sets, middle))):
                (high if short <= 0 else low)[at] = middle[at]
        return _recomputing(frame, sets, high)


def _recomputing(frame: Candidate, sets: Sequence[Sets], parts: Sequence[int]) -> Candidate:
    """Return a candidate whose stages recompute so many sixteenths of the layers that they may."""
    stages = [
        stage._replace(recompute=own[-(-part * (len(own) - 1) // MOST_PARTS)])
        for stage, own, part in zip(frame.stages, sets, parts, strict=True)
    ]
    return frame._replace(stages=tuple(stages))


ACTIONS, ACTIONS_WHEN_EXACT = 2_000_000, 20_000_000
"""Simulated of a schedule that is asked for."""
ACTIONS_BESIDE = 40_000
"""Simulated of each schedule that is tried beside what was found."""
MOST_ACTIONS = 100_000
"""Of a step of the best plan, up to which other schedules are tried beside it."""
MOST_SEEDS, SEEDS_BESIDE = 8, 4
COUNTS_BESIDE, FEWER_COUNTS = 1, 3
"""Micro-batch counts that are tried beside what was found, on either side; and of several stages a rank, which need
fewer of them, below."""


def usual(options: PlanOptions) -> PlanOptions:
    """Return the options of the search that trials begin with."""
    least = min(options.min_stages, options.gpus or options.min_stages)
    return replace(options, schedule="1f1b", chunks=None, min_stages=least)


def tried_best(simulator: Simulator, options: PlanOptions, initial_best: Best, fits: Fits | None = None) -> Best:
    """Return the best plan of the schedule that the options name; ``initial_best`` are the best ones of `1f1b`.

    With ``fits``, which says whether one fits with other options, the error names such options.

    Raises:
        UsageError: the profile lacks what the schedule needs.
        InfeasibleError: none fits the memory.
    """
    costs = simulator.costs
    first = () if initial_best.fastest is None else initial_best.fastest.candidate.devices
    trials = Trials(simulator, options.schedule, options, first)
    seeds, devices = _seeds(initial_best, MOST_SEEDS), len(costs.devices)
    counts = {*range(1, min(FEW_GROUPS, devices) + 1), *(devices // each for each in range(1, devices + 1))}
    counts.update(len(seed.stages) for seed in seeds)
    starts = trials.starts(runnable(costs, options), seeds, sorted(counts))
    best = trials.run(starts, ACTIONS if options.gap > 0 else ACTIONS_WHEN_EXACT)
    if best.fastest is None:
        raise _infeasible(costs, options, best, fits)
    return best


def dictated_best(
    simulator: Simulator, options: PlanOptions, fixed_stages: FixedStages, fits: Fits | None = None
) -> Best:
    """Return the best plan of the dictated stages under the schedule that the options name; ``fits`` as above.

    Raises:
        UsageError: the profile lacks what the schedule needs, or the stages do not suit it.
        InfeasibleError: none fits the memory.
    """
    costs, shape = simulator.costs, shape_of(fixed_stages, options)
    trials = Trials(simulator, options.schedule, options, order_of(costs, fixed_stages, options))
    every = [(family, shape) for family in runnable(costs, options)]
    refusal = refusal_of_all([trials.broken(*start) for start in every])
    if refusal is not None:
        raise UsageError(refusal)
    best = trials.run_all(every)
    if best.fastest is None and best.closest is None:
        raise too_wide(fixed_stages, costs.batch, options)
    if best.fastest is None:
        raise _infeasible(costs, options, best, fits)
    return best


def bounds_of(costs: CostModel, options: PlanOptions, step_s: float, *, quickly: bool = False) -> Bounds:
    """Return what bounds all plans of the schedule that the options name, on any stages; ``quickly``: by work alone.

    Layers of a rank's stages are not contiguous; of such schedules only their work is a bound.
    """
    every = runnable(costs, options)
    if not quickly and not has_chunks(options.schedule):
        return bounds_of_families(costs, every, least_bound_s(costs, options), step_s)
    return bounds_of_families(costs, every, lambda model, family, below_s: work_s(model, family), step_s)


def lower_bound_s(costs: CostModel, options: PlanOptions, bounds: Bounds, own: SimulatedPlan) -> float:
    """Return what no plan of the schedule that the options name falls below, nor the step of the one that was found.

    Of one stage on every device, and of teams, that is known with the limits of memory, too; ``bounds`` are without.
    """
    if len(costs.teams) > 1:
        return memory_bound_s(costs, runnable(costs, options), options, bounds.linked_s, own.step_s)
    if has_chunks(options.schedule):
        return bounds.linked_s
    known = {family: work_s(costs, family) for family in runnable(costs, options)}
    least = least_bound_s(costs, options, MOST_CLOSELY_BOUNDED)
    return max(bounds.linked_s, least_of_families_s(known, least, costs, own.step_s, own.candidate.micro_batches))


def _runs(costs: CostModel, schedule: str) -> bool:
    return costs.has_halves or not splits_backward(schedule)


def tried_beside(costs: CostModel) -> list[str]:
    """Return the schedules that are tried beside `1f1b`: with backwards in halves only where the profile has them."""
    return [each for each in SCHEDULES if not plain(each) and _runs(costs, each)]


def actions_of(candidate: Candidate) -> int:
    """Return how many forwards and backwards a step has."""
    every = (stage.replicas for stage in candidate.stages)
    return sum(2 * each.most(candidate.micro_batches) * each.width for each in every)


def improve(simulator: Simulator, options: PlanOptions, best: Best) -> None:
    """Try other schedules on the shapes of the best plans, or, of several stages a rank, on as many balanced groups.

    And, of several stages a rank, on groups that divide the devices, with fewer micro-batches.
    """
    assert best.fastest is not None
    costs, own = simulator.costs, best.fastest.candidate
    seeds = [seed for seed in _seeds(best, 1 + SEEDS_BESIDE) if len(seed.stages) > 1][:SEEDS_BESIDE]
    devices = len(costs.devices)
    even = (count for count in range(2, devices + 1) if devices % count == 0)
    counts = dict.fromkeys(len(seed.stages) for seed in seeds)
    teams = [*dict.fromkeys(SINGLE.run_by(stage.replicas) for seed in (own, *seeds) for stage in seed.stages)]
    more = dict.fromkeys((*counts, *even))
    for schedule in tried_beside(costs):
        asked = replace(options, schedule=schedule)
        every = runnable(costs, asked)
        at = next(index for index, family in enumerate(every) if family.micro_batches == own.micro_batches)
        stop, chunked = at + COUNTS_BESIDE + 1, has_chunks(schedule)
        near, fewer = every[max(0, at - COUNTS_BESIDE) : stop], every[max(0, at - FEWER_COUNTS) : stop]
        trials = Trials(simulator, schedule, asked, own.devices, teams)
        trials.run(trials.starts(near, seeds, counts if chunked else ()), ACTIONS_BESIDE, best.step_s)
        # Where teams run stages, uniform layouts with several stages on every device were all looked at.
        if chunked and len(costs.teams) == 1:
            trials.run(trials.starts(fewer, (), more), ACTIONS_BESIDE, best.step_s)
        for found in (*trials.best.by_stages.values(), *trials.best.alike.values()):
            best.consider(found)


def otherwise(simulator: Simulator, options: PlanOptions, own: Candidate) -> list[Reference]:
    """Return a plan of several stages under every other schedule, with as many micro-batches on the same devices.

    Stages are its own, or, where a rank runs several, two balanced ones on every group of devices.
    """
    if len(own.stages) == 1 or has_chunks(own.schedule):
        return []
    costs, shape, found = simulator.costs, Shape.of(own), []
    for schedule in (each for each in SCHEDULES if each != own.schedule and _runs(costs, each)):
        family = Family(own.micro_batches, own.micro_batch_size, schedule)
        if plain(schedule):
            given = GivenStages(shape.cuts, shape.widths, own.devices, teams=shape.teams)
            best = try_stages(simulator, [family], options, given)
        else:
            trials = Trials(simulator, schedule, options, own.devices)
            best = trials.run_all(trials.starts_of_shape(family, shape))
        if best.fastest is not None or best.closest is not None:
            found.append(Reference.of(schedule, best, costs, ""))
    return found


def are_admitted(question: Question) -> bool:
    """Whether schedules that no table bounds may be chosen beside `1f1b`."""
    options = question.options
    free = options.schedule == "auto" and options.solver == "dp"
    return free and not question.costs.divisible and not options.equal_widths


def meet(question: Question, best: Best) -> bool:
    """Try them beside the best plans, if they may be chosen; return False where these are too long for that."""
    simulator, options = question.simulator, question.options
    if best.fastest is None or not are_admitted(question):
        return True
    if actions_of(best.fastest.candidate) > MOST_ACTIONS:
        return False
    simulator.progress("trying other schedules", 0.9)
    improve(simulator, options, best)
    for each in otherwise(simulator, options, best.fastest.candidate):
        if each.simulated_plan is not None:
            best.consider(each.simulated_plan)
    return True


def _seeds(best: Best, most: int) -> list[Candidate]:
    """Return the quickest plans, one of every number of stages."""
    every = sorted(best.by_stages.items(), key=lambda each: (each[1].step_s, each[0]))
    return [found.candidate for _, found in every[:most]]


def _infeasible(costs: CostModel, options: PlanOptions, best: Best, fits: Fits | None) -> InfeasibleError:
    asked = f"{options.schedule} for {costs.layer_count} layers on {len(costs.devices)} devices"
    text, needed = f"no plan of {asked} obeys all options", None
    if best.closest is not None:
        short, candidate = best.closest
        needed = needed_bytes(costs, options, short)
        text = (
            f"nothing fits the memory: {explain(costs, candidate)} in the plan of {options.schedule} that comes "
            f"closest ({costs.text(candidate)} with {candidate.micro_batches_text()})"
        )
    return InfeasibleError(text) if fits is None else nothing_fits(text, remedies(costs, options, fits, needed))
