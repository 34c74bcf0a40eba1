"""Planning: profile, cluster and options become a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from autopar.errors import FileError, InfeasibleError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Objective, Plan
from autopar.formats.predicted import Alternative, Bounds
from autopar.formats.profile import Profile
from autopar.formats.timeline import Timeline
from autopar.planner.alternatives import Reference, frames, record, references, try_stages
from autopar.planner.assemble import assemble, candidate_of, crossings, shared, timeline_of
from autopar.planner.bounds.chain import bound
from autopar.planner.candidate import MOST_MICRO_BATCHES, Candidate, Family, place
from autopar.planner.chunks import chunk_counts, chunked, groups, plain
from autopar.planner.constraints import Constraints
from autopar.planner.costs.kinds import check_times_of
from autopar.planner.costs.model import CostModel
from autopar.planner.dictated import Dictated, parse
from autopar.planner.exhaustive import exhaust
from autopar.planner.milp.programmed import programmed
from autopar.planner.neighbours import neighbours
from autopar.planner.objectives.cost import cheapest_plan
from autopar.planner.objectives.flags import check_flags
from autopar.planner.objectives.others import planned_by_pipedream, planned_by_piper
from autopar.planner.objectives.written import throughput_plan
from autopar.planner.options import PlanOptions, admitted
from autopar.planner.placement.grouping import pool_of
from autopar.planner.remedies import any_plan_fits
from autopar.planner.scheduled import bounds_of, dictated_best, improve, listed, shape_of, tried_best, usual
from autopar.planner.search.best_first import search
from autopar.planner.search.judge import Best
from autopar.planner.share_limits import runnable
from autopar.planner.shortfall import infeasible
from autopar.planner.simulator.simulate import Simulator
from autopar.planner.stack import least_bound_s, stacked
from autopar.planner.trials import Trials

__all__ = ["plan", "simulate"]

_OTHERS: dict[Objective, Callable[[Profile, Cluster, PlanOptions], Plan]] = {
    "throughput": throughput_plan,
    "pipedream": planned_by_pipedream,
    "piper": planned_by_piper,
}
"""Objectives of which no program follows, or that other planners have."""


def plan(
    profile: Profile,
    cluster: Cluster,
    options: PlanOptions | None = None,
    known: Sequence[Candidate] = (),
    compared: Sequence[Reference] | None = None,
) -> Plan:
    """Return the fastest plan found, or the dictated one, with its lower bound and alternatives.

    The search starts from the ``known`` candidates. ``compared`` are the references of the same question, where they
    have been tried. Pure: the same arguments give the same plan, on any machine.

    Raises:
        UsageError: the options contradict the profile or each other.
        InfeasibleError: nothing fits the memory; names the stage and by how much.
    """
    options = options or PlanOptions()
    check_flags(options)
    check_times_of(profile, cluster, options.times_of, options.gpus)
    options = admitted(options, profile)
    if options.objective in _OTHERS:
        return _OTHERS[options.objective](profile, cluster, options)
    dictated = None if options.stages is None else parse(options.stages, [layer.name for layer in profile.layers])
    options = options if dictated is None else _fitting(dictated, options)
    options = replace(options, gpus=options.gpus or len(cluster.devices))
    costs = CostModel(profile, cluster, options)
    simulator = Simulator(costs)
    _check_stages(costs, options)
    if options.schedule != "auto" and not plain(options.schedule):
        return _scheduled(simulator, options, dictated, known)
    every = runnable(costs, options)
    if options.objective == "cost":
        return cheapest_plan(costs, every, options)
    own = None if dictated is None else _judge(simulator, every, options, dictated)
    compared = references(simulator, every, options) if compared is None else compared
    best, lower_bound_s, said = _search(simulator, every, options, compared, known)
    if dictated is not None and own is not None:
        return _dictated(costs, every, options, dictated, own, compared, best)
    if best.found is None:
        raise infeasible(costs, every, options, best.closest, partial(any_plan_fits, costs, {}))
    return _explained(simulator, every, options, compared, best, lower_bound_s, said)


def _scheduled(
    simulator: Simulator, options: PlanOptions, dictated: Dictated | None, known: Sequence[Candidate]
) -> Plan:
    """Return the best plan of a schedule that is found by trying, beside the best one of `1f1b`."""
    costs, least = simulator.costs, usual(options)
    every = runnable(costs, least)
    fits = partial(_schedule_fits, costs, dictated)
    own = None if dictated is None else dictated_best(simulator, options, dictated, fits)
    compared = references(simulator, every, least)
    best, _, _ = _search(simulator, every, least, compared, known)
    if own is None or dictated is None:
        own = tried_best(simulator, options, best, fits)
        bounds = bounds_of(costs, options, own.step_s)
        notes = [f"plans of {options.schedule} were found by trying; no better one is ruled out but by the lower bound"]
    else:
        trials = Trials(simulator, options.schedule, options, range(len(costs.devices)))
        shape = shape_of(dictated, options)

        def bound_s(model: CostModel, family: Family, below_s: float) -> float:
            return min(below_s, trials.bound_s(model, family, shape))

        bounds = stacked(costs, runnable(costs, options), bound_s, own.step_s)
        notes = ["the stages were dictated; the lower bound is that of these stages"]
    assert own.found is not None
    rows = [*_alternatives(compared, (), None), record("1f1b", best.found, "no plan of 1f1b fits the memory")]
    notes += _placement(costs, own.found.candidate, options)
    return assemble(costs, own.found.candidate, options, bounds.linked_s, rows, notes, bounds)


def _schedule_fits(costs: CostModel, dictated: Dictated | None, options: PlanOptions) -> bool:
    """Whether a plan of the schedule that is asked for fits with other options."""
    if options.schedule == "auto" or plain(options.schedule):
        return any_plan_fits(costs, {}, options)
    options = admitted(options, costs.profile)
    simulator, least = Simulator(CostModel(costs.profile, costs.cluster, options)), usual(options)
    try:
        if dictated is not None:
            return dictated_best(simulator, options, dictated).found is not None
        every = runnable(simulator.costs, least)
        best, _, _ = _search(simulator, every, least, references(simulator, every, least), ())
        return tried_best(simulator, options, best).found is not None
    except InfeasibleError:
        return False


def _explained(
    simulator: Simulator,
    every: Sequence[Family],
    options: PlanOptions,
    compared: Sequence[Reference],
    best: Best,
    lower_bound_s: float,
    said: Sequence[str],
) -> Plan:
    """Return the best plan of all, or a neighbour that is faster, with what bounds it and what stands near it."""
    costs = simulator.costs
    near = neighbours(simulator, every, options, best)
    assert best.found is not None
    bounds = stacked(costs, every, least_bound_s(options), best.step_s)
    lower_bound_s = max(lower_bound_s, bounds.linked_s)
    notes, faster = [*said], list[str]()
    found = best.found
    if options.schedule == "auto" and options.solver == "dp" and not costs.divisible:
        better = improve(simulator, options, best)
        if better is not None and better.found is not None:
            near.append(Reference(found.candidate.schedule, found, None))
            found = better.found
            others = bounds_of(costs, replace(options, schedule=found.candidate.schedule), found.step_s)
            bounds = Bounds(**{name: min(each, getattr(others, name)) for name, each in bounds})
            lower_bound_s = min(lower_bound_s, others.linked_s)
        near += (quicker := listed(simulator, options, best, found.step_s))
        faster = [_faster(each, found.step_s) for each in quicker]
    notes += [
        *_excluded(compared, found.step_s),
        *faster,
        *_notes(costs, found.candidate, found.step_s, lower_bound_s, options),
    ]
    rows = _alternatives(compared, near, None)
    return assemble(costs, found.candidate, options, lower_bound_s, rows, notes, bounds, found.step_s)


def _faster(each: Reference, step_s: float) -> str:
    assert each.found is not None
    candidate = each.found.candidate
    chunks = len(candidate.stages) // len(groups(candidate.stages))
    flag = f" --chunks {chunks}" if len(chunk_counts(candidate.schedule)) > 1 else ""
    return (
        f"{each.name} is faster ({each.found.step_s / step_s - 1:+.1%}), with {chunks} stages on every device; "
        f"--schedule {candidate.schedule}{flag} plans it"
    )


def _check_stages(costs: CostModel, options: PlanOptions) -> None:
    """Refuse more stages than can be."""
    layers, devices = costs.layer_count, len(costs.devices)
    most, on = min(layers, devices), f" on {devices} devices"
    if options.schedule != "auto" and chunked(options.schedule):
        most, on = layers, ""
    if options.min_stages > most:
        raise UsageError(f"--min-stages {options.min_stages}: {layers} layers{on} make at most {most} stages")


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
        ("tied", plan.tied, shared(costs, candidate)),
    ):
        if planned != found:
            index = next((at for at, pair in enumerate(zip(planned, found, strict=False)) if pair[0] != pair[1]), None)
            at = f"$.{key}" if index is None else f"$.{key}[{index}]"
            raise FileError(
                f"the plan is not of this profile: {at} is not what the profile's layers exchange between these "
                "stages; run `autopar plan` again, with --stages for stages of your own"
            )


def _fitting(dictated: Dictated, options: PlanOptions) -> PlanOptions:
    needed = sum(dictated.widths if options.schedule == "auto" else shape_of(dictated, options).widths)
    if options.gpus is not None and needed > options.gpus:
        raise UsageError(f"--stages needs {needed} devices, but --gpus is {options.gpus}")
    if options.use_all and options.gpus is not None and needed < options.gpus:
        raise UsageError(f"--stages uses {needed} devices, but --use-all asks for all {options.gpus}")
    if len(dictated.cuts) < options.min_stages:
        raise UsageError(f"--stages has {len(dictated.cuts)} stages, but --min-stages is {options.min_stages}")
    return replace(options, gpus=options.gpus or needed)


def _search(
    simulator: Simulator,
    every: Sequence[Family],
    options: PlanOptions,
    compared: Sequence[Reference],
    known: Sequence[Candidate],
) -> tuple[Best, float, tuple[str, ...]]:
    """Search from the references and what is known on, so that the plan is never worse than one of them.

    Returns the best candidates, a lower bound of the step, and what is to be noted.
    """
    best = Best()
    constraints = Constraints.of(simulator.costs, options)
    for candidate in known:
        if _allowed(candidate, simulator.costs, options, constraints):
            best.judge(simulator, candidate)
    for reference in compared:
        if reference.found is not None and _allowed(reference.found.candidate, simulator.costs, options, constraints):
            best.consider(reference.found)
    if options.solver == "exhaustive":
        return best, exhaust(simulator, options, best).step_s, ()
    if options.solver == "milp":
        found = programmed(simulator, every, options, best)
        return best, found.lower_bound_s, found.notes
    return best, search(simulator, every, options, best).lower_bound_s, ()


def _allowed(candidate: Candidate, costs: CostModel, options: PlanOptions, constraints: Constraints) -> bool:
    """Whether a reference is one of the plans that are asked for."""
    used = sum(len(stage.devices) for stage in candidate.stages)
    shards = {stage.shard for stage in candidate.stages if len(stage.devices) > 1}
    return (
        constraints.broken(candidate.stages, costs.kind_of) is None
        and (not options.use_all or used == len(costs.devices))
        and (options.shard == "auto" or shards <= {options.shard})
    )


def _judge(simulator: Simulator, every: Sequence[Family], options: PlanOptions, dictated: Dictated) -> Best:
    """Judge the dictated stages; refuse them before anything is searched for them to be compared with."""
    costs = simulator.costs
    refusal = _refusal(costs, every, options, dictated)
    if refusal is not None:
        raise UsageError(refusal)
    own = try_stages(simulator, every, options, *dictated)
    if own.found is None and own.closest is None:
        raise UsageError(
            f"--stages: a stage has {max(dictated.widths)} replicas, more than the samples of a micro-batch of the "
            f"batch {costs.batch}; use fewer replicas or micro-batches, or a larger --batch"
        )
    if own.found is None:
        raise infeasible(costs, (), options, own.closest, partial(_stages_fit, costs, dictated))
    return own


def _stages_fit(costs: CostModel, dictated: Dictated, options: PlanOptions) -> bool:
    """Whether the dictated stages fit with other options."""
    options = admitted(options, costs.profile)
    simulator = Simulator(CostModel(costs.profile, costs.cluster, options))
    every = runnable(simulator.costs, options)
    refused = _refusal(simulator.costs, every, options, dictated) is not None
    return not refused and try_stages(simulator, every, options, *dictated).found is not None


def _refusal(costs: CostModel, every: Sequence[Family], options: PlanOptions, dictated: Dictated) -> str | None:
    """Return which constraint dictated stages do not obey with any number of micro-batches; none where they may."""
    rules = Constraints.of(costs, options)
    # What shares are given depends on the number of micro-batches.
    broken = [rules.broken(place(family, *dictated, divisible=True), costs.kind_of) for family in every]
    return None if broken[0] is None or None in broken else broken[0].refusal


def _dictated(
    costs: CostModel,
    every: Sequence[Family],
    options: PlanOptions,
    dictated: Dictated,
    own: Best,
    compared: Sequence[Reference],
    best: Best,
) -> Plan:
    assert own.found is not None

    def least(model: CostModel, family: Family, below_s: float) -> float:
        found = frames(model, family, options, *dictated)
        return min((bound(model, Candidate(*family, frame)) for frame in found), default=below_s)

    bounds = stacked(costs, every, least, own.step_s)
    if best.found is None or own.step_s < best.step_s:
        best = own
    notes = ["the stages were dictated; the lower bound is that of these stages"]
    return assemble(
        costs, own.found.candidate, options, bounds.linked_s, _alternatives(compared, (), best), notes, bounds
    )


def _alternatives(compared: Sequence[Reference], near: Sequence[Reference], best: Best | None) -> list[Alternative]:
    """Return what is listed beside a plan: what anyone would try first, the best one if it is not, and neighbours."""
    rows = [record(reference.name, reference.found, reference.reason) for reference in compared]
    if best is not None:
        rows.append(record("best", best.found))
    known = {(row.step_s, row.stages, row.infeasible) for row in rows}
    others = (record(each.name, each.found, each.reason) for each in near)
    return [*rows, *(row for row in others if (row.step_s, row.stages, row.infeasible) not in known)]


def _excluded(compared: Sequence[Reference], step_s: float) -> list[str]:
    """Say which reference is faster, as it is only where an option forbids it."""
    return [
        f"{each.name} is faster ({each.found.step_s / step_s - 1:+.1%}), but --shard, --use-all or a constraint of "
        "stages excludes it"
        for each in compared
        if each.found is not None and each.found.step_s < step_s
    ]


def _notes(
    costs: CostModel, candidate: Candidate, step_s: float, lower_bound_s: float, options: PlanOptions
) -> list[str]:
    notes = []
    if options.micro_batches is None and costs.batch > MOST_MICRO_BATCHES:
        notes.append(f"micro-batch counts above {MOST_MICRO_BATCHES} were not searched; --micro-batches asks for one")
    idle = len(costs.devices) - sum(len(stage.devices) for stage in candidate.stages)
    if idle:
        notes.append(
            f"{idle} of {len(costs.devices)} devices stay idle: no plan simulated with them is faster "
            "(--use-all forbids this)"
        )
    notes += _placement(costs, candidate, options)
    if lower_bound_s > 0 and step_s > (1 + options.gap) * lower_bound_s * (1 + 1e-9):
        notes.append(f"the search ended {step_s / lower_bound_s - 1:.1%} above its lower bound; --gap 0 searches on")
    return notes


def _placement(costs: CostModel, candidate: Candidate, options: PlanOptions) -> list[str]:
    """Say which placements were not searched, and where ranks are to be started that are not in cluster order."""
    notes = []
    exact = options.gap == 0
    if options.solver == "dp" and not pool_of(costs, exact=exact, use_all=options.use_all).complete:
        remedy = "" if exact else "; --gap 0 leaves out fewer"
        notes.append(f"not all placements on nodes were searched; the lower bound is of those that were{remedy}")
    devices = [device for stage in candidate.stages for device in stage.devices]
    nodes = {costs.devices[device].node for device in devices}
    if len(nodes) > 1 and devices != sorted(devices):
        notes.append("stages are not placed in cluster order: start rank i on the i-th device of $.stages[].devices")
    return notes
