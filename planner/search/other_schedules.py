"""Trials: plans of schedules that no table bounds, asked for by name or as an improvement on what was found.

Of schedules whose ranks run several stages, or whose backwards are in halves, shapes are priced by their own lower
bounds and simulated in the order of these; then cuts, devices and micro-batch counts are moved as long as that helps.
A count of simulated actions ends it, so that the same question has the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import comb

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.plan import Bounds, group_of, layout_of
from autopar.planner.alternatives import Reference, try_stages
from autopar.planner.bounds.chain import work_s
from autopar.planner.bounds.ranks import least_s
from autopar.planner.candidate import (
    Candidate,
    CandidateStage,
    Family,
    chunk_counts,
    counts_beside,
    groups,
    has_chunks,
    plain,
    splits_backward,
    with_depths,
)
from autopar.planner.constraints import Constraints, FixedStages, Rule, refusal_of_all, runnable, too_wide
from autopar.planner.costs.layers import Span
from autopar.planner.costs.model import CostModel
from autopar.planner.infeasible import Fits, advice, explain, schedule_remedies
from autopar.planner.options import PlanOptions
from autopar.planner.search.best_first import (
    MOST_CLOSELY_BOUNDED,
    bounds_of_families,
    least_bound_s,
    least_of_families_s,
)
from autopar.planner.search.judge import Best, SimulatedPlan
from autopar.planner.search.moves import Shape, balanced_shape, cuts_moved, devices_moved, place_shape, widths_of
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules import SCHEDULES

Start = tuple[Family, Shape]
MOST_PARTS = 16
"""In which a rank's recomputation is tried."""

FEW_GROUPS, MOST_GROUPS = 8, 64
"""Groups of which every number is tried, and most."""
MOST_EDGES = 1024
FEW_CUTS = 12
"""Ways to cut the layers up to which all are tried."""
KEPT = 4
"""Plans from which moves are tried."""


