"""PipeDreamPlan: the plan that PipeDream's own objective calls best, for throughput of an asynchronous pipeline."""

from __future__ import annotations

from itertools import groupby, takewhile
from typing import NamedTuple

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.hardware.topology import Topology
from reproductions.pipedream_graph import pipedream_graph
from reproductions.pipedream_levels import Level, LevelStage, LevelTable, data_parallel_s, layer_seconds

__all__ = ["PipeDreamPlan", "PipeDreamStage", "pipedream_plan"]


class PipeDreamStage(NamedTuple):
    """Layers ``first`` to before ``stop``, one replica on each of the devices."""

    first: int
    stop: int
    devices: tuple[int, ...]
    """In cluster order: the same places on each of one or several nodes."""

    @property
    def replicas(self) -> int:
        """How many hold the stage."""
        return len(self.devices)


class PipeDreamPlan(NamedTuple):
    """Stages in order, and seconds per mini-batch of the profile by PipeDream's formulas."""

    stages: tuple[PipeDreamStage, ...]
    bottleneck_s: float
    data_parallel_s: float
    """Of every device holding all layers."""
    one_device_s: float


def pipedream_plan(
    profile: Profile, cluster: Cluster, gpus: int | None = None, bytes_per_s: float | None = None
) -> PipeDreamPlan:
    """Return the plan with the least bottleneck by PipeDream's formulas, cut anywhere in the profile's order.

    Of plans that are equally good, one with the fewest nodes (on one node: devices); those it takes are used whole, as
    PipeDream's are. PipeDream's optimizer cuts at the antichains of the model's graph, which can be exponentially
    many; an order of layers has as many cuts as layers. As there, no memory limit is kept, and latencies count nothing.

    Args:
        profile: costs of the largest mini-batch that all layers were profiled with.
        cluster: devices on equal nodes; the bandwidths of its links are those of the two levels.
        gpus: at most so many devices, the first of the cluster; none: all.
        bytes_per_s: bandwidth of every link in place of the cluster's.

    >>> from pathlib import Path
    >>> from autopar.formats.cluster import Device, Link
    >>> from autopar.interop.pipedream import pipedream_profile
    >>> line = "-- forward_compute_time=2, backward_compute_time=4, activation_size=6e3, parameter_size"
    >>> text = f"node1 -- Linear {line}=0\\nnode2 -- Linear {line}=9e9\\n\\tnode1 -- node2"
    >>> node = Link(level="node", latency_s=0.0, bytes_per_s=1e9)
    >>> cluster = Cluster(devices=(Device(type="V100", memory_bytes=16 * 10**9),) * 3, links=(node,))
    >>> plan = pipedream_plan(pipedream_profile(text, Path("two.txt")), cluster)
    >>> [(stage.first, stage.stop, stage.devices) for stage in plan.stages], plan.bottleneck_s
    ([(0, 1, (0,)), (1, 2, (1,))], 0.006)

    Raises:
        InfeasibleError: the cluster has fewer devices.
        UsageError: the nodes are not of equal size, which PipeDream's planner does not know.
    """
    levels = _levels(cluster, len(cluster.devices) if gpus is None else gpus, bytes_per_s)
    graph = pipedream_graph(profile)
    seconds, tables = layer_seconds(graph), []
    for level in levels:
        last = level is levels[-1]
        ends = not last and levels[-1].machines == 2
        tables.append(LevelTable(graph, seconds, level, only_from_first=last, only_ends=ends))
        seconds = tables[-1].seconds
    return PipeDreamPlan(
        stages=tuple(_placed(tables, levels, len(profile.layers))),
        bottleneck_s=tables[-1].best()[1],
        data_parallel_s=data_parallel_s(graph, levels),
        one_device_s=float(graph.seconds[-1]),
    )


def _levels(cluster: Cluster, gpus: int, bytes_per_s: float | None) -> tuple[Level, ...]:
    """Return the devices of a node and the nodes, without a level of one machine."""
    if gpus > len(cluster.devices):
        count = len(cluster.devices)
        raise InfeasibleError(f"`gpus={gpus}`: cluster {cluster.name!r} has {count} devices; use `gpus={count}`")
    sizes = [len(list(devices)) for _, devices in groupby(device.node for device in cluster.devices[:gpus])]
    if len(set(sizes)) > 1:
        found = ", ".join(map(str, sizes))
        raise UsageError(
            f"PipeDream's planner knows only nodes of equal size, and {gpus} devices of cluster {cluster.name!r} "
            f"are on nodes of {found}; use `gpus={sum(takewhile(sizes[0].__eq__, sizes))}`"
        )
    # Its formulas know bandwidths alone, so that the widest of a level's links is the quickest.
    rates = {link.level: link.bytes_per_s for link in sorted(cluster.links, key=lambda link: link.bytes_per_s)}
    levels = [Level(sizes[0], bytes_per_s or rates["node"], 1)] if sizes[0] > 1 or len(sizes) == 1 else []
    if len(sizes) > 1:
        among = Topology(cluster, cluster.devices[:gpus]).level(range(gpus))
        levels.append(Level(len(sizes), bytes_per_s or rates[among], sizes[0]))
    return tuple(levels)


def _placed(tables: list[LevelTable], levels: tuple[Level, ...], layers: int) -> list[PipeDreamStage]:
    """Place stages on devices in cluster order: a level's stages one after the other, alike on all of its machines."""
    placed, node = [], 0
    for outer in tables[-1].stages(0, layers, tables[-1].best()[0]):
        if len(levels) == 1:
            inner, nodes = [outer], [0]
        else:
            inner, nodes = (
                tables[0].stages(outer.first, outer.stop, levels[0].machines),
                list(range(node, node + outer.machines)),
            )
        begins = node if len(levels) == 1 else 0
        for stage in inner:
            devices = _devices(stage, begins, nodes, levels[0].machines)
            placed.append(PipeDreamStage(stage.first, stage.stop, devices))
            begins += stage.machines
        node += outer.machines
    return placed


def _devices(stage: LevelStage, begins: int, nodes: list[int], per_node: int) -> tuple[int, ...]:
    return tuple(node * per_node + begins + place for node in nodes for place in range(stage.machines))
