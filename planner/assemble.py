"""Assemble: the chosen candidate becomes the plan file's content.

From a candidate and the cost model come the checked program, the prediction with what the ranks' time in a step goes
to, the heading that every plan file begins with, and where the times come from.

:func:`simulate` goes the other way: from a plan file to its predicted timeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypedDict

from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster, Level
from autopar.formats.document import Provenance, least_certain
from autopar.formats.plan import (
    Alternative,
    Bounds,
    Crossing,
    Plan,
    Prediction,
    ScheduleName,
    SharedParameter,
    Shares,
    Stage,
)
from autopar.formats.profile import DeviceType, ModelSource, Precision, Profile
from autopar.formats.program import RECEIVE, RECEIVE_GRADIENT, SEND, SEND_GRADIENT, Action, Program
from autopar.formats.timeline import Timeline, track_of
from autopar.planner.bounds.ranks import binding
from autopar.planner.candidate import Candidate, CandidateStage, plain, splits_backward
from autopar.planner.costs.durations import Durations, durations
from autopar.planner.costs.in_flight import backwards
from autopar.planner.costs.links import Collective, Traffic
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.simulator.simulate import Simulator, trace
from autopar.schedules.check import check
from autopar.schedules.expand import action_count, expand
from autopar.schedules.route import Routes


class Heading(TypedDict):
    """What a plan says of anything but its stages; fields as of the plan."""

    model: ModelSource
    batch: int
    precision: Precision
    device_type: DeviceType
    threads: int
    seed: int
    bytes_per_s: float | None
    times_of: str | None
    divisible: bool
    ignored_state: tuple[str, ...]
    loss_difference: float | None
    counts_labels: bool


def heading(costs: CostModel, options: PlanOptions) -> Heading:
    """Return what every plan for a profile and options begins with."""
    profile = costs.profile
    return Heading(
        model=profile.model,
        batch=costs.batch,
        precision=profile.precision,
        device_type=profile.device.type,
        threads=profile.device.threads,
        seed=options.seed,
        bytes_per_s=options.bytes_per_s,
        times_of=costs.stands,
        divisible=costs.divisible,
        ignored_state=profile.ignored_state,
        loss_difference=profile.loss_difference,
        counts_labels=profile.counts_labels,
    )


def compute_provenance(costs: CostModel, stage: CandidateStage) -> Provenance:
    """Return where the times of a stage's forwards and backwards come from."""
    placed = {(rows, costs.kind_of[device]) for rows, device in zip(stage.shares, stage.devices, strict=True)}
    known = (costs.layers[kind].provenance(stage.first, stage.stop, rows) for rows, kind in placed)
    return least_certain(known) or "estimated"


def communication_provenance(costs: CostModel, candidate: Candidate) -> Provenance | None:
    """Return where the times of a candidate's messages and reductions come from; none if it has none."""
    return least_certain((*_messages(costs, candidate), *_reductions(costs, candidate)))


def _messages(costs: CostModel, candidate: Candidate) -> Iterator[Provenance]:
    known, level = Routes(), costs.links.topology.pair
    for producer, consumer, flow in costs.flows.exchanges(candidate.cuts):
        sending, receiving = candidate.stages[producer], candidate.stages[consumer]
        sent: set[tuple[float, Level]] = set()
        for route in known.between(sending, receiving):
            ends = sending.devices[route.sender], receiving.devices[route.receiver]
            if ends[0] != ends[1]:
                size = costs.message_bytes(route, candidate.micro_batch_size, flow.bytes_per_sample)
                sent.add((size, level(*ends)))
        yield from (costs.links.message_provenance(*each) for each in sent)


def _reductions(costs: CostModel, candidate: Candidate) -> Iterator[Provenance]:
    for stage in candidate.stages:
        ranks, level = len(stage.devices), costs.links.level(stage.devices)
        kinds: list[Collective] = ["all_reduce"] if stage.shard == "none" else ["reduce_scatter", "all_gather"]
        for kind in kinds if ranks > 1 else ():
            for _, size in costs.reductions.buckets(stage.first, stage.stop):
                yield costs.links.collective_provenance(kind, size, ranks, level)
    for index, holders in costs.tied_between(candidate.stages):
        devices = list(dict.fromkeys(each for holder in holders for each in candidate.stages[holder].devices))
        size = costs.flows.tied[index].bytes
        yield costs.links.collective_provenance("all_reduce", size, len(devices), costs.links.level(devices))


