"""Clusters: built-in ones by name, own ones from a file.

    name    = part { "+" part } [ ":" bandwidth [ ":" bandwidth ] ]
    part    = [ [ racks "x" ] nodes "x" ] gpus "x" GPU
    8xH100                      one node of eight
    4x8xA100-80G:200Gbps        four nodes of eight; each node sends 200 Gbit/s to the others
    4xA100+2x4xV100:100Gbps     three nodes of four, two of them with other GPUs
    2x4x8xH100:400Gbps:100Gbps  two racks of four such nodes; each node sends 400 Gbit/s to those of its rack, and
                                100 Gbit/s to those of the other
    2x8xH100:400Gbps/gpu        each GPU sends 400 Gbit/s to the other node, and shares that with none
    8xH100:400Gbps/gpu          one node, in which each GPU sends 400 Gbit/s to the others

GPU is a name that :func:`autopar.hardware.gpus.find` knows; bandwidths are a node's, or a GPU's with ``/gpu`` or
``/device``, in one direction, in bits (``200Gbps``) or bytes (``25GB/s``) per second.

Nodes of known GPUs and their network become a cluster with estimated links and curves.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster, Curve, CurveKind, Device, Level, Link
from autopar.formats.document import (
    MOST_RANKS,
    SHOWN,
    Index,
    Name,
    Record,
    first_fault,
    parse_bandwidth,
    parse_bytes,
    read_text,
)
from autopar.hardware.collectives import NETWORK_SHARE, NodeLinks, RankGroup, collective_s, message_latency_s
from autopar.hardware.gpus import Gpu, find

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
        yield _curve("p2p", "node", RankGroup(1, 2), links)
        yield from (_curve(kind, "node", RankGroup(1, count), links) for count in group_sizes(most) for kind in _KINDS)


def _curves(level: Level, nodes: Sequence[Node], count: int, links: NodeLinks) -> Iterator[Curve]:
    yield _curve("p2p", level, RankGroup(2, 1), links)
    for group in _groups(count, min(node.gpus for node in nodes)):
        yield from (_curve(kind, level, group, links) for kind in _KINDS)


def _groups(nodes: int, per_node: int) -> Iterator[RankGroup]:
    """Yield groups over several nodes, no two of the same size.

    >>> [tuple(group) for group in _groups(4, 8)]
    [(2, 1), (4, 1), (2, 8), (4, 8)]
    >>> [tuple(group) for group in _groups(3, 1)]
    [(2, 1), (3, 1)]
    """
    yield from (RankGroup(count, 1) for count in group_sizes(nodes) if count < 2 * per_node)
    yield from (RankGroup(count, per_node) for count in group_sizes(nodes))


def group_sizes(most: int) -> list[int]:
    """Return 2, 4, 8 .. and the most.

    >>> group_sizes(12), group_sizes(1)
    ([2, 4, 8, 12], [])
    """
    powers = [2**exponent for exponent in range(1, most.bit_length()) if 2**exponent <= most]
    return powers if most < 2 or most in powers else [*powers, most]


def _curve(kind: CurveKind, level: Level, group: RankGroup, links: NodeLinks) -> Curve:
    sizes = message_sizes(LARGEST_BYTES)
    seconds = tuple(collective_s(kind, size, group, links) for size in sizes)
    return Curve(kind=kind, ranks=group.ranks, level=level, sizes=sizes, seconds=seconds, provenance="estimated")


EXAMPLES = (
    "8xH100",
    "4x8xA100-80G:200Gbps",
    "2x4xV100",
    "2x8xB200:3200Gbps",
    "4xRTX4090",
    "8xH100+8xA100-80G:200Gbps",
    "2x4x8xH100:400Gbps:100Gbps",
)
GRAMMAR = "[[RACKSx]NODESx]GPUSxGPU[:BANDWIDTH[:BANDWIDTH]]"
_GRAMMAR = (
    f"a name is {GRAMMAR}, such as 8xH100 or 4x8xA100-80G:200Gbps; nodes with other GPUs are added, as in "
    "8xH100+8xA100-80G:200Gbps; 400Gbps/gpu is that of each GPU"
)
_PART = re.compile(
    r"(?:(?:(?P<racks>\d{1,9})x)?(?P<nodes>\d{1,9})x)?(?P<gpus>\d{1,9})x(?P<gpu>[^:+\s/\\][^:+/\\]*)", re.IGNORECASE
)
_SAME_PART = re.sub(r"\?P<\w+>", "?:", _PART.pattern)
_NAME = re.compile(
    rf"(?P<parts>{_SAME_PART}(?:\+{_SAME_PART})*)(?::(?P<bandwidth>[^:+]+))?(?::(?P<between>[^:+]+))?", re.IGNORECASE
)
_PER = re.compile(r"(?P<rate>.*?)\s*/\s*(?P<of>gpu|device|node)\s*", re.IGNORECASE)
_ASSUMED_NETWORK = "100Gbps"
_SLOWEST = "nodes differ: links in a node and over the network are those of the slowest"
_Value = TypeVar("_Value")


def is_file(text: str) -> bool:
    """Return whether ``--cluster`` names a file, and not a built-in cluster.

    >>> is_file("lab.toml"), is_file("machines/lab"), is_file("8xH100"), is_file("2x8xH100:25GB/s")
    (True, True, False, False)
    """
    if Path(text).suffix in (".json", ".toml") or Path(text).exists():
        return True
    return ("/" in text or "\\" in text) and _NAME.fullmatch(text.strip()) is None


def cluster_named(text: str) -> Cluster:
    """Return a built-in cluster, all of its numbers estimated.

    >>> cluster = cluster_named("4x8xA100-80G:200Gbps")
    >>> len(cluster.devices), cluster.devices[0].type, [link.level for link in cluster.links]
    (32, 'A100-SXM-80G', ['node', 'network'])

    Raises:
        UsageError: it is no such name, its GPU is not known, or there are too many or none.
    """
    match = _NAME.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"no cluster is called {text[:80]!r}, and no such file exists; {_GRAMMAR}")
    nodes = _every_node(match["parts"], text)
    devices = sum(node.gpus for node in nodes)
    if devices > MOST_RANKS:
        raise UsageError(f"cluster {text[:80]!r} has {devices} devices; at most {MOST_RANKS} can be planned for")
    name, racks = text.strip(), len({node.rack for node in nodes})
    notes = [_origin(name, nodes)]
    if len(nodes) == 1 and match["bandwidth"] is not None:
        nodes = [_with_links(name, nodes[0], match, notes)]
    near, far = _networks(name, match, racks, len(nodes), notes)
    if len({node.gpu.name for node in nodes}) > 1:
        notes.append(_SLOWEST)
    return cluster_of(name, nodes, near, notes) if racks == 1 else cluster_of(name, nodes, far, notes, near)


def _every_node(parts: str, text: str) -> list[Node]:
    """Return the nodes of all parts of a name; where one has racks, each of the others is a rack of its own."""
    found: list[Node] = []
    matches = [match for part in parts.split("+") if (match := _PART.fullmatch(part)) is not None]
    apart = any(match["racks"] is not None for match in matches)
    for match in matches:
        found += _nodes(match, text, found[-1].rack + 1 if apart and found else 0)
    return found


def _nodes(match: re.Match[str], text: str, rack: int) -> list[Node]:
    """Return the nodes of a part of the name ``text``, whose first rack is given.

    Raises:
        UsageError: its GPU is not known, or there are too many or none.
    """
    part = match.group()
    racks, nodes, gpus = (int(match[each] or 1) for each in ("racks", "nodes", "gpus"))
    if min(racks, nodes, gpus) < 1:
        where = f" in {part}" if part != text.strip() else ""
        raise UsageError(f"cluster {text[:80]!r} has no devices{where}; {_GRAMMAR}")
    devices = racks * nodes * gpus
    if devices > MOST_RANKS:
        raise UsageError(f"cluster {text[:80]!r} has {devices} devices; at most {MOST_RANKS} can be planned for")
    gpu = find(match["gpu"])
    return [Node(gpu, gpus, rack=rack + at) for at in range(racks) for _ in range(nodes)]


def _networks(name: str, match: re.Match[str], racks: int, nodes: int, notes: list[str]) -> tuple[Network, Network]:
    """Return what connects the nodes, of a rack where there are racks, and the racks; note what is assumed."""
    stated, between = match["bandwidth"], match["between"]
    if racks == 1 and between is not None:
        raise UsageError(f"cluster {name[:80]!r} has no racks for :{between} to connect; write RACKSxNODESxGPUSxGPU")
    if nodes > 1 and stated is None:
        notes.append(f"a network of {_ASSUMED_NETWORK} per node is assumed; {name}:200Gbps would say another")
    elif racks > 1 and between is None:
        per_node = "" if stated is not None and _PER.fullmatch(stated) else " per node"
        notes.append(f"{stated}{per_node} between racks is assumed; {name}:{_ASSUMED_NETWORK} would say another")
    near = _parse_network(stated or _ASSUMED_NETWORK, f"cluster {name[:80]!r}: bandwidth")
    far = near if between is None else _parse_network(between, f"cluster {name[:80]!r}: bandwidth between racks")
    return near, far


def _parse_network(text: str, at: str) -> Network:
    """Read a bandwidth of a node, or of each device (``400Gbps/gpu``)."""
    match = _PER.fullmatch(text.strip())
    rate = parse_bandwidth(text if match is None else match["rate"], at)
    return Network(rate, per_device=match is not None and match["of"].casefold() != "node")


def _with_links(name: str, node: Node, match: re.Match[str], notes: list[str]) -> Node:
    """Return a single node whose devices have links of the stated bandwidth; note it.

    Raises:
        UsageError: what is stated is a network's, or there is one device.
    """
    stated = match["bandwidth"]
    links = _parse_network(stated, f"cluster {name[:80]!r}: bandwidth")
    if not links.per_device or node.gpus == 1 or match["between"] is not None:
        rate = stated.partition("/node")[0].strip()
        instead = f", or write {rate}/gpu for links within the node" if node.gpus > 1 and not links.per_device else ""
        raise UsageError(f"cluster {name[:80]!r} is one node, which needs no network; leave out :{stated}{instead}")
    notes.append(
        f"links of {stated} within the node are taken in place of what is published of {node.gpu.name}; "
        f"{REACHED:.0%} of that is counted on"
    )
    return replace(node, bytes_per_s=links.bytes_per_s * REACHED)


def _origin(what: str, nodes: Iterable[Node]) -> str:
    kinds = ", ".join(dict.fromkeys(node.gpu.name for node in nodes))
    return f"links and collectives of {what} are estimated from what is published of {kinds}"


def find_cluster(text: str) -> Cluster:
    """Return a built-in cluster by name, or the one that a file describes.

    Raises:
        UsageError: the name is not known.
        FileError: the file is missing or broken.
    """
    return read_cluster(text) if is_file(text) else cluster_named(text)


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster that was measured (``.json``), or one that is described (``.toml``: docs/howto/other_gpus.md).

    Raises:
        FileError: the file is missing or broken, or names a GPU that is not known; names the key.
    """
    path = Path(path)
    return parse_cluster(read_text(path, Cluster.KIND), path)


