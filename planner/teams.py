"""Teams: plans of stages that the user dictates with several devices for each replica.

In come ``stages`` such as ``0-5:2x4``; out comes the plan that one device for each replica would have, on teams of
devices, with how each divides its layers' parameters, as the profile says. Nothing prices that division yet: times and
bytes are those of one device, and the plan's notes say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.cluster import Cluster, Device
from autopar.formats.cuts import ParameterCut, SequenceCut
from autopar.formats.plan import NodeDevices, Plan, Stage
from autopar.formats.profile import Layer, LayerSplit, Profile
from autopar.hardware.kinds import planned_nodes
from autopar.hardware.topology import devices_of
from autopar.options.plan import PlanOptions
from autopar.planner import infeasible
from autopar.planner.constraints import FixedStages

NOT_PRICED = (
    "several devices run each replica of a stage, which nothing prices: times and memory are those of replicas on one "
    "device, the memory of a team's devices taken together"
)

SplitOf = Callable[[str, int], LayerSplit | None]
"""How a layer splits in so many parts; none where it does not."""


def plan_teams(
    profile: Profile, cluster: Cluster, options: PlanOptions, stages: FixedStages, plan: Callable[[PlanOptions], Plan]
) -> Plan:
    """Return a plan of dictated stages.

    Args:
        profile: says how layers split.
        cluster: has the devices.
        options: what is asked.
        stages: those that ``options`` dictate.
        plan: plans what is asked with one device for each replica.

    Raises:
        UsageError: a stage or the optimizer's step does not split so, or there are too few devices.
    """
    _check_teams(profile, options, stages)
    layers, sizes = {layer.name: layer for layer in profile.layers}, stages.team_sizes
    memory_bytes = options.memory_bytes or min(device.memory_bytes for device in cluster.devices)
    found = _within_memory(plan(_options_alone(options, stages, memory_bytes)), sizes, memory_bytes)
    needed = sum(size * stage.replicas for size, stage in _groups(found, sizes))
    devices = _devices(cluster, options, needed)
    places = _places(found, sizes, [device.node for device in devices], options.across_nodes)

    def split_of(name: str, count: int) -> LayerSplit | None:
        return layers[name].split(count)

    made = with_teams(found, sizes, places, split_of, planned_nodes(profile, devices, options.times_of))
    if options.sequence_parallel:
        tensors = {each.name: (each.producer, *each.consumers) for each in profile.tensors if each.producer is not None}
        made = with_sequences(made, tensors, split_of)
        if not any(stage.sequence for stage in made.stages):
            raise UsageError(
                "`sequence_parallel`: nothing between the layers of these stages can be kept in slices; leave it out"
            )
    if needed <= (count := len(cluster.devices)):
        return made
    note = f"the cluster lists {count} devices; the plan assumes {needed - count} more like them"
    return made.model_copy(update={"notes": (*made.notes, note)})


def _groups(plan: Plan, sizes: Sequence[int]) -> list[tuple[int, Stage]]:
    """Return the size of the teams of every group of devices, and the first of its stages."""
    return [(sizes[chunks[0]], plan.stages[chunks[0]]) for chunks in plan.groups]


def _devices(cluster: Cluster, options: PlanOptions, count: int) -> list[Device]:
    """Return every device; where the cluster lists too few, more are like those.

    Raises:
        UsageError: fewer are allowed than are needed.
    """
    if options.gpus is not None and options.gpus < count:
        raise UsageError(f"`stages` needs {count} devices, but `gpus` is {options.gpus}")
    return devices_of(cluster, max(count, len(cluster.devices)))


def check_alone(options: PlanOptions) -> None:
    """Refuse options of stages with several devices a replica where there are none.

    Raises:
        UsageError: names the option.
    """
    for name in ("sequence_parallel", "across_nodes"):
        if getattr(options, name):
            raise UsageError(f"`{name}` is of `stages` with several devices a replica, such as 0-5:2x4; leave it out")


def _check_teams(profile: Profile, options: PlanOptions, stages: FixedStages) -> None:
    """Refuse stages that no teams can run.

    Raises:
        UsageError: of another objective; the optimizer steps no parts of parameters; or a stage does not split so.
    """
    if options.objective != "step":
        raise UsageError(
            f"`stages` with several devices a replica go with `objective='step'`, not {options.objective!r}"
        )
    if profile.indivisible is not None:
        raise UsageError(
            f"`stages` with several devices a replica: the optimizer of {profile.model.source} cannot step parts of "
            f"parameters: {profile.indivisible}; give each replica one device, or profile with another optimizer"
        )
    for index, (first, stop) in enumerate(zip((0, *stages.cuts), stages.cuts, strict=False)):
        _check_splits(index, profile.layers[first:stop], stages.team_sizes[index])


def _check_splits(stage: int, layers: Sequence[Layer], count: int) -> None:
    """Refuse a stage of which nothing splits.

    Raises:
        UsageError: names the layer, and which numbers would do.
    """
    if count == 1 or any(layer.split(count) for layer in layers):
        return
    counts = sorted({split.count for layer in layers for split in layer.splits})
    do = f"the profile has splits in {', '.join(map(str, counts))}" if counts else "the profile has none of its layers"
    why = next((f"; {layer.name}: {layer.split_obstacles[0]}" for layer in layers if layer.split_obstacles), "")
    raise UsageError(
        f"`stages`: nothing in stage {stage} ({layers[0].name}..{layers[-1].name}) splits in {count} parts; {do}{why}"
    )


def _options_alone(options: PlanOptions, stages: FixedStages, memory_bytes: int) -> PlanOptions:
    """Return options of the same stages on single devices, each with the memory of the largest team."""
    asked = replace(options, sequence_parallel=False, across_nodes=False, gpus=None)
    return replace(asked, stages=_without_teams(stages), memory_bytes=memory_bytes * max(stages.team_sizes))


def _within_memory(plan: Plan, sizes: Sequence[int], memory_bytes: int) -> Plan:
    """Return a plan of single devices whose limits are those of each stage's own team, not of the largest.

    Raises:
        InfeasibleError: a stage needs more than its team has.
    """
    predicted, largest = plan.predicted, max(sizes)
    if not predicted.limit_bytes:
        return plan
    pairs = zip(predicted.limit_bytes, sizes, strict=True)
    limits = tuple(limit - memory_bytes * (largest - own) for limit, own in pairs)
    for index, (peak, limit) in enumerate(zip(predicted.peak_bytes, limits, strict=True)):
        if peak > limit:
            needs, has = infeasible.size(peak), infeasible.size(limit)
            count = f"{sizes[index]} device{'s' if sizes[index] > 1 else ''}"
            raise InfeasibleError(
                f"`stages`: a replica of stage {index} needs {needs}, and has {has} on {count}; give it more "
                "devices, or fewer layers"
            )
    return plan.model_copy(update={"predicted": predicted.model_copy(update={"limit_bytes": limits})})


def _without_teams(stages: FixedStages) -> str:
    """Return the text of the same stages with one device for each replica.

    >>> _without_teams(FixedStages((2, 3), (2, 1), (4, 1)))
    '0-1:2,2-2:1'
    """
    each = zip((0, *stages.cuts), stages.cuts, stages.widths, strict=False)
    return ",".join(f"{first}-{stop - 1}:{width}" for first, stop, width in each)


def _places(
    plan: Plan, sizes: Sequence[int], nodes: Sequence[int], across: bool
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the devices of every replica, by its first stage and its number: the first in the cluster's order.

    A team that does not fit what is left of a node begins with the next.

    Raises:
        UsageError: a team is on several nodes, or there are too few devices for all to be on one.
    """
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    free = 0
    for chunks, (size, stage) in zip(plan.groups, _groups(plan, sizes), strict=True):
        for replica in range(stage.replicas):
            start = free if across else _within_a_node(nodes, free, size)
            if start is None:
                raise UsageError(
                    f"`stages`: no node has {size} devices left for a replica of stage {chunks[0]}, which add up in "
                    "every layer; give it fewer, or pass `across_nodes=True`"
                )
            found[chunks[0], replica] = tuple(range(start, start + size))
            free = start + size
    return found


