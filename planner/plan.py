"""Planning: profile, cluster and options become a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from autopar.errors import FileError, InfeasibleError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Alternative, Bounds, Plan
from autopar.formats.profile import Profile
from autopar.formats.timeline import Timeline
from autopar.planner.alternatives import (
    Reference,
    frames,
    neighbours,
    record,
    references,
    simplest,
    straddling,
    try_stages,
)
from autopar.planner.assemble import assemble, candidate_of, crossings, shared_parameters, timeline_of
from autopar.planner.bounds.chain import candidate_bound_s
from autopar.planner.candidate import MOST_MICRO_BATCHES, Candidate, Family, has_chunks, place, plain, splits_backward
from autopar.planner.closest import closest
from autopar.planner.constraints import Constraints, FixedStages, parse
from autopar.planner.costs.kinds import check_times_of
from autopar.planner.costs.model import CostModel
from autopar.planner.infeasible import any_plan_fits, infeasible
from autopar.planner.milp.solve import search_by_milp
from autopar.planner.objectives.cost import cheapest_plan
from autopar.planner.objectives.written import throughput_plan
from autopar.planner.options import PlanOptions, admissible_options, check_flags
from autopar.planner.peers import Peer, peers
from autopar.planner.placement.places import pool_of
from autopar.planner.search.best_first import bounds_of_families, least_bound_s, search
from autopar.planner.search.judge import ENOUGH, Best, SimulatedPlan, equal_widths
from autopar.planner.search.local import judge_even_splits, search_locally
from autopar.planner.search.other_schedules import (
    MOST_ACTIONS,
    Trials,
    actions_of,
    bounds_of,
    dictated_best,
    improve,
    lower_bound_s,
    otherwise,
    shape_of,
    tried_beside,
    tried_best,
    usual,
)
from autopar.planner.share_limits import runnable
from autopar.planner.simulator.simulate import Simulator
from autopar.progress import Progress, no_progress


class StartingPlans(NamedTuple):
    """What others would run, which the search starts from."""

    references: list[Reference]
    """What anyone would try first."""
    peers: list[Peer]


def starting_plans(simulator: Simulator, every: Sequence[Family], options: PlanOptions) -> StartingPlans:
    """Return what others would run, as far as that is soon known."""
    found = references(simulator, every, options)
    # What is proved is proved of the plans that are searched, and some of a peer's are none of these.
    return StartingPlans(found, peers(simulator, options, found, quickly=True) if options.gap > 0 else [])


def plan(
    profile: Profile, cluster: Cluster, options: PlanOptions | None = None, progress: Progress = no_progress
) -> Plan:
    """Return the fastest plan found, or the dictated one, with its lower bound and alternatives.

    Pure: the same arguments give the same plan, on any machine. ``progress`` is told what is done.

    Raises:
        UsageError: the options contradict the profile or each other.
        InfeasibleError: nothing fits the memory; names the stage and by how much.
    """
    options = options or PlanOptions()
    check_flags(options)
    check_times_of(profile, cluster, options.times_of, options.gpus)
    options = admissible_options(options, profile)
    if options.objective == "throughput":
        return throughput_plan(profile, cluster, options)
    dictated = None if options.stages is None else parse(options.stages, [layer.name for layer in profile.layers])
    options = options if dictated is None else _options_for_stages(dictated, options)
    options = replace(options, gpus=options.gpus or len(cluster.devices))
    costs = CostModel(profile, cluster, options)
    simulator = Simulator(costs, progress=progress)
    _check_stages(costs, options)
    if options.schedule != "auto" and not plain(options.schedule):
        return _plan_schedule(simulator, options, dictated)
    every = runnable(costs, options)
    if options.objective == "cost":
        return cheapest_plan(costs, every, options)
    own = None if dictated is None else _judge(simulator, every, options, dictated)
    progress("trying usual plans", 0.05)
    others = starting_plans(simulator, every, options)
    best, least_s, said = _search(simulator, every, options, others)
    if dictated is not None and own is not None:
        return _plan_fixed_stages(costs, every, options, dictated, own, others.references, best)
    if best.fastest is None:
        _judge_closest(simulator, every, options, best)
    if best.fastest is None:
        raise infeasible(costs, every, options, best.closest, partial(any_plan_fits, costs, {}))
    _check_equal(options, best)
    return _assemble_best(simulator, every, options, others, best, least_s, said)


def _judge_closest(simulator: Simulator, every: Sequence[Family], options: PlanOptions, best: Best) -> None:
    """Judge the plan that needs least memory, and move on from there; a search of few paces may not meet it."""
    found = closest(simulator.costs, every, options)
    if found is not None and found[0] <= 0:
        best.judge(simulator, found[1])
        search_locally(simulator, options, best, 0.0)


def _plan_schedule(simulator: Simulator, options: PlanOptions, fixed_stages: FixedStages | None) -> Plan:
    """Return the best plan of a schedule that is found by trying, beside the best one of `1f1b`."""
    costs, least = simulator.costs, usual(options)
    every = runnable(costs, least)
    fits = partial(_schedule_fits, costs, fixed_stages)
    own = None if fixed_stages is None else dictated_best(simulator, options, fixed_stages, fits)
    compared = references(simulator, every, least)
    best, _, _ = _search(simulator, every, least, StartingPlans(compared, []))
    if own is None or fixed_stages is None:
        simulator.progress(f"trying plans of {options.schedule}", 0.7)
        own = tried_best(simulator, options, best, fits)
        bounds = bounds_of(costs, options, own.step_s)
        notes = [f"plans of {options.schedule} were found by trying; no better one is ruled out but by the lower bound"]
    else:
        trials = Trials(simulator, options.schedule, options, range(len(costs.devices)))
        shape = shape_of(fixed_stages, options)

        def bound_s(model: CostModel, family: Family, below_s: float) -> float:
            return min(below_s, trials.bound_s(model, family, shape))

        bounds = bounds_of_families(costs, runnable(costs, options), bound_s, own.step_s)
        notes = ["the stages were dictated; the lower bound is that of these stages"]
    _check_equal(options, own)
    found = own.fastest if fixed_stages is not None else _choose(simulator, options, own)
    assert found is not None
    rows = [*_alternatives(compared, (), None), record("1f1b", best.fastest, "no plan of 1f1b fits the memory")]
    notes += _placement(costs, found.candidate, options)
    least_s = bounds.linked_s if fixed_stages is not None else lower_bound_s(costs, options, bounds, own.step_s)
    return assemble(costs, found.candidate, options, least_s, rows, notes, bounds)


def _schedule_fits(costs: CostModel, fixed_stages: FixedStages | None, options: PlanOptions) -> bool:
    """Whether a plan of the schedule that is asked for fits with other options."""
    if options.schedule == "auto" or plain(options.schedule):
        return any_plan_fits(costs, {}, options)
    options = admissible_options(options, costs.profile)
    simulator, least = Simulator(CostModel(costs.profile, costs.cluster, options)), usual(options)
    try:
        if fixed_stages is not None:
            return dictated_best(simulator, options, fixed_stages).fastest is not None
        every = runnable(simulator.costs, least)
        best, _, _ = _search(simulator, every, least, StartingPlans(references(simulator, every, least), []))
        return tried_best(simulator, options, best).fastest is not None
    except InfeasibleError:
        return False


def _assemble_best(
    simulator: Simulator,
    every: Sequence[Family],
    options: PlanOptions,
    others: StartingPlans,
    best: Best,
    least_s: float,
    search_notes: Sequence[str],
) -> Plan:
    """Return the simplest of the best plans, with what bounds them, and what stands near them."""
    costs = simulator.costs
    simulator.progress("bounding plans from below", 0.8)
    bounds = bounds_of_families(costs, every, least_bound_s(options), best.step_s)
    least_s = max(least_s, bounds.linked_s)
    search_notes = list(search_notes)
    many = best.fastest is not None and actions_of(best.fastest.candidate) > MOST_ACTIONS
    if many and _any_schedule(options, costs):
        search_notes.append(
            "of so many stages and micro-batches no other schedules than gpipe and 1f1b were tried; `schedule` does"
        )
    elif _any_schedule(options, costs):
        simulator.progress("trying other schedules", 0.9)
        improve(simulator, options, best)
        for each in otherwise(simulator, options, best.fastest.candidate) if best.fastest is not None else ():
            if each.simulated_plan is not None:
                best.consider(each.simulated_plan)
        # Bounds know of a schedule whether a rank runs several stages, and whether backwards are halved.
        for schedule in {(has_chunks(each), splits_backward(each)): each for each in tried_beside(costs)}.values():
            asked = replace(options, schedule=schedule, chunks=None)
            own = bounds_of(costs, asked, best.step_s, quickly=True)
            if has_chunks(schedule):
                bounds = bounds.model_copy(update={"work_s": min(bounds.work_s, own.work_s)})
            else:
                bounds = Bounds(**{name: min(each, getattr(own, name)) for name, each in bounds})
                least_s = min(least_s, lower_bound_s(costs, asked, own, best.step_s))
    found = _choose(simulator, options, best)
    near = neighbours(simulator, best, found.candidate)
    notes = [*search_notes, *_simplicity_notes(costs, options, best, found), *_notes(costs, found, least_s, options)]
    rows = _alternatives(others.references, near, None, partial(_excluding_option, costs, options))
    return assemble(costs, found.candidate, options, least_s, rows, notes, bounds, found.step_s)


def _any_schedule(options: PlanOptions, costs: CostModel) -> bool:
    """Whether plans of schedules that are found by trying may be chosen."""
    return options.schedule == "auto" and options.solver == "dp" and not costs.divisible and not options.equal_widths


def _check_equal(options: PlanOptions, best: Best) -> None:
    if options.equal_widths and best.equal is None:
        raise InfeasibleError(
            "no plan was found whose stages are equally wide and fit the memory, but others do fit; leave out "
            "`equal_widths`"
        )


def _choose(simulator: Simulator, options: PlanOptions, best: Best) -> SimulatedPlan:
    if options.equal_widths:
        assert best.equal is not None
        return best.equal
    assert best.fastest is not None
    return simplest(simulator, best) if options.simple else best.fastest


def _simplicity_notes(costs: CostModel, options: PlanOptions, best: Best, simulated_plan: SimulatedPlan) -> list[str]:
    """Say what is given up for a simpler plan, and what one that is not simple costs to do without."""
    assert best.fastest is not None
    notes = []
    if simulated_plan.candidate != best.fastest.candidate and not options.equal_widths:
        faster = 1 - best.step_s / simulated_plan.step_s
        notes.append(f"a plan that is harder to use is {faster:.1%} faster; `exact=True` plans it")
    across = straddling(costs, simulated_plan.candidate.stages)
    if across:
        named = ", ".join(map(str, across))
        notes.append(
            f"stage{'s' if len(across) > 1 else ''} {named} cross from one node to another without filling them"
        )
    if best.equal is not None and not equal_widths(simulated_plan.candidate.stages):
        more = best.equal.step_s / simulated_plan.step_s - 1
        notes.append(f"stages of equal widths take {more:+.1%}; `equal_widths=True` plans them")
    return notes


def _check_stages(costs: CostModel, options: PlanOptions) -> None:
    """Refuse more stages than can be."""
    layers, devices = costs.layer_count, len(costs.devices)
    most, on = min(layers, devices), f" on {devices} devices"
    if options.schedule != "auto" and has_chunks(options.schedule):
        most, on = layers, ""
    if options.min_stages > most:
        raise UsageError(f"`min_stages={options.min_stages}`: {layers} layers{on} make at most {most} stages")


def simulate(plan: Plan, profile: Profile, cluster: Cluster) -> Timeline:
    """Return the predicted timeline of a plan.

    Raises:
        UsageError: no program follows from the plan (:attr:`Plan.refusal`).
        FileError: the plan's layers are not the profile's.
    """
    if plan.refusal is not None:
        raise UsageError(f"{plan.refusal}: the simulator has programs of synchronous pipelines of whole devices only")
    placed = [name for stage in plan.stages for name in stage.layers]
    names = [layer.name for layer in profile.layers]
    if placed != names:
        index = next((at for at, pair in enumerate(zip(placed, names, strict=False)) if pair[0] != pair[1]), len(names))
        found = placed[index] if index < len(placed) else "nothing"
        raise FileError(
            f"the plan is not of this profile: layer {index} is {found!r} in the plan and "
            f"{names[index] if index < len(names) else 'nothing'!r} in the profile; run `autopar plan` again"
        )
    options = PlanOptions(
        gpus=max(plan.devices) + 1,
        batch=plan.batch,
        bytes_per_s=plan.bytes_per_s,
        times_of=plan.times_of,
        divisible=plan.divisible,
    )
    costs = CostModel(profile, cluster, options)
    _check_flows(plan, costs)
    return timeline_of(plan, costs)


def _check_flows(plan: Plan, costs: CostModel) -> None:
    """Refuse a plan that sends or shares other than what the profile says, as an edited one may."""
    candidate = candidate_of(plan, costs.profile)
    for key, planned, found in (
        ("tensors", plan.tensors, crossings(costs, candidate)),
        ("tied", plan.tied, shared_parameters(costs, candidate)),
    ):
        if planned != found:
            index = next((at for at, pair in enumerate(zip(planned, found, strict=False)) if pair[0] != pair[1]), None)
            at = f"$.{key}" if index is None else f"$.{key}[{index}]"
            raise FileError(
                f"the plan is not of this profile: {at} is not what the profile's layers exchange between these "
                "stages; run `autopar plan` again, with `stages` for stages of your own"
            )


def _options_for_stages(fixed_stages: FixedStages, options: PlanOptions) -> PlanOptions:
    needed = sum(fixed_stages.widths if options.schedule == "auto" else shape_of(fixed_stages, options).widths)
    if options.gpus is not None and needed > options.gpus:
        raise UsageError(f"`stages` needs {needed} devices, but `gpus` is {options.gpus}")
    if options.use_all and options.gpus is not None and needed < options.gpus:
        raise UsageError(f"`stages` uses {needed} devices, but `use_all` asks for all {options.gpus}")
    if len(fixed_stages.cuts) < options.min_stages:
        raise UsageError(f"`stages` has {len(fixed_stages.cuts)} stages, but `min_stages` is {options.min_stages}")
    return replace(options, gpus=options.gpus or needed)


def _search(
    simulator: Simulator, every: Sequence[Family], options: PlanOptions, others: StartingPlans
) -> tuple[Best, float, tuple[str, ...]]:
    """Search from what others would run on, so that the plan is never worse than one of these that is admitted.

    Returns the best candidates, a lower bound of the step, and what is to be noted.
    """
    best, costs = Best(), simulator.costs
    for reference in others.references:
        if (
            reference.simulated_plan is not None
            and _excluding_option(costs, options, reference.simulated_plan.candidate) is None
        ):
            best.consider(reference.simulated_plan)
    for peer in others.peers:
        if (
            peer.candidate is not None
            and peer.reason is None
            and _excluding_option(costs, options, peer.candidate) is None
        ):
            best.judge(simulator, peer.candidate)
    if options.solver == "milp":
        solved = search_by_milp(simulator, every, options, best)
        return best, solved.lower_bound_s, solved.notes
    if options.gap > 0:
        simulator.progress("trying even splits", 0.15)
        judge_even_splits(simulator, every, options, best)
    simulator.progress(f"searching {len(every)} families of plans", 0.2)
    found = search(simulator, every, options, best)
    if options.gap > 0:
        simulator.progress("moving on from the best plans", 0.6)
        search_locally(simulator, options, best, found.lower_bound_s)
    return best, min(found.lower_bound_s, best.step_s), ()


def _excluding_option(costs: CostModel, options: PlanOptions, candidate: Candidate) -> str | None:
    """Return the option that excludes a plan of others; None where it may be chosen."""
    used = sum(len(stage.devices) for stage in candidate.stages)
    shards = {stage.shard for stage in candidate.stages if len(stage.devices) > 1}
    broken = Constraints.of(costs, options).broken(candidate.stages, costs.kind_of)
    if broken is not None:
        return broken.text
    if options.use_all and used < len(costs.devices):
        return "`use_all`"
    if options.shard != "auto" and not shards <= {options.shard}:
        return f"`shard={options.shard!r}`"
    if not _as_asked(options.schedule, candidate):
        return f"`schedule={options.schedule!r}`"
    if options.recompute != "auto" and _recomputes(costs, candidate) != options.recompute:
        return f"`recompute={options.recompute!r}`"
    if options.equal_widths and not equal_widths(candidate.stages):
        return "`equal_widths`"
    return None


def _as_asked(schedule: str, candidate: Candidate) -> bool:
    """Whether a candidate is of a schedule; with all in flight, `1f1b` and `gpipe` are one."""
    if schedule == "auto":
        return True
    count = candidate.micro_batches
    full = all(stage.warmup == stage.turns(0, count) for stage in candidate.stages)
    whole = plain(schedule) and plain(candidate.schedule)
    return schedule == candidate.schedule or (whole and (full or schedule == "1f1b"))


def _recomputes(costs: CostModel, candidate: Candidate) -> str:
    """Return whether no layer is recomputed, or all that may be; or ``auto``."""
    again = sum(len(stage.recompute) for stage in candidate.stages)
    if not again:
        return "none"
    kind = costs.kind_of[candidate.stages[0].devices[0]]
    most = len(costs.recompute_levels(candidate.micro_batch_size, kind)[-1])
    return "full" if again == most else "auto"


def _judge(simulator: Simulator, every: Sequence[Family], options: PlanOptions, fixed_stages: FixedStages) -> Best:
    """Judge the dictated stages; refuse them before anything is searched for them to be compared with."""
    costs = simulator.costs
    refusal = _refusal(costs, every, options, fixed_stages)
    if refusal is not None:
        raise UsageError(refusal)
    own = try_stages(simulator, every, options, *fixed_stages)
    if own.fastest is None and own.closest is None:
        raise UsageError(
            f"`stages`: a stage has {max(fixed_stages.widths)} replicas, more than the samples of a micro-batch of the "
            f"batch {costs.batch}; use fewer replicas or micro-batches, or a larger `batch`"
        )
    if own.fastest is None:
        raise infeasible(costs, (), options, own.closest, partial(_stages_fit, costs, fixed_stages))
    return own


def _stages_fit(costs: CostModel, fixed_stages: FixedStages, options: PlanOptions) -> bool:
    """Whether the dictated stages fit with other options."""
    options = admissible_options(options, costs.profile)
    simulator = Simulator(CostModel(costs.profile, costs.cluster, options))
    every = runnable(simulator.costs, options)
    refused = _refusal(simulator.costs, every, options, fixed_stages) is not None
    return not refused and try_stages(simulator, every, options, *fixed_stages).fastest is not None


def _refusal(costs: CostModel, every: Sequence[Family], options: PlanOptions, fixed_stages: FixedStages) -> str | None:
    """Return which constraint dictated stages do not obey with any number of micro-batches; none where they may."""
    rules = Constraints.of(costs, options)
    # What shares are given depends on the number of micro-batches.
    broken = [rules.broken(place(family, *fixed_stages, divisible=True), costs.kind_of) for family in every]
    return None if broken[0] is None or None in broken else broken[0].refusal


def _plan_fixed_stages(
    costs: CostModel,
    every: Sequence[Family],
    options: PlanOptions,
    fixed_stages: FixedStages,
    own: Best,
    reference_plans: Sequence[Reference],
    best: Best,
) -> Plan:
    assert own.fastest is not None

    def least(model: CostModel, family: Family, below_s: float) -> float:
        found = frames(model, family, options, *fixed_stages)
        return min((candidate_bound_s(model, Candidate(*family, frame)) for frame in found), default=below_s)

    bounds = bounds_of_families(costs, every, least, own.step_s)
    if best.fastest is None or own.step_s < best.step_s:
        best = own
    notes = ["the stages were dictated; the lower bound is that of these stages"]
    return assemble(
        costs, own.fastest.candidate, options, bounds.linked_s, _alternatives(reference_plans, (), best), notes, bounds
    )


def _alternatives(
    reference_plans: Sequence[Reference],
    near: Sequence[Reference],
    best: Best | None,
    excluding_option: Callable[[Candidate], str | None] = lambda _: None,
) -> list[Alternative]:
    """Return what is listed beside a plan: what anyone would try first, the best one if it is not, and neighbours."""
    rows = []
    for each in reference_plans:
        own = None if each.simulated_plan is None else excluding_option(each.simulated_plan.candidate)
        rows.append(record(each.name, each.simulated_plan, each.reason).model_copy(update={"excluded": own}))
    if best is not None:
        rows.append(record("best", best.fastest))
    known = {(row.step_s, row.stages, row.infeasible) for row in rows}
    others = (record(each.name, each.simulated_plan, each.reason) for each in near)
    return [*rows, *(row for row in others if (row.step_s, row.stages, row.infeasible) not in known)]


def _notes(costs: CostModel, simulated_plan: SimulatedPlan, lower_bound_s: float, options: PlanOptions) -> list[str]:
    step_s, candidate = simulated_plan
    notes = []
    if options.micro_batches is None and costs.batch > MOST_MICRO_BATCHES:
        notes.append(f"micro-batch counts above {MOST_MICRO_BATCHES} were not searched; `micro_batches` asks for one")
    idle = len(costs.devices) - len({device for stage in candidate.stages for device in stage.devices})
    if idle:
        notes.append(
            f"{idle} of {len(costs.devices)} devices stay idle: no plan simulated with them is faster "
            "(`use_all` forbids this)"
        )
    notes += _placement(costs, candidate, options)
    if lower_bound_s > 0 and step_s > (1 + max(ENOUGH, options.gap)) * lower_bound_s * (1 + 1e-9):
        more = f"`effort={10 * options.effort}` searches on"
        notes.append(f"the search ended {step_s / lower_bound_s - 1:.1%} above its lower bound; {more}")
    if step_s < lower_bound_s:
        notes.append(f"it is faster than any plan with one stage on every device, by {1 - step_s / lower_bound_s:.1%}")
    return notes


def _placement(costs: CostModel, candidate: Candidate, options: PlanOptions) -> list[str]:
    """Say which placements were not searched, and where ranks are to be started that are not in cluster order."""
    notes = []
    exact = options.gap == 0
    if options.solver == "dp" and not pool_of(costs, exact=exact, use_all=options.use_all).complete:
        remedy = "" if exact else "; `gap=0` leaves out fewer"
        notes.append(f"not all placements on nodes were searched; the lower bound is of those that were{remedy}")
    devices = list(dict.fromkeys(device for stage in candidate.stages for device in stage.devices))
    nodes = {costs.devices[device].node for device in devices}
    if len(nodes) > 1 and devices != sorted(devices):
        notes.append("stages are not placed in cluster order: start rank i on the i-th device of $.stages[].devices")
    return notes