def parse_cluster(text: str, path: Path) -> Cluster:
    """Return the cluster of a file whose text has been read; see :func:`read_cluster`."""
    if path.suffix != ".toml":
        return Cluster.parse(text, path)
    try:
        # By way of JSON, in which tuples are lists and nothing else is loose.
        content = json.dumps(tomllib.loads(text), default=str)
    except RecursionError as error:
        raise FileError(f"{path}: not TOML: nested too deeply") from error
    except ValueError as error:
        # Also of numbers with thousands of digits, and of dates that are none.
        raise FileError(f"{path}: not TOML: {str(error)[:SHOWN]}") from error
    try:
        description = ClusterDescription.model_validate_json(content)
    except ValidationError as error:
        raise FileError(f"{path}: {first_fault(error, json.loads(content))}") from error
    return _build_cluster(description, path)


class NodesDescription(Record):
    """Nodes that are alike."""

    count: int = Field(default=1, ge=1, le=MOST_RANKS)
    """How many."""
    gpus: int = Field(ge=1, le=MOST_RANKS)
    """In each node."""
    gpu: Name
    """Any of ``autopar cluster list``."""
    memory: str | None = None
    """Of a GPU, such as ``70GB``, in place of its data sheet's."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """Of a GPU."""
    bandwidth: str | None = None
    """Bus bandwidth of collectives in the node, such as ``200GB/s``, in place of its data sheet's."""
    rack: Index = 0
    """Which rack they are in."""