def _within_a_node(nodes: Sequence[int], free: int, size: int) -> int | None:
    """Return the first device from ``free`` on with which so many of one node begin; None where there is none."""
    starts = range(free, len(nodes) - size + 1)
    return next((start for start in starts if len(set(nodes[start : start + size])) == 1), None)


def with_teams(
    plan: Plan,
    sizes: Sequence[int],
    places: Mapping[tuple[int, int], tuple[int, ...]],
    split_of: SplitOf,
    nodes: tuple[NodeDevices, ...] = (),
) -> Plan:
    """Return a plan of replicas on one device each with a team for each.

    Args:
        plan: what is planned.
        sizes: devices of a replica, by stage.
        places: devices by the first stage of a group and replica.
        split_of: how layers are cut.
        nodes: where the devices are, if that is known.
    """
    first = {stage: chunks[0] for chunks in plan.groups for stage in chunks}
    stages = []
    for index, stage in enumerate(plan.stages):
        devices = [device for replica in range(stage.replicas) for device in places[first[index], replica]]
        cuts = _cuts(stage.layers, sizes[index], split_of)
        fields = {"devices": tuple(devices), "tensor_parallel": sizes[index], "cuts": cuts}
        stages.append(Stage(**(stage.model_dump() | fields)))
    return Plan(**(dict(plan) | {"stages": tuple(stages), "nodes": nodes, "notes": (*plan.notes, NOT_PRICED)}))


def _cuts(layers: Iterable[str], count: int, split_of: SplitOf) -> tuple[ParameterCut, ...]:
    """Return how the parameters of a stage are cut; those that several layers share are cut alike."""
    if count == 1:
        return ()
    splits = [split for layer in layers if (split := split_of(layer, count)) is not None]
    return tuple({cut.parameter: cut for split in splits for cut in split.cuts}.values())


def with_sequences(plan: Plan, tensors: Mapping[str, Sequence[str]], split_of: SplitOf) -> Plan:
    """Return a plan whose teams keep slices of what all that make or read it may have in slices.

    Args:
        plan: with teams.
        tensors: by the name of a tensor, the layer that makes it and those that read it.
        split_of: how layers split.
    """
    stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    found: dict[int, list[SequenceCut]] = {index: [] for index in stage_of.values()}
    for tensor, layers in tensors.items():
        sizes = [plan.stages[stage_of[layer]].tensor_parallel for layer in layers]
        cuts = {_sequence_cut(split_of(layer, size), tensor) for layer, size in zip(layers, sizes, strict=True)}
        cut = cuts.pop()
        if cut is not None and not cuts and len(set(sizes)) == 1:
            for stage in {stage_of[layer] for layer in layers}:
                found[stage].append(cut)
    stages = (stage.model_copy(update={"sequence": tuple(found[at])}) for at, stage in enumerate(plan.stages))
    return Plan(**(dict(plan) | {"stages": tuple(stages)}))


def _sequence_cut(split: LayerSplit | None, tensor: str) -> SequenceCut | None:
    sequence = () if split is None else split.sequence
    return next((cut for cut in sequence if cut.tensor == tensor), None)
