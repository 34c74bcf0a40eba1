"""Assemble: the chosen candidate becomes the plan file's content.

From a candidate and the cost model come the checked program, the prediction with what the ranks' time in a step goes
to, what every plan file says beside its stages, and where the times come from.

:func:`simulate` goes the other way: from a plan file to its predicted timeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.cuts import SequenceCut
from autopar.formats.document import Provenance, least_certain
from autopar.formats.plan import Plan
from autopar.formats.prediction import Alternative, Bounds, Prediction, Shares
from autopar.formats.profile import Profile
from autopar.formats.program import ActionPrices, Program
from autopar.formats.stage import Crossing, SharedParameter, Stage
from autopar.formats.timeline import Timeline, sending_of, track_of
from autopar.hardware.kinds import planned_nodes
from autopar.options.plan import PlanOptions
from autopar.ownership import meetings
from autopar.planner.bounds import binding
from autopar.planner.candidate import Candidate, CandidateStage, plain, splits_backward, with_depths
from autopar.planner.costs.curves import Collective
from autopar.planner.costs.durations import Durations, durations, plan_durations, prices_of, rank_bytes
from autopar.planner.costs.forms import slices_of
from autopar.planner.costs.model import CostModel, Peak
from autopar.planner.costs.rank_memory import backwards
from autopar.planner.dictated import check_forms, cuts_of
from autopar.planner.order import as_listed
from autopar.planner.simulator.simulate import Simulator, times_of_repetitions, trace_plan
from autopar.schedules import SCHEDULES
from autopar.schedules.check import check
from autopar.schedules.expand import action_count, expand

WIDE_SPREAD = 0.2
"""Of the times of the same layer, over their median: predictions by them are said to be uncertain."""


def plan_of(
    costs: CostModel,
    candidate: Candidate,
    options: PlanOptions,
    stages: Iterable[Stage],
    prediction: Prediction,
    notes: Iterable[str],
    **differing: Any,  # noqa: ANN401
) -> Plan:
    """Return a candidate's plan, with what every plan says beside its stages; ``differing`` are its other fields."""
    profile = costs.profile
    return Plan(
        model=profile.model,
        batch=costs.batch,
        precision=profile.precision,
        device_type=profile.device.type,
        threads=profile.device.threads,
        nodes=planned_nodes(profile, [costs.devices[at] for at in as_listed(costs)], options.times_of),
        seed=options.seed,
        bytes_per_s=options.bytes_per_s,
        times_of=costs.stands,
        divisible=costs.divisible,
        ignored_state=profile.ignored_state,
        loss_difference=profile.loss_difference,
        times_spread=profile.noise.median_spread if profile.noise.median_spread > WIDE_SPREAD else None,
        counts_labels=profile.counts_labels,
        micro_batches=candidate.micro_batches,
        micro_batch_size=candidate.micro_batch_size,
        stages=tuple(stages),
        tensors=crossings(costs, candidate),
        tied=shared_parameters(costs, candidate),
        predicted=prediction,
        notes=(*costs.notes, *notes),
        **options.average,
        **differing,
    )


def _compute_provenance(costs: CostModel, stage: CandidateStage) -> Provenance:
    """Return where the times of a stage's forwards and backwards come from."""
    unlike = costs.unlike_replicas(stage)
    known = (costs.layers[form].provenance(stage.first, stage.stop, rows) for rows, form in unlike)
    return least_certain(known) or "estimated"


def _communication_provenance(costs: CostModel, candidate: Candidate) -> Provenance | None:
    """Return where the times of a candidate's messages and reductions come from; none if it has none."""
    reductions = (
        costs.links.collective_provenance(kind, size, costs.links.place(devices))
        for kind, devices, sizes in _reductions(costs, candidate)
        for size in sizes
    )
    return least_certain((*_messages(costs, candidate), *reductions))