class NetworkDescription(Record):
    """What connects nodes or racks."""

    bandwidth: str
    """Of a node, in one direction, such as ``100Gbps``; ``100Gbps/gpu``: of each GPU for itself."""
    latency_s: float = Field(default=0.0, ge=0, lt=10)
    """Of a message, beyond NCCL's own."""


class ClusterDescription(Record):
    """A cluster in TOML. Where nodes differ, links and collectives are those of the slowest."""

    name: Name | None = None
    """Null: the file's name."""
    nodes: Annotated[tuple[NodesDescription, ...], Field(min_length=1)]
    """One table ``[[nodes]]`` for each kind of node."""
    network: NetworkDescription | None = None
    """``[network]``, required where there are several nodes."""
    rack: NetworkDescription | None = None
    """``[rack]``: between the nodes of a rack, required where there are several, which ``network`` connects."""


def _build_cluster(description: ClusterDescription, path: Path) -> Cluster:
    total = sum(each.count * each.gpus for each in description.nodes)
    if total > MOST_RANKS:
        raise FileError(f"{path}: $.nodes: {total} devices; at most {MOST_RANKS} can be planned for")
    _check_connected(description, path)
    nodes = []
    for index, each in enumerate(description.nodes):
        nodes += [_node(each, f"{path}: $.nodes[{index}]")] * each.count
    network = _network(description.network, f"{path}: $.network") or Network(0.0)
    rack = _network(description.rack, f"{path}: $.rack")
    notes = [_origin(path.name, nodes)]
    if len({(node.gpu.name, node.bytes_per_s) for node in nodes}) > 1:
        notes.append(_SLOWEST)
    return cluster_of(description.name or path.stem, nodes, network, notes, rack)