_SENT_AS = {RECEIVE: SEND, RECEIVE_GRADIENT: SEND_GRADIENT}

Message = tuple[str, int, int, int, int, int]
"""Kind of the send, micro-batch, sender and its stage, receiver and its stage."""


def shares_of(timeline: Timeline) -> Shares:
    """Return the shares of a simulated timeline, whose events stand in the order of every rank's actions.

    A rank waits for a message from when it comes to receive it; only while the message is under way does this count as
    ``messages``. Of a reduction only what follows the rank's last backward is waited for.
    """
    total = timeline.end_s * timeline.rank_count()
    if total <= 0:
        return Shares(computing=0, messages=0, reduction=0, idle=1)
    begun: dict[Message, float] = {}
    for rank, action, start_s, _ in timeline:
        if track_of(action.kind) == "send":
            begun[action.kind, action.micro_batch, rank, action.stage, action.peer, action.peer_stage] = start_s
    spent = {"compute": 0.0, "receive": 0.0, "reduce": 0.0}
    clock = [0.0] * timeline.rank_count()
    for rank, action, start_s, end_s in timeline:
        track = track_of(action.kind)
        if track == "send":
            continue
        if track == "receive":
            start_s = max(start_s, begun[_sending(rank, action)])
        spent[track] += max(0.0, end_s - max(start_s, clock[rank]))
        clock[rank] = max(clock[rank], end_s)
    computing, messages, reduction = (min(1.0, seconds / total) for seconds in spent.values())
    idle = max(0.0, 1.0 - computing - messages - reduction)
    return Shares(computing=computing, messages=messages, reduction=reduction, idle=idle)