def _messages(costs: CostModel, candidate: Candidate) -> Iterator[Provenance]:
    level = costs.links.topology.pair
    for producer, consumer, flow in costs.flows.exchanges(candidate.cuts):
        sending, receiving = candidate.stages[producer], candidate.stages[consumer]
        for sender, receiver, samples in meetings(sending, receiving):
            ends = sending.firsts[sender], receiving.firsts[receiver]
            if ends[0] != ends[1]:
                size = costs.message_bytes(samples, candidate.micro_batch_size, flow.bytes_per_sample)
                yield costs.links.message_provenance(size, level(*ends))


def _reductions(costs: CostModel, candidate: Candidate) -> Iterator[tuple[Collective, tuple[int, ...], list[int]]]:
    """Yield the collectives that reduce gradients: kind, devices, and bytes of every one."""
    for stage in candidate.stages:
        kinds: list[Collective] = ["all_reduce"] if stage.shard == "none" else ["reduce_scatter", "all_gather"]
        buckets = costs.reductions.buckets(stage.first, stage.stop, costs.form_of(stage))
        for kind in kinds if stage.replicas.width > 1 else ():
            yield kind, stage.firsts, [size for _, size in buckets]
        for team in stage.teams if stage.team > 1 else ():
            for kind, size in costs.team_sums(stage):
                yield kind, team, [size]
    for index, holders in costs.tied_between(candidate.stages):
        for devices, size in costs.sharing_devices(index, [candidate.stages[holder] for holder in holders]):
            yield "all_reduce", devices, [size]


def time_shares(timeline: Timeline) -> Shares:
    """Return the shares of a simulated timeline, whose events stand in the order of every rank's actions.

    A rank waits for a message from when it comes to receive it; only while the message is under way does this count as
    ``messages``. Of a reduction only what follows the rank's last backward is waited for.
    """
    total = timeline.end_s * timeline.rank_count()
    if total <= 0:
        return Shares(computing=0, messages=0, reduction=0, idle=1)
    sends = (event for event in timeline if track_of(event.action.kind) == "send")
    begun = {(event.rank, event.action): event.start_s for event in sends}
    spent = {"compute": 0.0, "receive": 0.0, "reduce": 0.0}
    clock = [0.0] * timeline.rank_count()
    for event in timeline:
        rank, action, start_s, end_s = event
        track = track_of(action.kind)
        if track == "send":
            continue
        if track == "receive":
            start_s = max(start_s, begun[sending_of(event)])
        spent[track] += max(0.0, end_s - max(start_s, clock[rank]))
        clock[rank] = max(clock[rank], end_s)
    computing, messages, reduction = (min(1.0, seconds / total) for seconds in spent.values())
    idle = max(0.0, 1.0 - computing - messages - reduction)
    return Shares(computing=computing, messages=messages, reduction=reduction, idle=idle)


MOST_ACTIONS = 2**16
"""Programs above take long to expand, check and trace, action by action."""


def assemble(
    costs: CostModel,
    candidate: Candidate,
    options: PlanOptions,
    lower_bound_s: float,
    alternatives: Iterable[Alternative],
    notes: Iterable[str],
    bounds: Bounds | None = None,
    step_s: float | None = None,
) -> Plan:
    """Return the plan of a candidate, its program checked and its step simulated.

    A program of more than :data:`MOST_ACTIONS` is not expanded: its step is simulated as the search does it (unless it
    is known: ``step_s``), its bubble counts computing as long as it takes alone, and the check is left to who runs it,
    which ``autopar run`` does first.
    """
    plan = plan_of(
        costs,
        candidate,
        options,
        stage_records(costs, candidate.stages),
        prediction(costs, candidate, costs.peaks(candidate)),
        (*notes, *_writes(costs, candidate, options), *_estimates(costs, candidate)),
        schedule=schedule_of(candidate, options.schedule),
        replicate_state=options.replicate_state if _replicates_state(costs, candidate) else None,
        alternatives=tuple(alternatives),
    )
    step_s, bubble, shares = _simulate(plan, candidate, costs, step_s)
    # The program's step may differ in its last digits from the one that the search stopped at.
    least = None if bounds is None else Bounds(**{name: min(each, step_s) for name, each in bounds})
    found = {"step_s": step_s, "lower_bound_s": min(lower_bound_s, step_s), "bubble": min(1.0, bubble)}
    explained = {"bounds": least, "binding": binding(costs, candidate), "shares": shares}
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update={**found, **explained})})


