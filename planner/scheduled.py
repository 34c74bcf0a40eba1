"""Scheduled: plans of schedules that are found by trying, asked for by name or as an improvement on what was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.layout import group_of, layout_of
from autopar.formats.predicted import Bounds
from autopar.planner.alternatives import Reference, try_stages
from autopar.planner.bounds.work import work_s
from autopar.planner.candidate import Candidate, Family
from autopar.planner.chunks import chunk_counts, chunked, halves, plain
from autopar.planner.costs.model import CostModel
from autopar.planner.dictated import Dictated
from autopar.planner.options import PlanOptions
from autopar.planner.remedies import Fits, advice, scheduled
from autopar.planner.search.best_first import MOST_CLOSELY_BOUNDED
from autopar.planner.search.judge import Best, Found
from autopar.planner.shapes import Shape
from autopar.planner.share_limits import runnable
from autopar.planner.shortfall import explain
from autopar.planner.simulator.simulate import Simulator
from autopar.planner.stack import least_bound_s, least_s, stacked
from autopar.planner.trials import Trials
from autopar.schedules import SCHEDULES

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


def tried_best(simulator: Simulator, options: PlanOptions, found: Best, fits: Fits | None = None) -> Best:
    """Return the best plan of the schedule that the options name; ``found`` are the best ones of `1f1b`.

    With ``fits``, which says whether one fits with other options, the error names such options.

    Raises:
        UsageError: the profile lacks what the schedule needs.
        InfeasibleError: none fits the memory.
    """
    costs = simulator.costs
    _check_halves(costs, options.schedule)
    trials = Trials(simulator, options.schedule, options, _order(costs, found.found and found.found.candidate))
    chunks = chunk_counts(options.schedule) if options.chunks is None else (options.chunks,)
    starts = trials.starts(runnable(costs, options), _seeds(found.by_stages, MOST_SEEDS), chunks)
    best = trials.run(starts, ACTIONS if options.gap > 0 else ACTIONS_WHEN_EXACT)
    if best.found is None:
        raise _infeasible(costs, options, best, fits)
    return best


def dictated_best(simulator: Simulator, options: PlanOptions, dictated: Dictated, fits: Fits | None = None) -> Best:
    """Return the best plan of the dictated stages under the schedule that the options name; ``fits`` as above.

    Raises:
        UsageError: the profile lacks what the schedule needs, or the stages do not suit it.
        InfeasibleError: none fits the memory.
    """
    costs, shape = simulator.costs, shape_of(dictated, options)
    _check_halves(costs, options.schedule)
    trials = Trials(simulator, options.schedule, options, range(len(costs.devices)))
    every = [(family, shape) for family in runnable(costs, options)]
    broken = [trials.broken(*start) for start in every]
    if broken[0] is not None and None not in broken:
        raise UsageError(broken[0].refusal)
    best = trials.run_all(every)
    if best.found is None and best.closest is None:
        raise UsageError(
            f"`stages`: a stage has {max(dictated.widths)} replicas, more than the samples of a micro-batch of the "
            f"batch {costs.batch}; use fewer replicas or micro-batches, or a larger `batch`"
        )
    if best.found is None:
        raise _infeasible(costs, options, best, fits)
    return best


def shape_of(dictated: Dictated, options: PlanOptions) -> Shape:
    """Return dictated stages as groups of devices.

    Raises:
        UsageError: the stages do not go round the groups, or to and fro, each with the replicas of its group.
    """
    cuts, widths = dictated
    if not chunked(options.schedule):
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
    if not quickly and not chunked(options.schedule):
        return stacked(costs, every, least_bound_s(options), step_s)
    return stacked(costs, every, lambda model, family, below_s: work_s(model, family), step_s)


def lower_bound_s(costs: CostModel, options: PlanOptions, bounds: Bounds, step_s: float) -> float:
    """Return what no plan of the schedule that the options name falls below, nor ``step_s``, one's own step.

    Of one stage on every device that is known with the limits of memory, too; ``bounds`` are without.
    """
    if chunked(options.schedule):
        return bounds.linked_s
    known = {family: work_s(costs, family) for family in runnable(costs, options)}
    least = least_bound_s(options, MOST_CLOSELY_BOUNDED)
    return max(bounds.linked_s, least_s(known, least, costs, step_s, descending=True))


def tried_beside(costs: CostModel) -> list[str]:
    """Return the schedules that are tried beside `1f1b`: with backwards in halves only where the profile has them."""
    return [each for each in SCHEDULES if not plain(each) and (costs.halved or not halves(each))]


def actions_of(candidate: Candidate) -> int:
    """Return how many forwards and backwards a step has, those of replicas counted once."""
    return 2 * candidate.micro_batches * len(candidate.stages)


def improve(simulator: Simulator, options: PlanOptions, best: Best) -> None:
    """Try other schedules: on the stages of the best plans, or, of several stages a rank, on balanced ones."""
    known, own = best.by_stages.copy(), best.found
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
    shape = Shape(tuple(stage.stop for stage in own.stages), tuple(len(stage.devices) for stage in own.stages))
    order = tuple(device for stage in own.stages for device in stage.devices)
    for schedule in SCHEDULES if len(own.stages) > 1 and not chunked(own.schedule) else ():
        if schedule == own.schedule or (halves(schedule) and not costs.halved):
            continue
        family = Family(own.micro_batches, own.micro_batch_size, schedule)
        if plain(schedule):
            best = try_stages(simulator, [family], options, *shape, order=order)
        else:
            trials = Trials(simulator, schedule, options, order)
            best = trials.run_all(trials.laid(family, shape, chunk_counts(schedule)[:1]))
        if best.found is not None:
            found.append(Reference(schedule, best.found, None))
        elif best.closest is not None:
            found.append(Reference(schedule, None, explain(costs, best.closest[1])))
    return found


def _beside(
    simulator: Simulator, options: PlanOptions, best: Mapping[int, Found], found: Found, below_s: float
) -> Best:
    """Try a schedule on the shapes of the best plans, by number of stages, and on balanced ones of as many groups."""
    costs, own = simulator.costs, found.candidate
    seeds = [seed for seed in _seeds(best, 1 + SEEDS_BESIDE) if len(seed.stages) > 1][:SEEDS_BESIDE]
    every = runnable(costs, options)
    at = next(index for index, family in enumerate(every) if family.micro_batches == own.micro_batches)
    near = every[max(0, at - COUNTS_BESIDE) : at + COUNTS_BESIDE + 1]
    trials = Trials(simulator, options.schedule, options, _order(costs, own))
    starts = trials.beside(near, seeds, chunk_counts(options.schedule))
    return trials.run(starts, ACTIONS_BESIDE, below_s)


def _seeds(best: Mapping[int, Found], most: int) -> list[Candidate]:
    """Return the quickest plans, one of every number of stages."""
    every = sorted(best.items(), key=lambda each: (each[1].step_s, each[0]))
    return [found.candidate for _, found in every[:most]]


def _order(costs: CostModel, candidate: Candidate | None) -> tuple[int, ...]:
    """Return the devices in the order in which a plan's stages take them, idle ones last."""
    stages = () if candidate is None else candidate.stages
    used = [device for stage in stages for device in stage.devices]
    return tuple(dict.fromkeys((*used, *range(len(costs.devices)))))


def _check_halves(costs: CostModel, schedule: str) -> None:
    if halves(schedule) and not costs.halved:
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
    return InfeasibleError(text if fits is None else f"{text}; {advice(scheduled(costs, options, fits, short))}")