def _check_connected(description: ClusterDescription, path: Path) -> None:
    """Refuse nodes or racks between which nothing is said to be, and racks that nothing would tell apart."""
    racks = {each.rack for each in description.nodes}
    if len(racks) > 1 and description.rack is None:
        raise FileError(f'{path}: $.rack: nodes in several racks need a [rack] with a bandwidth, such as "400Gbps"')
    apart = len(racks) if description.rack is not None else sum(each.count for each in description.nodes)
    if apart > 1 and description.network is None:
        what = "racks" if description.rack is not None else "nodes"
        raise FileError(f'{path}: $.network: several {what} need a [network] with a bandwidth, such as "200Gbps"')


def _network(network: NetworkDescription | None, at: str) -> Network | None:
    if network is None:
        return None
    return replace(_parse_field(_parse_network, network.bandwidth, f"{at}.bandwidth:"), latency_s=network.latency_s)


def _node(nodes: NodesDescription, at: str) -> Node:
    gpu = _parse_field(lambda name, flag: find(name), nodes.gpu, f"{at}.gpu:")
    memory = None if nodes.memory is None else _parse_field(parse_bytes, nodes.memory, f"{at}.memory:")
    rate = None if nodes.bandwidth is None else _parse_field(parse_bandwidth, nodes.bandwidth, f"{at}.bandwidth:")
    return Node(gpu, nodes.gpus, memory, nodes.price_per_hour, rate, nodes.rack)


def _parse_field(parse: Callable[[str, str], _Value], text: str, at: str) -> _Value:
    try:
        return parse(text, at)
    except UsageError as error:
        message = str(error)
        raise FileError(message if message.startswith(at) else f"{at} {message}") from error