def _simulate(
    plan: Plan, candidate: Candidate, costs: CostModel, step_s: float | None
) -> tuple[float, float, Shares | None]:
    """Return the step's seconds, its bubble, and what the ranks' time goes to, where a timeline is traced."""
    if action_count(plan) > MOST_ACTIONS:
        if step_s is None:
            step_s = Simulator(costs).step_s(candidate)
        return step_s, _bubble(candidate, durations(costs, candidate), step_s), None
    program = expand(plan)
    check(program, plan)
    timeline = trace_plan(plan, program, durations(costs, candidate), costs.sharing.among(candidate.used_devices))
    return timeline.end_s, timeline.bubble(), time_shares(timeline)


def _bubble(candidate: Candidate, times: Durations, step_s: float) -> float:
    """Return the share of the ranks' time in which they compute nothing."""
    own = [len(each.of(candidate.micro_batches)) for stage in candidate.stages for each in stage.samples]
    backward_s = times.backward_s
    if times.input_s:
        # About: some may be whole, some in halves.
        backward_s = [one + other for one, other in zip(times.input_s, times.weight_s, strict=True)]
    columns = zip(own, times.forward_s, backward_s, times.update_s, strict=True)
    busy_s = sum(turns * (forward_s + backward_s) + update_s for turns, forward_s, backward_s, update_s in columns)
    ranks = 1 + max(times.ranks)
    return max(0.0, 1.0 - busy_s / (ranks * step_s)) if step_s > 0 else 0.0


def candidate_of(plan: Plan, profile: Profile) -> Candidate:
    """Return the candidate that a plan was made of."""
    position = {layer.name: index for index, layer in enumerate(profile.layers)}
    stages = tuple(
        CandidateStage.of(
            position[stage.layers[0]],
            position[stage.layers[-1]] + 1,
            stage.devices,
            stage.shares,
            stage.warmup,
            stage.replication,
            tuple(sorted(position[name] for name in stage.recompute)),
        )
        for stage in plan.stages
    )
    return Candidate(plan.micro_batches, plan.micro_batch_size, plan.schedule, stages)


def stage_records(costs: CostModel, stages: Sequence[CandidateStage]) -> tuple[Stage, ...]:
    """Return stages as the plan file holds them."""
    slices = slices_of(costs.profile, stages)
    return tuple(_stage_record(costs, *each) for each in zip(stages, slices, strict=True))


def _stage_record(costs: CostModel, stage: CandidateStage, sliced: Mapping[str, int]) -> Stage:
    profile = costs.profile
    names = tuple(layer.name for layer in profile.layers[stage.first : stage.stop])
    return Stage(
        layers=names,
        devices=tuple(costs.listed[device] for device in stage.devices),
        tensor_parallel=stage.team,
        cuts=cuts_of(profile.layers[stage.first : stage.stop], stage.team),
        sequence=tuple(SequenceCut(tensor=name, dim=dim) for name, dim in sliced.items()),
        division=stage.division,
        shares=stage.shares,
        warmup=stage.warmup,
        recompute=tuple(profile.layers[layer].name for layer in stage.recompute),
        shard=stage.shard,
        types=costs.types(stage.devices),
    )


def schedule_of(candidate: Candidate, name: str = "auto") -> str:
    """Return the schedule's name: unless a name is asked for, `1f1b` with all micro-batches in flight is `gpipe`."""
    if not plain(candidate.schedule):
        return candidate.schedule
    if name == "1f1b":
        return name
    full = candidate.micro_batches > 1 and candidate.all_in_flight
    return "gpipe" if full or candidate.schedule == "gpipe" else "1f1b"


