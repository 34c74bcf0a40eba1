"""Teams: plans of stages that the user dictates with several devices for each replica.

In come ``stages`` such as ``0-5:2x4``; out comes the plan that one device for each replica would have, on teams of
devices, with how each divides its layers' parameters, as the profile says. Nothing prices that division yet: times and
bytes are those of one device, and the plan's notes say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.cuts import ParameterCut
from autopar.formats.plan import Plan, Stage
from autopar.formats.profile import Layer, Profile
from autopar.planner.constraints import FixedStages
from autopar.planner.options import PlanOptions

NOT_PRICED = (
    "several devices run each replica of a stage, which nothing prices: times and memory are those of replicas on one "
    "device, the memory of a team's devices taken together"
)

SplitOf = Callable[[str, int], tuple[ParameterCut, ...]]
"""How a layer's parameters are cut in so many parts; none where it does not split."""


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
    if options.objective != "step":
        raise UsageError(
            f"`stages` with several devices a replica go with `objective='step'`, not {options.objective!r}"
        )
    _check_optimizer(profile)
    layers = {layer.name: layer for layer in profile.layers}
    for index, (first, stop) in enumerate(zip((0, *stages.cuts), stages.cuts, strict=False)):
        _check_splits(index, profile.layers[first:stop], stages.team_sizes[index])
    memory_bytes = options.memory_bytes or min(device.memory_bytes for device in cluster.devices)
    alone = replace(
        options,
        stages=_without_teams(stages),
        gpus=None if options.gpus is None else sum(stages.widths),
        memory_bytes=memory_bytes * max(stages.team_sizes),
    )
    nodes = [device.node for device in cluster.devices[: options.gpus]]
    found = plan(alone)
    places = _places(found, stages.team_sizes, nodes, options.across_nodes)
    return with_teams(found, stages.team_sizes, places, lambda name, count: _split(layers[name], count))


def _check_optimizer(profile: Profile) -> None:
    """Refuse an optimizer that steps no parts of parameters.

    Raises:
        UsageError: says why it does not, and what to do.
    """
    if profile.indivisible is not None:
        raise UsageError(
            f"`stages` with several devices a replica: the optimizer of {profile.model.source} cannot step parts of "
            f"parameters: {profile.indivisible}; give each replica one device, or profile with another optimizer"
        )


def _check_splits(stage: int, layers: Sequence[Layer], count: int) -> None:
    """Refuse a stage of which nothing splits.

    Raises:
        UsageError: names the layer, and which numbers would do.
    """
    if count == 1 or any(_split(layer, count) for layer in layers):
        return
    counts = sorted({split.count for layer in layers for split in layer.splits})
    do = f"the profile has splits in {', '.join(map(str, counts))}" if counts else "the profile has none of its layers"
    why = next((f"; {layer.name}: {layer.split_obstacles[0]}" for layer in layers if layer.split_obstacles), "")
    raise UsageError(
        f"`stages`: nothing in stage {stage} ({layers[0].name}..{layers[-1].name}) splits in {count} parts; {do}{why}"
    )


def _split(layer: Layer, count: int) -> tuple[ParameterCut, ...]:
    found = layer.split(count)
    return () if found is None else found.cuts


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
    """Return the devices of every replica, by its first stage and its number, in the cluster's order.

    Raises:
        UsageError: there are too few, or a team would be on several nodes.
    """
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    free = 0
    for chunks in plan.groups:
        size = sizes[chunks[0]]
        for replica in range(plan.stages[chunks[0]].replicas):
            while (
                not across
                and size <= nodes.count(nodes[min(free, len(nodes) - 1)])
                and len(set(nodes[free : free + size])) > 1
            ):
                free += 1
            team = tuple(range(free, free + size))
            _check_place(chunks[0], team, nodes, across)
            found[chunks[0], replica] = team
            free += size
    return found


def _check_place(stage: int, team: tuple[int, ...], nodes: Sequence[int], across: bool) -> None:
    if team[-1] >= len(nodes):
        raise UsageError(f"`stages` needs more than the {len(nodes)} devices that there are, stage {stage} on the last")
    if not across and len({nodes[device] for device in team}) > 1:
        raise UsageError(
            f"`stages`: {len(team)} devices that run a replica of stage {stage} are on several nodes, and add up over "
            "the network in every layer; give it fewer, or pass `across_nodes=True`"
        )


def with_teams(
    plan: Plan, sizes: Sequence[int], places: Mapping[tuple[int, int], tuple[int, ...]], split_of: SplitOf
) -> Plan:
    """Return a plan of replicas on one device each with a team for each.

    Args:
        plan: what is planned.
        sizes: devices of a replica, by stage.
        places: devices by the first stage of a group and replica.
        split_of: how layers are cut.
    """
    first = {stage: chunks[0] for chunks in plan.groups for stage in chunks}
    stages = []
    for index, stage in enumerate(plan.stages):
        devices = [device for replica in range(stage.replicas) for device in places[first[index], replica]]
        cuts = _cuts(stage.layers, sizes[index], split_of)
        fields = {"devices": tuple(devices), "tensor_parallel": sizes[index], "cuts": cuts}
        stages.append(Stage(**(stage.model_dump() | fields)))
    return Plan(**(dict(plan) | {"stages": tuple(stages), "notes": (*plan.notes, NOT_PRICED)}))


def _cuts(layers: Iterable[str], count: int, split_of: SplitOf) -> tuple[ParameterCut, ...]:
    """Return how the parameters of a stage are cut; those that several layers share are cut alike."""
    if count == 1:
        return ()
    found = {cut.parameter: cut for layer in layers for cut in split_of(layer, count)}
    return tuple(found.values())