def _sending(rank: int, action: Action) -> Message:
    """Return the send that a receive of a rank waits for."""
    return _SENT_AS[action.kind], action.micro_batch, action.peer, action.peer_stage, rank, action.stage


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
    plan = Plan(
        **heading(costs, options),
        schedule=_schedule(candidate),
        micro_batches=candidate.micro_batches,
        micro_batch_size=candidate.micro_batch_size,
        stages=tuple(stage_record(costs, stage) for stage in candidate.stages),
        tensors=crossings(costs, candidate),
        tied=shared_parameters(costs, candidate),
        replicate_state=options.replicate_state if _replicates_state(costs, candidate) else None,
        predicted=_prediction(costs, candidate),
        alternatives=tuple(alternatives),
        notes=(*costs.notes, *notes, *_writes(costs, candidate, options), *_estimates(costs, candidate)),
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
    timeline = _trace(program, candidate, costs)
    return timeline.end_s, timeline.bubble(), shares_of(timeline)


def _bubble(candidate: Candidate, times: Durations, step_s: float) -> float:
    """Return the share of the ranks' time in which they compute nothing."""
    own = [
        stage.turns(replica, candidate.micro_batches)
        for stage in candidate.stages
        for replica in range(len(stage.devices))
    ]
    backward_s = times.backward_s
    if times.input_s:
        # About: some may be whole, some in halves.
        backward_s = [one + other for one, other in zip(times.input_s, times.weight_s, strict=True)]
    columns = zip(own, times.forward_s, backward_s, times.update_s, strict=True)
    busy_s = sum(turns * (forward_s + backward_s) + update_s for turns, forward_s, backward_s, update_s in columns)
    ranks = 1 + max(times.ranks)
    return max(0.0, 1.0 - busy_s / (ranks * step_s)) if step_s > 0 else 0.0


def timeline_of(plan: Plan, costs: CostModel) -> Timeline:
    """Simulate a plan's own program."""
    return _trace(expand(plan), candidate_of(plan, costs.profile), costs)


def _trace(program: Program, candidate: Candidate, costs: CostModel) -> Timeline:
    traffic = Traffic(costs.sharing, candidate.devices) if costs.sharing else None
    return trace(program, durations(costs, candidate), traffic)


def candidate_of(plan: Plan, profile: Profile) -> Candidate:
    """Return the candidate that a plan was made of."""
    position = {layer.name: index for index, layer in enumerate(profile.layers)}
    stages = tuple(
        CandidateStage(
            position[stage.layers[0]],
            position[stage.layers[-1]] + 1,
            stage.devices,
            stage.shares,
            stage.warmup,
            tuple(sorted(position[name] for name in stage.recompute)),
            stage.shard,
            stage.division,
        )
        for stage in plan.stages
    )
    return Candidate(plan.micro_batches, plan.micro_batch_size, plan.schedule, stages)


def stage_record(costs: CostModel, stage: CandidateStage) -> Stage:
    """Return a stage as the plan file holds it."""
    profile = costs.profile
    names = tuple(layer.name for layer in profile.layers[stage.first : stage.stop])
    return Stage(
        layers=names,
        devices=stage.devices,
        division=stage.division,
        shares=stage.shares,
        warmup=stage.warmup,
        recompute=tuple(profile.layers[layer].name for layer in stage.recompute),
        shard=stage.shard,
        types=costs.types(stage.devices),
    )


def _schedule(candidate: Candidate) -> ScheduleName:
    """Return the schedule's name: with all micro-batches in flight everywhere, `1f1b` is `gpipe`."""
    count = candidate.micro_batches
    if not plain(candidate.schedule):
        return candidate.schedule
    if count > 1 and all(stage.warmup == stage.turns(0, count) for stage in candidate.stages):
        return "gpipe"
    return "gpipe" if candidate.schedule == "gpipe" else "1f1b"


def _prediction(costs: CostModel, candidate: Candidate) -> Prediction:
    """Return what is known of a candidate before its program is simulated."""
    stages = candidate.stages
    return Prediction(
        step_s=0.0,
        lower_bound_s=0.0,
        bubble=0.0,
        peak_bytes=tuple(costs.peak_bytes(candidate)),
        limit_bytes=tuple(costs.limit_bytes(stage.devices) for stage in stages),
        forward_s=tuple(max(costs.forward_s(s, replica) for replica in range(len(s.devices))) for s in stages),
        compute=tuple(compute_provenance(costs, stage) for stage in stages),
        communication=communication_provenance(costs, candidate),
        backward_s=tuple(_backward_s(costs, stage, candidate) for stage in stages),
    )


def _backward_s(costs: CostModel, stage: CandidateStage, candidate: Candidate) -> float:
    """Return the seconds of a backward, whole or in halves as the last one is, on the slowest replica."""
    count, replicas = candidate.micro_batches, range(len(stage.devices))
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
    wide = (stage for stage in candidate.stages if len(stage.devices) > 1)
    layers = (layer for stage in wide for layer in costs.profile.layers[stage.first : stage.stop])
    return any(layer.writes is not None and layer.writes.buffers for layer in layers)


def _writes(costs: CostModel, candidate: Candidate, options: PlanOptions) -> list[str]:
    """Say which layers have one replica, or are not recomputed, and why."""
    notes = []
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
    groups: list[tuple[Collective, tuple[int, ...]]] = []
    for stage in candidate.stages:
        if len(stage.devices) > 1:
            kinds: list[Collective] = ["all_reduce"] if stage.shard == "none" else ["reduce_scatter", "all_gather"]
            groups += [(kind, stage.devices) for kind in kinds]
    for _, holders in costs.tied_between(candidate.stages):
        devices = tuple(dict.fromkeys(each for index in holders for each in candidate.stages[index].devices))
        groups.append(("all_reduce", devices))
    notes = [
        costs.links.collective_note(kind, len(group), costs.links.level(group))
        for kind, group in groups
        if len(group) > 1
    ]
    return list(dict.fromkeys(note for note in notes if note))


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
