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
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from autopar.errors import FileError, UsageError, printable, unknown
from autopar.formats.cluster import Cluster, Curve, CurveKind, Device, Level, Link
from autopar.formats.document import (
    LONGEST_MESSAGE,
    MOST_RANKS,
    Index,
    Name,
    Record,
    fault,
    first_fault,
    parse_bandwidth,
    parse_bytes,
    parse_toml,
    read_text,
)
from autopar.hardware.collectives import NETWORK_SHARE, NodeLinks, collective_s, message_latency_s
from autopar.hardware.gpus import GPUS, Gpu, find
from autopar.hardware.topology import Place

LARGEST_BYTES = 2**30
"""Largest message of an estimated curve."""
_REACHED = 229 / 300
"""Of its links' rate, where nobody stated what collectives reach: the share that eight A100 were measured to reach."""
_KINDS: tuple[CurveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")


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


def _readable(read: Callable[[str], object]) -> AfterValidator:
    """Return what refuses texts that cannot be read; :func:`first_fault` says why."""

    def check(text: str) -> str:
        try:
            read(text)
        except UsageError as error:
            raise PydanticCustomError("fault", "{message}", {"message": str(error).strip()}) from error
        return text

    return AfterValidator(check)


class Rate(NamedTuple):
    """A bandwidth in one direction."""

    bytes_per_s: float
    per_device: bool
    """Whether each device has it for itself (``400Gbps/gpu``), or all of a node together."""


def _rate(text: str) -> Rate:
    match = _PER.fullmatch(text.strip())
    rate = parse_bandwidth(text if match is None else match["rate"], "")
    return Rate(rate, match is not None and match["of"].casefold() != "node")


class NodesDescription(Record):
    """Nodes that are alike."""

    count: int = Field(default=1, ge=1, le=MOST_RANKS)
    """How many."""
    gpus: int = Field(ge=1, le=MOST_RANKS)
    """In each node."""
    gpu: Annotated[Name, _readable(find)]
    """Any of ``autopar cluster list``."""
    memory: Annotated[str, _readable(partial(parse_bytes, flag=""))] | None = None
    """Of a GPU, such as ``70GB``, in place of its data sheet's."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """Of a GPU."""
    bandwidth: Annotated[str, _readable(_rate)] | None = None
    """Bus bandwidth of collectives in the node, such as ``200GB/s``, in place of its data sheet's; or that of each
    GPU's links, such as ``400Gbps/gpu``, of which collectives reach a part."""
    rack: Index = 0
    """Which rack they are in."""

    @cached_property
    def kind(self) -> Gpu:
        """What is known of the GPU."""
        return find(self.gpu)

    @cached_property
    def bus_bytes_per_s(self) -> float:
        """What collectives reach in a node."""
        gpu = self.kind
        if self.bandwidth is not None:
            rate = _rate(self.bandwidth)
            return rate.bytes_per_s * (_REACHED if rate.per_device else 1)
        return gpu.collective_bytes_per_s or (gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s) * _REACHED


class NetworkDescription(Record):
    """What connects nodes or racks."""

    bandwidth: Annotated[str, _readable(_rate)]
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

    @model_validator(mode="after")
    def _all_are_connected(self) -> Self:
        devices = sum(each.count * each.gpus for each in self.nodes)
        if devices > MOST_RANKS:
            fault("nodes", f"{devices} devices; at most {MOST_RANKS} can be planned for")
        racks = {each.rack for each in self.nodes}
        if len(racks) > 1 and self.rack is None:
            fault("rack", 'nodes in several racks need a [rack] with a bandwidth, such as "400Gbps"')
        apart = len(racks) if self.rack is not None else sum(each.count for each in self.nodes)
        if apart > 1 and self.network is None:
            what = "racks" if self.rack is not None else "nodes"
            fault("network", f'several {what} need a [network] with a bandwidth, such as "200Gbps"')
        return self

    @classmethod
    def of(cls, content: object) -> Self:
        """Return what a file or a name says.

        Raises:
            UsageError: it is not sound; names the key.
        """
        try:
            # By way of JSON, in which tuples are lists and nothing else is loose.
            text = json.dumps(content, default=str)
        except ValueError as error:
            raise UsageError("$: holds a huge number") from error
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise UsageError(first_fault(error, json.loads(text))) from error


def message_sizes(largest_bytes: int) -> tuple[int, ...]:
    """Return twelve sizes from 1 KiB, evenly on a logarithmic scale, whole numbers of 64 bytes.

    >>> message_sizes(64 * 2**20)[:4]
    (1024, 2816, 7680, 21056)
    """
    exponents = math.log2(largest_bytes) - 10
    return tuple(round(2 ** (10 + exponents * index / 11) / 64) * 64 for index in range(12))


def _cluster_of(description: ClusterDescription, what: str, notes: Sequence[str] = ()) -> Cluster:
    """Return a cluster that is described; where nodes differ, links and curves are those of the slowest.

    With racks, there is a network between the nodes of a rack, and one between the racks. Curves over several nodes are
    for one, two, four .. and all GPUs of each, whose other GPUs are assumed to send at the same time.
    """
    nodes = [each for each in description.nodes for _ in range(each.count)]
    slowest = _slowest(nodes)
    connections = [Link(level="node", latency_s=message_latency_s(1, slowest), bytes_per_s=slowest.peer_bytes_per_s)]
    curves = list(_node_curves(nodes, slowest))
    for level, network, count in _networks_of(description, nodes):
        links = _slowest(nodes, network)
        connections.append(_between(level, links, per_device=_rate(network.bandwidth).per_device))
        curves += _curves(level, nodes, count, links)
    kinds = ", ".join(dict.fromkeys(node.kind.name for node in nodes))
    origin = f"links and collectives of {what} are estimated from what is published of {kinds}"
    differ = len({(node.kind.name, node.bus_bytes_per_s) for node in nodes}) > 1
    return Cluster(
        name=description.name or Path(what).stem,
        backend="nccl",
        devices=tuple(_devices(nodes)),
        links=tuple(connections),
        curves=tuple(curves),
        notes=(origin, *notes, *([_SLOWEST] if differ else [])),
    )


def _devices(nodes: Sequence[NodesDescription]) -> Iterator[Device]:
    for index, node in enumerate(nodes):
        memory = node.kind.memory_bytes if node.memory is None else parse_bytes(node.memory, "")
        price = node.price_per_hour
        own = Device(type=node.kind.name, memory_bytes=memory, node=index, rack=node.rack, price_per_hour=price)
        yield from (own for _ in range(node.gpus))


def _networks_of(
    description: ClusterDescription, nodes: Sequence[NodesDescription]
) -> Iterator[tuple[Level, NetworkDescription, int]]:
    """Yield the levels that connect nodes, and how many nodes there are to connect."""
    racks = Counter(node.rack for node in nodes)
    if description.rack is not None and max(racks.values()) > 1:
        yield "rack", description.rack, max(racks.values())
    if description.network is not None and (len(racks) > 1 if description.rack is not None else len(nodes) > 1):
        yield "network", description.network, len(nodes)


def _between(level: Level, links: NodeLinks, *, per_device: bool) -> Link:
    rate, shared = links.network_bytes_per_s * NETWORK_SHARE, links.devices
    if per_device:
        rate, shared = rate / links.devices, 1
    return Link(level=level, latency_s=message_latency_s(2, links), bytes_per_s=rate, shared_by=shared)


def _slowest(nodes: Sequence[NodesDescription], network: NetworkDescription | None = None) -> NodeLinks:
    each = (_links(node, network) for node in nodes)
    return min(each, key=lambda links: (links.bus_bytes_per_s, -links.devices))


def _links(node: NodesDescription, network: NetworkDescription | None) -> NodeLinks:
    gpu, rate = node.kind, Rate(0.0, per_device=False) if network is None else _rate(network.bandwidth)
    whole = gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s
    return NodeLinks(
        kind="nvlink" if gpu.nvlink_bytes_per_s > 0 else "pcie",
        bus_bytes_per_s=node.bus_bytes_per_s,
        peer_bytes_per_s=node.bus_bytes_per_s * ((gpu.peer_bytes_per_s or whole) / whole),
        devices=node.gpus,
        network_bytes_per_s=rate.bytes_per_s * (node.gpus if rate.per_device else 1),
        network_latency_s=0.0 if network is None else network.latency_s,
    )


def _node_curves(nodes: Sequence[NodesDescription], links: NodeLinks) -> Iterator[Curve]:
    most = max(node.gpus for node in nodes)
    if most > 1:
        yield _curve("p2p", Place.even(1, 2), links)
        yield from (_curve(kind, Place.even(1, count), links) for count in group_sizes(most) for kind in _KINDS)


def _curves(level: Level, nodes: Sequence[NodesDescription], count: int, links: NodeLinks) -> Iterator[Curve]:
    yield _curve("p2p", Place.even(2, 1, level), links)
    for per_node in (1, *group_sizes(min(node.gpus for node in nodes))):
        places = (Place.even(each, per_node, level) for each in group_sizes(count))
        yield from (_curve(kind, place, links) for place in places for kind in _KINDS)


def group_sizes(most: int) -> list[int]:
    """Return 2, 4, 8 .. and the most.

    >>> group_sizes(12), group_sizes(1)
    ([2, 4, 8, 12], [])
    """
    powers = [2**exponent for exponent in range(1, most.bit_length()) if 2**exponent <= most]
    return powers if most < 2 or most in powers else [*powers, most]


def _curve(kind: CurveKind, place: Place, links: NodeLinks) -> Curve:
    sizes, nodes = message_sizes(LARGEST_BYTES), None if place.level == "node" or kind == "p2p" else place.nodes
    seconds = tuple(collective_s(kind, size, place, links) for size in sizes)
    return Curve(
        kind=kind,
        ranks=place.ranks,
        level=place.level,
        nodes=nodes,
        sizes=sizes,
        seconds=seconds,
        provenance="estimated",
    )


def is_file(text: str) -> bool:
    """Return whether ``--cluster`` names a file, and not a built-in cluster.

    >>> is_file("lab.toml"), is_file("machines/lab"), is_file("8xH100"), is_file("2x8xH100:25GB/s")
    (True, True, False, False)
    """
    # Of names that no file can have, Path.exists() raises an error.
    if Path(text).suffix in (".json", ".toml") or os.path.exists(text):
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
    name = text.strip()
    match, at = _NAME.fullmatch(name), f"cluster {name[:80]!r}"
    if match is None:
        message = f"no cluster is called {name[:80]!r}, and no such file exists; {_GRAMMAR}"
        raise unknown(UsageError, message, name, (*EXAMPLES, *(f"8x{gpu.name}" for gpu in GPUS)))
    nodes, notes = _every_node(match["parts"], at), list[str]()
    racks, count = len({each["rack"] for each in nodes}), sum(each["count"] for each in nodes)
    content: dict[str, Any] = {"name": name, "nodes": nodes}
    if racks == count == 1 and match["bandwidth"] is not None:
        _add_links(nodes[0], match, at, notes)
    elif racks > 1 or count > 1:
        content |= _networks(name, match, racks, notes)
    try:
        return _cluster_of(ClusterDescription.of(content), name, notes)
    except UsageError as error:
        raise UsageError(f"{at}: {str(error).removeprefix('$.')}") from error


def _every_node(parts: str, at: str) -> list[dict[str, Any]]:
    """Return the nodes of all parts of a name; where one has racks, each of the others is a rack of its own.

    Raises:
        UsageError: there are too many or none, or their GPU is not known.
    """
    found: list[dict[str, Any]] = []
    matches = [match for part in parts.split("+") if (match := _PART.fullmatch(part)) is not None]
    apart = any(match["racks"] is not None for match in matches)
    for match in matches:
        racks, count, gpus = (int(match[each] or 1) for each in ("racks", "nodes", "gpus"))
        devices = racks * count * gpus
        if not devices:
            where = f" in {match.group()}" if len(matches) > 1 else ""
            raise UsageError(f"{at} has no devices{where}; {_GRAMMAR}")
        if devices > MOST_RANKS:
            raise UsageError(f"{at} has {devices} devices; at most {MOST_RANKS} can be planned for")
        first = found[-1]["rack"] + 1 if apart and found else 0
        find(match["gpu"])
        found += [{"count": count, "gpus": gpus, "gpu": match["gpu"], "rack": first + rack} for rack in range(racks)]
    return found


def _networks(name: str, match: re.Match[str], racks: int, notes: list[str]) -> dict[str, dict[str, str]]:
    """Return what connects the nodes, or the nodes of a rack and the racks; note what is assumed."""
    stated, between = match["bandwidth"], match["between"]
    if racks == 1 and between is not None:
        raise UsageError(f"cluster {name[:80]!r} has no racks for :{between} to connect; write RACKSxNODESxGPUSxGPU")
    if stated is None:
        notes.append(f"a network of {_ASSUMED_NETWORK} per node is assumed; {name}:200Gbps would say another")
    elif racks > 1 and between is None:
        per_node = "" if _PER.fullmatch(stated) else " per node"
        notes.append(f"{stated}{per_node} between racks is assumed; {name}:{_ASSUMED_NETWORK} would say another")
    nodes = {"bandwidth": stated or _ASSUMED_NETWORK}
    return (
        {"network": nodes} if racks == 1 else {"rack": nodes, "network": {"bandwidth": between} if between else nodes}
    )


def _add_links(node: dict[str, Any], match: re.Match[str], at: str, notes: list[str]) -> None:
    """Have devices of a single node links of the stated bandwidth; note it.

    Raises:
        UsageError: what is stated is a network's, or there is one device.
    """
    stated = match["bandwidth"]
    per_device = _rate(stated).per_device
    if not per_device or node["gpus"] == 1 or match["between"] is not None:
        rate = stated.partition("/node")[0].strip()
        instead = f", or write {rate}/gpu for links within the node" if node["gpus"] > 1 and not per_device else ""
        raise UsageError(f"{at} is one node, which needs no network; leave out :{stated}{instead}")
    node["bandwidth"] = stated
    notes.append(
        f"links of {stated} within the node are taken in place of what is published of {find(node['gpu']).name}; "
        f"{_REACHED:.0%} of that is counted on"
    )


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
    content = parse_toml(text, path)
    try:
        # Linux takes any letters for a file's name.
        return _cluster_of(ClusterDescription.of(content), printable(path.name)[:LONGEST_MESSAGE])
    except UsageError as error:
        raise FileError(f"{path}: {error}") from error