class Trials:
    """The search of one schedule's plans."""

    def __init__(self, simulator: Simulator, schedule: str, options: PlanOptions, order: Sequence[int]) -> None:
        """Prepare; groups take devices in the given ``order``."""
        self.simulator, self.costs, self.schedule = simulator, simulator.costs, schedule
        self.options, self.order = options, order
        self.best = Best()
        self.actions_left = 0
        """Actions that may yet be simulated."""
        self.count = 0
        self._constraints: dict[int, Constraints] = {}
        self._tried_starts: set[Start] = set()

    def run(self, starts: Iterable[Start], actions: int, below_s: float = float("inf")) -> Best:
        """Return the best plans that the starts and moves from them lead to.

        Only what may be quicker than ``below_s`` is simulated, until about so many ``actions`` were.
        """
        self.actions_left = actions
        priced = sorted(((self._bound_s(*start), start) for start in dict.fromkeys(starts)), key=lambda each: each[0])
        known: list[tuple[float, Start]] = []
        for bound_s, start in priced:
            if bound_s >= min(below_s, self.best.step_s) or self._over:
                break
            step_s = self._judge(*start)
            if step_s is not None:
                known.append((step_s, start))
        known.sort(key=lambda each: each[0])
        # The quickest of every number of groups and of stages: moves change neither.
        kept: dict[tuple[int, int], tuple[float, Start]] = {}
        for step_s, start in known:
            kept.setdefault((len(start[1].widths), len(start[1].cuts)), (step_s, start))
        for step_s, start in dict.fromkeys((*kept.values(), *known[:KEPT])):
            self._climb(step_s, start, below_s)
        return self.best

    def run_all(self, starts: Iterable[Start]) -> Best:
        """Return the best plans of some shapes, all of them simulated."""
        for start in starts:
            if self._serves(start[0], start[1].widths) and self.broken(*start) is None:
                self._judge(*start)
        return self.best

    def starts_of_shape(self, family: Family, shape: Shape, chunks: Sequence[int]) -> Iterator[Start]:
        """Yield a shape, or, of several stages a rank, balanced ones of its groups."""
        if 1 in chunks:
            yield family, shape
            return
        for chunk in chunks:
            edges = self._of(chunk).edges(MOST_EDGES)
            if len(shape.widths) * chunk < len(edges) and self._serves(family, shape.widths):
                yield family, balanced_shape(self.costs, family, shape.widths, chunk, edges)

    def beside(self, families: Sequence[Family], seeds: Sequence[Candidate], chunks: Sequence[int]) -> Iterator[Start]:
        """Yield the shapes of candidates, or, of several stages a rank, balanced ones of as many groups."""
        if 1 in chunks:
            yield from self._shapes_of(families, seeds)
            return
        for count in dict.fromkeys(len(seed.stages) for seed in seeds):
            yield from self._balanced_starts(families, count, chunks)

    def starts(self, families: Sequence[Family], seeds: Sequence[Candidate], chunks: Sequence[int]) -> Iterator[Start]:
        """Yield the shapes of candidates, and balanced ones of several numbers of groups, in every family."""
        devices = len(self.order)
        counts = {len(seed.stages) for seed in seeds} | set(range(1, min(FEW_GROUPS, devices) + 1))
        counts |= {devices // each for each in range(1, devices + 1)}
        for count in sorted(counts):
            yield from self._balanced_starts(families, count, chunks)
        yield from self._shapes_of(families, seeds if 1 in chunks else ())

    def _balanced_starts(self, families: Sequence[Family], count: int, chunks: Sequence[int]) -> Iterator[Start]:
        devices = len(self.order)
        for chunk in chunks if count <= min(MOST_GROUPS, devices) else ():
            edges = self._of(chunk).edges(MOST_EDGES)
            for family in families if count * chunk < len(edges) else ():
                most = devices if self.costs.divisible else family.micro_batch_size
                for widths in widths_of(devices, count, most, all_used=self.options.use_all):
                    if comb(len(edges) - 2, count * chunk - 1) <= FEW_CUTS:
                        every = combinations(edges[1:-1], count * chunk - 1)
                        yield from ((family, Shape((*cuts, edges[-1]), widths)) for cuts in every)
                    else:
                        yield family, balanced_shape(self.costs, family, widths, chunk, edges)

    def _shapes_of(self, families: Sequence[Family], seeds: Sequence[Candidate]) -> Iterator[Start]:
        for seed in seeds:
            shape = Shape(seed.cuts, seed.widths)
            for family in families:
                if self._serves(family, shape.widths):
                    yield family, shape

    def candidates(self, family: Family, shape: Shape) -> Iterator[Candidate]:
        """Yield what a shape may be run as: with every depth that the schedule names, recomputing what does not fit."""
        chunks = len(shape.cuts) // len(shape.widths)
        shards = self.options.shards
        for depths in SCHEDULES[self.schedule].warmups(len(shape.widths), chunks, family.micro_batches).values():
            for shard in shards:
                found = self._fitting(family, place_shape(self.costs, family, shape, self.order, shard), depths)
                yield found
                if max(self.costs.shortfalls(found)) <= 0:
                    break

    def bound_s(self, costs: CostModel, family: Family, shape: Shape) -> float:
        """Return a lower bound of what a shape may be run as, under a cost model."""
        return least_s(costs, self.frame(family, shape)) if self._serves(family, shape.widths) else float("inf")

    def frame(self, family: Family, shape: Shape) -> Candidate:
        """Return a shape as deep as the schedule lets it be, with nothing recomputed: no other has a smaller bound."""
        chunks, shard = len(shape.cuts) // len(shape.widths), self.options.shard
        depths = SCHEDULES[self.schedule].warmups(len(shape.widths), chunks, family.micro_batches)
        deepest = [max(each) for each in zip(*depths.values(), strict=True)]
        stages = place_shape(self.costs, family, shape, self.order, "none" if shard == "auto" else shard)
        return with_depths(family, stages, deepest)

    def broken(self, family: Family, shape: Shape) -> Rule | None:
        """Return the first of the user's rules that a shape does not obey."""
        stages = place_shape(self.costs, family, shape, self.order)
        rules = self._of(len(shape.cuts) // len(shape.widths))
        return rules.broken(stages, self.costs.kind_of)

    def _has_mixed_kinds(self, shape: Shape) -> bool:
        """Whether a group would have devices of several kinds, as no stage of any search has."""
        kinds, begin = [self.costs.kind_of[device] for device in self.order], 0
        for width in shape.widths:
            if len(set(kinds[begin : begin + width])) > 1:
                return True
            begin += width
        return False

    @property
    def _over(self) -> bool:
        """Whether as much was simulated as may be."""
        return self.actions_left <= 0 or self.count >= self.options.candidate_limit

    def _of(self, chunks: int) -> Constraints:
        if chunks not in self._constraints:
            self._constraints[chunks] = Constraints.of(self.costs, self.options, chunks)
        return self._constraints[chunks]

    def _serves(self, family: Family, widths: Sequence[int]) -> bool:
        """Whether every replica has a sample of a micro-batch."""
        return self.costs.divisible or max(widths) <= family.micro_batch_size

    def _bound_s(self, family: Family, shape: Shape) -> float:
        idle = len(self.order) - sum(shape.widths)
        if self.broken(family, shape) is not None or self._has_mixed_kinds(shape) or (idle and self.options.use_all):
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
            if step_s is not None:
                self.count += 1
                self.actions_left -= 4 * family.micro_batches * len(shape.cuts) * max(shape.widths)
        return min(found, default=None)

    def _climb(self, step_s: float, start: Start, below_s: float) -> None:
        """Move from a shape to the best of those beside it, as long as that is quicker."""
        while not self._over:
            near = [(self._bound_s(*each), each) for each in self._beside(*start) if each not in self._tried_starts]
            better: tuple[float, Start] | None = None
            for bound_s, each in sorted(near, key=lambda pair: pair[0]):
                if bound_s >= min(below_s, step_s if better is None else better[0]) or self._over:
                    break
                found = self._judge(*each)
                if found is not None and found < (step_s if better is None else better[0]):
                    better = found, each
            if better is None:
                return
            step_s, start = better

    def _beside(self, family: Family, shape: Shape) -> Iterator[Start]:
        edges = self._of(len(shape.cuts) // len(shape.widths)).edges(MOST_EDGES)
        idle = len(self.order) - sum(shape.widths)
        cuts, widths = shape
        for each in cuts_moved(cuts, sorted({*edges, *cuts}), range(len(cuts) - 1)):
            yield family, Shape(each, widths)
        for each in devices_moved(widths, idle, range(len(widths)), all_used=self.options.use_all):
            if self._serves(family, each):
                yield family, Shape(cuts, each)
        if self.options.micro_batches is None:
            batch = self.costs.batch
            for count in counts_beside(batch, family.micro_batches):
                other_family = Family(count, batch // count, self.schedule)
                if self._serves(other_family, shape.widths):
                    yield other_family, shape

    def _fitting(self, family: Family, stages: tuple[CandidateStage, ...], depths: Sequence[int]) -> Candidate:
        """Return the candidate of some stages and depths that recomputes least and fits, or that comes closest."""
        frame = with_depths(family, stages, depths)
        if self.options.recompute == "none":
            return frame
        most = self._recomputing(frame, 1.0)
        if self.options.recompute == "full":
            return most
        # More is recomputed on all stages of a rank, until it fits; what a rank holds depends on its own stages only.
        ranks = [chunks for chunks in groups(frame.stages) if self.costs.shortfalls(frame)[chunks[0]] > 0]
        low, high = [0] * len(ranks), [MOST_PARTS] * len(ranks)
        while any(each + 1 < most for each, most in zip(low, high, strict=True)):
            middle = [(each + most) // 2 for each, most in zip(low, high, strict=True)]
            short = self.costs.shortfalls(self._with_parts(frame, ranks, middle))
            for at, chunks in enumerate(ranks):
                (high if short[chunks[0]] <= 0 else low)[at] = middle[at]
        return self._with_parts(frame, ranks, high)

    def _with_parts(self, frame: Candidate, ranks: Sequence[Sequence[int]], parts: Sequence[int]) -> Candidate:
        """Return a candidate of which some ranks recompute so many sixteenths of the layers that they may."""
        for chunks, part in zip(ranks, parts, strict=True):
            frame = self._recomputing(frame, part / MOST_PARTS, chunks)
        return frame

    def _recomputing(self, frame: Candidate, part: float, some: Sequence[int] | None = None) -> Candidate:
        """Return a candidate some of whose stages recompute a part of the layers that they may."""
        stages = list(frame.stages)
        for at in range(len(stages)) if some is None else some:
            stage = stages[at]
            levels = self.costs.recompute_levels(frame.micro_batch_size, self.costs.kind_of[stage.devices[0]])
            sets = Span(levels).within(stage.first, stage.stop)
            stages[at] = stage._replace(recompute=sets[-int(-part * (len(sets) - 1) // 1)])
        return frame._replace(stages=tuple(stages))


ACTIONS, ACTIONS_WHEN_EXACT = 2_000_000, 20_000_000
"""Simulated of a schedule that is asked for."""
ACTIONS_BESIDE = 40_000
"""Simulated of each schedule that is tried beside what was found."""
MOST_ACTIONS = 200_000
"""Of a step of the best plan, up to which other schedules are tried beside it."""
MOST_SEEDS, SEEDS_BESIDE = 8, 4
COUNTS_BESIDE = 1
"""Micro-batch counts that are tried beside what was found, on either side."""


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
    _check_halves(costs, options.schedule)
    trials = Trials(
        simulator, options.schedule, options, _order(costs, initial_best.fastest and initial_best.fastest.candidate)
    )
    chunks = chunk_counts(options.schedule) if options.chunks is None else (options.chunks,)
    starts = trials.starts(runnable(costs, options), _seeds(initial_best.by_stages, MOST_SEEDS), chunks)
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
    _check_halves(costs, options.schedule)
    trials = Trials(simulator, options.schedule, options, range(len(costs.devices)))
    every = [(family, shape) for family in runnable(costs, options)]
    refusal = refusal_of_all([trials.broken(*start) for start in every])
    if refusal is not None:
        raise UsageError(refusal)
    best = trials.run_all(every)
    if best.fastest is None and best.closest is None:
        raise too_wide(fixed_stages, costs.batch)
    if best.fastest is None:
        raise _infeasible(costs, options, best, fits)
    return best


def shape_of(fixed_stages: FixedStages, options: PlanOptions) -> Shape:
    """Return dictated stages as groups of devices.

    Raises:
        UsageError: the stages do not go round the groups, or to and fro, each with the replicas of its group.
    """
    cuts, widths = fixed_stages
    if not has_chunks(options.schedule):
        return Shape(cuts, widths)
    asked = options.chunks or (2 if layout_of(options.schedule) == "vee" else None)
    for chunks in range(2, len(cuts) + 1) if asked is None else (asked,):
        groups = len(cuts) // chunks
        if groups * chunks == len(cuts) and groups > 0:
            wanted = [widths[group_of(layout_of(options.schedule), at, groups)] for at in range(len(cuts))]
            if tuple(wanted) == widths:
                return Shape(cuts, widths[:groups])
    how = "in which the replicas of the first stages repeat" if asked is None else f"{asked} for every group of devices"
    raise UsageError(
        f"`stages`: {options.schedule} has several stages on the same devices, {how}; found {len(cuts)} stages of "
        f"{', '.join(map(str, widths))} replicas"
    )


def bounds_of(costs: CostModel, options: PlanOptions, step_s: float, *, quickly: bool = False) -> Bounds:
    """Return what bounds all plans of the schedule that the options name, on any stages; ``quickly``: by work alone.

    Layers of a rank's stages are not contiguous; of such schedules only their work is a bound.
    """
    every = runnable(costs, options)
    if not quickly and not has_chunks(options.schedule):
        return bounds_of_families(costs, every, least_bound_s(options), step_s)
    return bounds_of_families(costs, every, lambda model, family, below_s: work_s(model, family), step_s)


def lower_bound_s(costs: CostModel, options: PlanOptions, bounds: Bounds, step_s: float) -> float:
    """Return what no plan of the schedule that the options name falls below, nor ``step_s``, one's own step.

    Of one stage on every device that is known with the limits of memory, too; ``bounds`` are without.
    """
    if has_chunks(options.schedule):
        return bounds.linked_s
    known = {family: work_s(costs, family) for family in runnable(costs, options)}
    least = least_bound_s(options, MOST_CLOSELY_BOUNDED)
    return max(bounds.linked_s, least_of_families_s(known, least, costs, step_s, descending=True))


def tried_beside(costs: CostModel) -> list[str]:
    """Return the schedules that are tried beside `1f1b`: with backwards in halves only where the profile has them."""
    return [each for each in SCHEDULES if not plain(each) and (costs.has_halves or not splits_backward(each))]


def actions_of(candidate: Candidate) -> int:
    """Return how many forwards and backwards a step has, those of replicas counted once."""
    return 2 * candidate.micro_batches * len(candidate.stages)


def improve(simulator: Simulator, options: PlanOptions, best: Best) -> None:
    """Try other schedules: on the stages of the best plans, or, of several stages a rank, on balanced ones."""
    known, own = best.by_stages.copy(), best.fastest
    for schedule in tried_beside(simulator.costs) if own is not None else ():
        assert own is not None
        tried = _beside(simulator, replace(options, schedule=schedule), known, own, best.step_s)
        for found in tried.by_stages.values():
            best.consider(found)


def otherwise(simulator: Simulator, options: PlanOptions, own: Candidate) -> list[Reference]:
    """Return a plan of several stages under every other schedule, with as many micro-batches on the same devices.

    Stages are its own, or, where a rank runs several, two balanced ones on every group of devices.
    """
    costs, found = simulator.costs, []
    shape, order = Shape(own.cuts, own.widths), own.devices
    for schedule in SCHEDULES if len(own.stages) > 1 and not has_chunks(own.schedule) else ():
        if schedule == own.schedule or (splits_backward(schedule) and not costs.has_halves):
            continue
        family = Family(own.micro_batches, own.micro_batch_size, schedule)
        if plain(schedule):
            best = try_stages(simulator, [family], options, *shape, order=order)
        else:
            trials = Trials(simulator, schedule, options, order)
            best = trials.run_all(trials.starts_of_shape(family, shape, chunk_counts(schedule)[:1]))
        if best.fastest is not None:
            found.append(Reference(schedule, best.fastest, None))
        elif best.closest is not None:
            found.append(Reference(schedule, None, explain(costs, best.closest[1])))
    return found


def _beside(
    simulator: Simulator,
    options: PlanOptions,
    best: Mapping[int, SimulatedPlan],
    simulated_plan: SimulatedPlan,
    below_s: float,
) -> Best:
    """Try a schedule on the shapes of the best plans, by number of stages, and on balanced ones of as many groups."""
    costs, own = simulator.costs, simulated_plan.candidate
    seeds = [seed for seed in _seeds(best, 1 + SEEDS_BESIDE) if len(seed.stages) > 1][:SEEDS_BESIDE]
    every = runnable(costs, options)
    at = next(index for index, family in enumerate(every) if family.micro_batches == own.micro_batches)
    near = every[max(0, at - COUNTS_BESIDE) : at + COUNTS_BESIDE + 1]
    trials = Trials(simulator, options.schedule, options, _order(costs, own))
    starts = trials.beside(near, seeds, chunk_counts(options.schedule))
    return trials.run(starts, ACTIONS_BESIDE, below_s)


def _seeds(best: Mapping[int, SimulatedPlan], most: int) -> list[Candidate]:
    """Return the quickest plans, one of every number of stages."""
    every = sorted(best.items(), key=lambda each: (each[1].step_s, each[0]))
    return [found.candidate for _, found in every[:most]]


def _order(costs: CostModel, candidate: Candidate | None) -> tuple[int, ...]:
    """Return the devices in the order in which a plan's stages take them, idle ones last."""
    used = () if candidate is None else candidate.devices
    return tuple(dict.fromkeys((*used, *range(len(costs.devices)))))


def _check_halves(costs: CostModel, schedule: str) -> None:
    if splits_backward(schedule) and not costs.has_halves:
        raise UsageError(
            f"`schedule={schedule!r}` has backwards in two halves, which the profile does not hold for every layer; "
            "measure them with `autopar profile`, or choose gpipe, 1f1b or interleaved"
        )


def _infeasible(costs: CostModel, options: PlanOptions, best: Best, fits: Fits | None) -> InfeasibleError:
    short = None
    asked = f"no plan of {options.schedule} for {costs.layer_count} layers on {len(costs.devices)} devices"
    text = f"{asked} obeys all options"
    if best.closest is not None:
        short, candidate = best.closest
        text = (
            f"nothing fits the memory: {explain(costs, candidate)} in the plan of {options.schedule} that comes "
            f"closest ({candidate.text()} with {candidate.micro_batches} micro-batches)"
        )
    return InfeasibleError(
        text if fits is None else f"{text}; {advice(schedule_remedies(costs, options, fits, short))}"
    )