def prediction(costs: CostModel, candidate: Candidate, peaks: Iterable[Peak]) -> Prediction:
    """Return what is known of a candidate before its step is, which is 0 here."""
    stages = candidate.stages
    peak_bytes, limit_bytes = zip(*peaks, strict=True)
    return Prediction(
        step_s=0.0,
        lower_bound_s=0.0,
        bubble=0.0,
        peak_bytes=peak_bytes,
        limit_bytes=limit_bytes,
        forward_s=tuple(max(costs.forward_s(s, at) for at in costs.unlike_replicas(s).values()) for s in stages),
        compute=tuple(_compute_provenance(costs, stage) for stage in stages),
        communication=_communication_provenance(costs, candidate),
        backward_s=tuple(_backward_s(costs, stage, candidate) for stage in stages),
        loading_s=costs.profile.loading_s(costs.batch),
    )


def _backward_s(costs: CostModel, stage: CandidateStage, candidate: Candidate) -> float:
    """Return the seconds of a backward, whole or in halves as the last one is, on the slowest replica."""
    count, replicas = candidate.micro_batches, costs.unlike_replicas(stage).values()
    if splits_backward(candidate.schedule) and not backwards(candidate)[candidate.stages.index(stage)].ends_whole:
        return max(sum(costs.halves_s(stage, replica, count)) for replica in replicas)
    return max(costs.backward_s(stage, replica, count) for replica in replicas)


def shared_parameters(costs: CostModel, candidate: Candidate) -> tuple[SharedParameter, ...]:
    """Return the parameters that several stages of a candidate hold."""
    tied = costs.profile.tied
    return tuple(
        SharedParameter(parameter=tied[index].parameter, stages=holders, bytes=tied[index].bytes)
        for index, holders in costs.tied_between(candidate.stages)
    )


def crossings(costs: CostModel, candidate: Candidate) -> tuple[Crossing, ...]:
    """Return the tensors that cross between the stages of a candidate."""
    stage_of = [index for index, stage in enumerate(candidate.stages) for _ in range(stage.first, stage.stop)]
    by_name = {tensor.name: tensor for tensor in costs.profile.tensors}
    found = []
    for tensor in costs.flows.crossing:
        made = stage_of[tensor.producer]
        readers = sorted({stage_of[consumer] for consumer in tensor.consumers} - {made})
        if readers:
            found.append(
                Crossing(
                    name=tensor.name,
                    producer=made,
                    consumers=tuple(readers),
                    bytes_per_sample=tensor.bytes_per_sample,
                    dtype=by_name[tensor.name].dtype,
                    gradient=tensor.gradient,
                )
            )
    return tuple(found)


MOST_NAMED = 3
"""Layers of one kind of note that are named."""


def _replicates_state(costs: CostModel, candidate: Candidate) -> bool:
    """Tell whether a layer has several replicas whose forward writes buffers."""
    wide = (stage for stage in candidate.stages if stage.replicas.width > 1)
    layers = (layer for stage in wide for layer in costs.profile.layers[stage.first : stage.stop])
    return any(layer.writes is not None and layer.writes.buffers for layer in layers)


def _writes(costs: CostModel, candidate: Candidate, options: PlanOptions) -> list[str]:
    """Say which layers change what lasts more than once a step, have one replica, or are not recomputed, and why."""
    notes, count = list[str](), candidate.micro_batches
    if count > 1:
        changes = ((layer.name, layer.writes.single) for layer in costs.profile.layers if layer.writes is not None)
        reasons = [
            f"layer {name} trains as with gradients accumulated over {count} micro-batches, since {reason} in each; "
            "plan with `micro_batches=1` for one change a step"
            for name, reason in changes
            if reason
        ]
        notes += _some(reasons, "change such things in each micro-batch")
    if len(costs.devices) > 1:
        # What lifts it is said once.
        said = [each.reason + (each.remedy if at == 0 else "") for at, each in enumerate(costs.single.values())]
        notes += _some(said, "have one replica for such reasons")
    if options.recompute != "none":
        once = ((layer.name, layer.writes.once) for layer in costs.profile.layers if layer.writes is not None)
        reasons = [f"layer {name} is not recomputed, since {reason}" for name, reason in once if reason]
        notes += _some(reasons, "are not recomputed for such reasons")
    return notes


