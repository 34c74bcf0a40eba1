"""Machines: nodes of known GPUs and their network become a cluster with estimated links and curves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.formats.cluster import Cluster, Curve, CurveKind, Device, Level, Link
from autopar.hardware.collectives import NETWORK_SHARE, Group, NodeLinks, collective_s, message_latency_s
from autopar.hardware.gpus import Gpu

LARGEST_BYTES = 2**30
"""Largest message of an estimated curve."""
REACHED = 229 / 300
"""Of its links' rate, where nobody stated what collectives reach: the share that eight A100 were measured to reach."""
_KINDS: tuple[CurveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Node:
    """A machine with equal GPUs."""

    gpu: Gpu
    gpus: int
    memory_bytes: int | None = None
    """Of a GPU, in place of what is known of its kind."""
    price_per_hour: float | None = None
    """Of a GPU."""
    bytes_per_s: float | None = None
    """What collectives reach in the node, in place of what is known of the GPU."""
    rack: int = 0


@dataclass(frozen=True)
class Network:
    """What connects nodes."""

    bytes_per_s: float
    """Of a node, in one direction; or of each device, which then shares it with none."""
    latency_s: float = 0.0
    """Of a message, beyond what NCCL's own constants say."""
    per_device: bool = False

    def of_node(self, gpus: int) -> float:
        """Return what a node of so many GPUs sends, all of them together."""
        return self.bytes_per_s * (gpus if self.per_device else 1)


def message_sizes(largest_bytes: int) -> tuple[int, ...]:
    """Return twelve sizes from 1 KiB, evenly on a logarithmic scale, whole numbers of 64 bytes.

    >>> message_sizes(64 * 2**20)[:4]
    (1024, 2816, 7680, 21056)
    """
    exponents = math.log2(largest_bytes) - 10
    return tuple(round(2 ** (10 + exponents * index / 11) / 64) * 64 for index in range(12))


def cluster_of(
    name: str, nodes: Sequence[Node], network: Network, notes: Sequence[str] = (), rack: Network | None = None
) -> Cluster:
    """Return nodes as a cluster; where they differ, links and curves are those of the slowest.

    With ``rack``, that is what connects the nodes of a rack, and ``network`` the racks. Curves over several nodes are
    for whole nodes, and for one GPU on each, whose other GPUs are assumed to send at the same time.
    """
    devices = tuple(
        Device(
            type=node.gpu.name,
            memory_bytes=node.memory_bytes or node.gpu.memory_bytes,
            node=index,
            rack=node.rack,
            price_per_hour=node.price_per_hour,
        )
        for index, node in enumerate(nodes)
        for _ in range(node.gpus)
    )
    slowest = _slowest(nodes, network)
    connections = [Link(level="node", latency_s=message_latency_s(1, slowest), bytes_per_s=slowest.peer_bytes_per_s)]
    curves = list(_node_curves(nodes, slowest))
    for level, among, count in _among_nodes(nodes, network, rack):
        links = _slowest(nodes, among)
        connections.append(_between(level, links, per_device=among.per_device))
        curves += _curves(level, nodes, count, links)
    return Cluster(
        name=name, backend="nccl", devices=devices, links=tuple(connections), curves=tuple(curves), notes=tuple(notes)
    )


def _among_nodes(nodes: Sequence[Node], network: Network, rack: Network | None) -> Iterator[tuple[Level, Network, int]]:
    """Yield the levels that connect nodes, and how many nodes there are to connect."""
    racks = Counter(node.rack for node in nodes)
    if rack is not None and max(racks.values()) > 1:
        yield "rack", rack, max(racks.values())
    if len(racks) > 1 if rack is not None else len(nodes) > 1:
        yield "network", network, len(nodes)


def _between(level: Level, links: NodeLinks, *, per_device: bool) -> Link:
    rate, shared = links.network_bytes_per_s * NETWORK_SHARE, links.devices
    if per_device:
        rate, shared = rate / links.devices, 1
    return Link(level=level, latency_s=message_latency_s(2, links), bytes_per_s=rate, shared_by=shared)


def _slowest(nodes: Sequence[Node], network: Network) -> NodeLinks:
    return min((_links(node, network) for node in nodes), key=lambda links: (links.bus_bytes_per_s, -links.devices))


def _links(node: Node, network: Network) -> NodeLinks:
    gpu = node.gpu
    linked = gpu.nvlink_bytes_per_s > 0
    rate = gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s
    bus = node.bytes_per_s or gpu.collective_bytes_per_s or rate * REACHED
    return NodeLinks(
        kind="nvlink" if linked else "pcie",
        bus_bytes_per_s=bus,
        peer_bytes_per_s=bus * (gpu.peer_bytes_per_s / rate),
        devices=node.gpus,
        network_bytes_per_s=network.of_node(node.gpus),
        network_latency_s=network.latency_s,
    )


def _node_curves(nodes: Sequence[Node], links: NodeLinks) -> Iterator[Curve]:
    most = max(node.gpus for node in nodes)
    if most > 1:
        yield _curve("p2p", "node", Group(1, 2), links)
        yield from (_curve(kind, "node", Group(1, count), links) for count in group_sizes(most) for kind in _KINDS)


def _curves(level: Level, nodes: Sequence[Node], count: int, links: NodeLinks) -> Iterator[Curve]:
    yield _curve("p2p", level, Group(2, 1), links)
    for group in _groups(count, min(node.gpus for node in nodes)):
        yield from (_curve(kind, level, group, links) for kind in _KINDS)


def _groups(nodes: int, per_node: int) -> Iterator[Group]:
    """Yield groups over several nodes, no two of the same size.

    >>> [tuple(group) for group in _groups(4, 8)]
    [(2, 1), (4, 1), (2, 8), (4, 8)]
    >>> [tuple(group) for group in _groups(3, 1)]
    [(2, 1), (3, 1)]
    """
    yield from (Group(count, 1) for count in group_sizes(nodes) if count < 2 * per_node)
    yield from (Group(count, per_node) for count in group_sizes(nodes))


def group_sizes(most: int) -> list[int]:
    """Return 2, 4, 8 .. and the most.

    >>> group_sizes(12), group_sizes(1)
    ([2, 4, 8, 12], [])
    """
    powers = [2**exponent for exponent in range(1, most.bit_length()) if 2**exponent <= most]
    return powers if most < 2 or most in powers else [*powers, most]


def _curve(kind: CurveKind, level: Level, group: Group, links: NodeLinks) -> Curve:
    sizes = message_sizes(LARGEST_BYTES)
    seconds = tuple(collective_s(kind, size, group, links) for size in sizes)
    ranks = group.ranks
    return Curve(kind=kind, ranks=ranks, level=level, sizes=sizes, seconds=seconds, provenance="estimated")