def _some(texts: list[str], rest: str) -> list[str]:
    more = len(texts) - MOST_NAMED
    return texts if more <= 0 else [*texts[:MOST_NAMED], f"{more} more layers {rest}"]


def _estimates(costs: CostModel, candidate: Candidate) -> list[str]:
    """Say which reductions were not measured."""
    notes = (
        costs.links.collective_note(kind, costs.links.place(devices))
        for kind, devices, _ in _reductions(costs, candidate)
        if len(devices) > 1
    )
    return list(dict.fromkeys(note for note in notes if note))


def simulate(plan: Plan, profile: Profile, cluster: Cluster, program: Program | None = None) -> Timeline:
    """Return the predicted timeline of a plan, or of a program of its actions in another order.

    Of a plan with a weight policy it is that of a pipeline from its fill to its drain, whose period
    :func:`.pipeline_times` tells.

    Raises:
        UsageError: no program follows from the plan (:attr:`Plan.refusal`).
        FileError: the plan's layers are not the profile's.
    """
    costs, candidates = price_plan(plan, profile, cluster)
    times = plan_durations(costs, candidates, plan)
    sharing = costs.sharing.among([device for each in candidates for device in each.used_devices])
    if times.teams and program is not None:
        raise UsageError(
            "a program of your own is not simulated where several devices run a replica; simulate the plan without it"
        )
    timeline = trace_plan(plan, program or expand(plan), times, sharing)
    if plan.lead:
        return timeline
    # Ranks that load for themselves do so before anything else; the rest is done while a GPU computes.
    loading_s = profile.loading_beside_s(plan.batch)
    if loading_s:
        timeline.loading.extend((rank, 0.0, loading_s) for rank in range(timeline.rank_count()))
    return timeline


REPRICED_NOTE = "priced again, and not searched; the lower bound is that of these stages"


def reprice(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    batch: int | None = None,
    memory_bytes: int | None = None,
    bytes_per_s: float | None = None,
) -> Plan:
    """Return a plan with what is predicted of it on other machines, or for another batch of as large micro-batches.

    What is None stays as it is. A plan that does not fit is returned, too: its peaks are above its limits.

    Raises:
        UsageError: it cannot be simulated, or there are too few devices, or micro-batches do not divide the batch.
        FileError: the plan's layers are not the profile's.
    """
    batch, bytes_per_s = batch or plan.batch, bytes_per_s or plan.bytes_per_s
    _check_repriced(plan, cluster, batch)
    changes = {"batch": batch, "micro_batches": batch // plan.micro_batch_size, "bytes_per_s": bytes_per_s}
    again = plan.model_copy(update=changes)
    costs, candidate = cost_model_of(again, profile, cluster, memory_bytes)
    depths = _depths(candidate_of(plan, profile), again.micro_batches)
    candidate = with_depths(candidate.family, candidate.stages, depths)
    bound_s = sum(part.seconds for part in binding(costs, candidate))
    return assemble(costs, candidate, _options_of(again, memory_bytes), bound_s, (), [REPRICED_NOTE])


def _check_repriced(plan: Plan, cluster: Cluster, batch: int) -> None:
    devices, there, count = max(plan.devices) + 1, len(cluster.devices), batch // plan.micro_batch_size
    plan.policy.check("reprice")
    if devices > there:
        raise UsageError(f"the plan is for {devices} devices, and the cluster has {there}; plan with `gpus={there}`")
    if batch % plan.micro_batch_size:
        raise UsageError(
            f"`batch={batch}` is no multiple of the plan's micro-batches, of {plan.micro_batch_size} samples; give "
            f"{max(1, count) * plan.micro_batch_size}, or plan again"
        )
    turns = max(stage.period for stage in plan.stages)
    if count < turns:
        least = turns * plan.micro_batch_size
        raise UsageError(f"`batch={batch}` is too little for {turns} replicas that take turns; give at least {least}")


def _depths(candidate: Candidate, micro_batches: int) -> list[int]:
    """Return how many micro-batches stages have in flight where a step has more of them, or fewer."""
    stages = candidate.stages
    groups = len({stage.devices for stage in stages})
    named = SCHEDULES[candidate.schedule].warmups
    now, then = (named(groups, len(stages) // groups, count) for count in (candidate.micro_batches, micro_batches))
    own = [stage.warmup for stage in stages]
    most = [stage.replicas.most(micro_batches) for stage in stages]
    usual = next((then[name] for name, depths in now.items() if list(depths) == own), None)
    return list(map(min, usual or (most if candidate.all_in_flight else own), most))


def action_prices(plan: Plan, profile: Profile, cluster: Cluster, program: Program | None = None) -> ActionPrices:
    """Return what the actions of a plan are priced at, each as if nothing else went on; see :func:`simulate`."""
    costs, candidates = price_plan(plan, profile, cluster)
    times = times_of_repetitions(plan, plan_durations(costs, candidates, plan))
    found = prices_of(program or expand(plan), times)
    holds = tuple(held for each in candidates for held in rank_bytes(costs, each))
    return replace(found, holds=holds, slowed=bool(costs.sharing))


def cost_model_of(
    plan: Plan, profile: Profile, cluster: Cluster, memory_bytes: int | None = None
) -> tuple[CostModel, Candidate]:
    """Return what prices a plan's actions, and the candidate that the plan, of one pipeline, was made of."""
    costs, (candidate,) = price_plan(plan, profile, cluster, memory_bytes)
    return costs, candidate


def price_plan(
    plan: Plan, profile: Profile, cluster: Cluster, memory_bytes: int | None = None
) -> tuple[CostModel, list[Candidate]]:
    """Return what prices a plan's actions, and the candidates that its pipelines were made of."""
    if plan.refusal is not None:
        raise UsageError(f"{plan.refusal}: the simulator has no programs of such plans")
    costs = CostModel(profile, cluster, _options_of(plan, memory_bytes))
    return costs, [_candidate(each, costs) for each in plan.separate]


def _candidate(plan: Plan, costs: CostModel) -> Candidate:
    """Return the candidate that a pipeline was made of, which is of these layers."""
    profile, placed = costs.profile, (name for stage in plan.stages for name in stage.layers)
    pairs = zip_longest(placed, (layer.name for layer in profile.layers), fillvalue="nothing")
    for index, (planned, name) in enumerate(pairs):
        if planned != name:
            raise FileError(
                f"the plan is not of this profile: layer {index} is {planned!r} in the plan and {name!r} in the "
                "profile; run `autopar plan` again"
            )
    candidate = candidate_of(plan, profile)
    check_forms(costs, candidate)
    _check_flows(plan, candidate, costs)
    return candidate


def _options_of(plan: Plan, memory_bytes: int | None) -> PlanOptions:
    """Return the options of which a plan's prices depend, and that it records."""
    names = ("batch", "schedule", "bytes_per_s", "times_of", "divisible", "ema_decay", "replicate_state", "seed")
    same = {name: getattr(plan, name) for name in names}
    used_weights = None if plan.ema_decay is None else plan.used_weights
    return PlanOptions(gpus=max(plan.devices) + 1, memory_bytes=memory_bytes, used_weights=used_weights, **same)


def _check_flows(plan: Plan, candidate: Candidate, costs: CostModel) -> None:
    """Refuse a plan that sends or shares other than what the profile says, as an edited one may."""
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
