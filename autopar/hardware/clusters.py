"""Clusters: built-in ones by name, own ones from a file.

    name    = part { "+" part } [ ":" bandwidth [ ":" bandwidth ] ] [ ":" fabric ]
    part    = [ [ racks "x" ] nodes "x" ] gpus "x" GPU
    8xH100                      one node of eight
    4x8xA100-80G:200Gbps        four nodes of eight; each node sends 200 Gbit/s to the others
    4xA100+2x4xV100:100Gbps     three nodes of four, two of them with other GPUs
    2x4x8xH100:400Gbps:100Gbps  two racks of four such nodes; each node sends 400 Gbit/s to those of its rack, and
                                100 Gbit/s to those of the other
    2x8xH100:400Gbps/gpu        each GPU sends 400 Gbit/s to the other node, and shares that with none
    8x8xH100:400Gbps/gpu:efa    what collectives between nodes take is that which was measured with EFA
    8xH100:400Gbps/gpu          one node, whose own links stay as they are: the network has no other node to reach

GPU is a name that :func:`autopar.hardware.gpus.find` knows; bandwidths are a node's, or a GPU's with ``/gpu`` or
``/device``, in one direction, in bits (``200Gbps``) or bytes (``25GB/s``) per second. Fabrics are ``infiniband`` (or
``ib``), ``efa`` and ``roce``; without one, collectives between nodes follow a formula.

Nodes of known GPUs and their network become a cluster with estimated links and curves.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from autopar.errors import FileError, UsageError, printable, unknown
from autopar.formats.cluster import Cluster, Curve, CurveKind, Device, Level, Link
from autopar.formats.document import LONGEST_MESSAGE, MOST_RANKS, parse_bytes, parse_toml, read_text
from autopar.hardware.collectives import NETWORK_SHARE, NodeLinks, message_latency_s
from autopar.hardware.descriptions import (
    PER,
    ClusterDescription,
    NetworkDescription,
    NodesDescription,
    Rate,
    line_of,
    network_fabric,
    rate_of,
)
from autopar.hardware.fabrics import FABRICS, Fabric, fabric_s, find_fabric
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
GRAMMAR = "[[RACKSx]NODESx]GPUSxGPU[:BANDWIDTH[:BANDWIDTH]][:FABRIC]"
_GRAMMAR = (
    f"a name is {GRAMMAR}, such as 8xH100 or 4x8xA100-80G:200Gbps; nodes with other GPUs are added, as in "
    "8xH100+8xA100-80G:200Gbps; 400Gbps/gpu is that of each GPU, and :efa behind it a fabric"
)
_PART = re.compile(
    r"(?:(?:(?P<racks>\d{1,9})x)?(?P<nodes>\d{1,9})x)?(?P<gpus>\d{1,9})x(?P<gpu>[^:+\s/\\][^:+/\\]*)", re.IGNORECASE
)
_SAME_PART = re.sub(r"\?P<\w+>", "?:", _PART.pattern)
_NAME = re.compile(
    rf"(?P<parts>{_SAME_PART}(?:\+{_SAME_PART})*)"
    r"(?::(?P<bandwidth>[^:+]+))?(?::(?P<between>[^:+]+))?(?::(?P<fabric>[^:+]+))?",
    re.IGNORECASE,
)
_ASSUMED_NETWORK, _OTHER = "100Gbps", "200Gbps"
_SLOWEST = "nodes differ: links in a node and over the network are those of the slowest"


class _Node(NamedTuple):
    """A node, and its kind of GPU."""

    said: NodesDescription
    gpu: Gpu

    @property
    def bus_bytes_per_s(self) -> float:
        """What collectives reach in it."""
        if self.said.bandwidth is not None:
            rate = rate_of(self.said.bandwidth)
            return rate.bytes_per_s * (_REACHED if rate.per_device else 1)
        return self.gpu.collective_bytes_per_s or (self.gpu.nvlink_bytes_per_s or self.gpu.pcie_bytes_per_s) * _REACHED

    @property
    def fabric(self) -> Fabric | None:
        """What was measured of its links; none where nothing was, or others are said."""
        return None if self.gpu.fabric is None or self.said.bandwidth is not None else find_fabric(self.gpu.fabric)

    def links(self, network: NetworkDescription | None = None) -> NodeLinks:
        """Return what connects its devices, and nodes like it."""
        gpu = self.gpu
        rate = Rate(0.0, per_device=False) if network is None else rate_of(network.bandwidth)
        whole = gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s
        return NodeLinks(
            kind="nvlink" if gpu.nvlink_bytes_per_s > 0 else "pcie",
            bus_bytes_per_s=self.bus_bytes_per_s,
            peer_bytes_per_s=self.bus_bytes_per_s * ((gpu.peer_bytes_per_s or whole) / whole),
            devices=self.said.gpus,
            network_bytes_per_s=rate.bytes_per_s * (self.said.gpus if rate.per_device else 1),
            network_latency_s=0.0 if network is None else network.latency_s,
        )


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
    kinds = {each.gpu: description.kind_of(each.gpu) for each in description.nodes}
    nodes = [_Node(each, kinds[each.gpu]) for each in description.nodes for _ in range(each.count)]
    slowest = _slowest(nodes)
    inside = slowest.links()
    connections = [Link(level="node", latency_s=message_latency_s(1, inside), bytes_per_s=inside.peer_bytes_per_s)]
    curves = list(_node_curves(nodes, inside, slowest.fabric))
    fabrics = {"within a node": slowest.fabric} if max(node.said.gpus for node in nodes) > 1 else {}
    for level, network, count in _networks_of(description, nodes):
        links, fabric = slowest.links(network), None if network.fabric is None else find_fabric(network.fabric)
        connections.append(_between(level, links, per_device=rate_of(network.bandwidth).per_device))
        curves += _curves(level, nodes, count, links, fabric)
        fabrics[_WHERE[level]] = fabric
    names = ", ".join(dict.fromkeys(node.gpu.name for node in nodes))
    origin = f"links and collectives of {what} are estimated from what is published of {names}"
    differ = len({(node.gpu.name, node.bus_bytes_per_s) for node in nodes}) > 1
    return Cluster(
        name=description.name or Path(what).stem,
        backend="nccl",
        devices=tuple(_devices(nodes, description)),
        links=tuple(connections),
        curves=tuple(curves),
        notes=(origin, *_fabric_note(fabrics), *notes, *([_SLOWEST] if differ else [])),
    )


_WHERE: dict[Level, str] = {"rack": "between nodes of a rack", "network": "between nodes"}


def _fabric_note(fabrics: Mapping[str, Fabric | None]) -> list[str]:
    """Say where collectives are as a fabric was measured, and where by formula."""
    if not fabrics:
        return []
    known = ", ".join(fabric.name for fabric in FABRICS if fabric.is_network)
    ways = ", ".join(f"{where} {_way(fabric)}" for where, fabric in fabrics.items())
    unsaid = any(fabric is None for where, fabric in fabrics.items() if where in _WHERE.values())
    return [f"collectives: {ways}" + (f" (`:NAME` behind a bandwidth says a fabric: {known})" if unsaid else "")]


def _way(fabric: Fabric | None) -> str:
    if fabric is None:
        return "by formula"
    return f"as {fabric.name} was measured" if fabric.all_reduce else f"by formula, as of {fabric.name}"


def _devices(nodes: Sequence[_Node], description: ClusterDescription) -> Iterator[Device]:
    own = {each.name: each for each in description.gpu}
    for index, (said, gpu) in enumerate(nodes):
        described = own.get(gpu.name)
        price, power_w = said.price_per_hour, said.power_w
        if described is not None:
            price = described.price_per_hour if price is None else price
            power_w = power_w or described.power_w
        device = Device(
            type=gpu.name,
            memory_bytes=gpu.memory_bytes if said.memory is None else parse_bytes(said.memory, ""),
            node=index,
            rack=said.rack,
            price_per_hour=price,
            power_w=power_w,
        )
        yield from (device for _ in range(said.gpus))


def _networks_of(
    description: ClusterDescription, nodes: Sequence[_Node]
) -> Iterator[tuple[Level, NetworkDescription, int]]:
    """Yield the levels that connect nodes, and how many nodes there are to connect."""
    racks = Counter(node.said.rack for node in nodes)
    if description.rack is not None and max(racks.values()) > 1:
        yield "rack", description.rack, max(racks.values())
    if description.network is not None and (len(racks) > 1 if description.rack is not None else len(nodes) > 1):
        yield "network", description.network, len(nodes)


def _between(level: Level, links: NodeLinks, *, per_device: bool) -> Link:
    rate, shared = links.network_bytes_per_s * NETWORK_SHARE, links.devices
    if per_device:
        rate, shared = rate / links.devices, 1
    return Link(level=level, latency_s=message_latency_s(2, links), bytes_per_s=rate, shared_by=shared)


def _slowest(nodes: Sequence[_Node]) -> _Node:
    return min(nodes, key=lambda node: (node.bus_bytes_per_s, -node.said.gpus))


def _node_curves(nodes: Sequence[_Node], links: NodeLinks, fabric: Fabric | None) -> Iterator[Curve]:
    most = max(node.said.gpus for node in nodes)
    if most > 1:
        yield _curve("p2p", Place.even(1, 2), links, fabric)
        places = [Place.even(1, count) for count in group_sizes(most)]
        yield from (_curve(kind, place, links, fabric) for place in places for kind in _KINDS)


def _curves(
    level: Level, nodes: Sequence[_Node], count: int, links: NodeLinks, fabric: Fabric | None
) -> Iterator[Curve]:
    yield _curve("p2p", Place.even(2, 1, level), links, fabric)
    for per_node in (1, *group_sizes(min(node.said.gpus for node in nodes))):
        places = (Place.even(each, per_node, level) for each in group_sizes(count))
        yield from (_curve(kind, place, links, fabric) for place in places for kind in _KINDS)


def group_sizes(most: int) -> list[int]:
    """Return 2, 4, 8 .. and the most.

    >>> group_sizes(12), group_sizes(1)
    ([2, 4, 8, 12], [])
    """
    powers = [2**exponent for exponent in range(1, most.bit_length()) if 2**exponent <= most]
    return powers if most < 2 or most in powers else [*powers, most]


def _curve(kind: CurveKind, place: Place, links: NodeLinks, fabric: Fabric | None) -> Curve:
    sizes, nodes = message_sizes(LARGEST_BYTES), None if place.level == "node" or kind == "p2p" else place.nodes
    seconds = (fabric_s(fabric, kind, size, place, links) for size in sizes)
    return Curve(
        kind=kind,
        ranks=place.ranks,
        level=place.level,
        nodes=nodes,
        sizes=sizes,
        # What was measured of one size may be less than of a smaller one.
        seconds=tuple(accumulate(seconds, max)),
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
    nodes, notes, said = _every_node(match["parts"], at), list[str](), _spoken_networks(match, at)
    racks, count = len({each["rack"] for each in nodes}), sum(each["count"] for each in nodes)
    content: dict[str, Any] = {"name": name, "nodes": nodes}
    if racks > 1 or count > 1:
        content |= _networks(said, racks, at, notes)
    elif said.bandwidth is not None or said.fabric is not None:
        notes.append(_unused_network(nodes[0], said, at))
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


class _Said(NamedTuple):
    """What a name says of networks."""

    parts: str
    """All before that."""
    bandwidth: str | None
    between: str | None
    """Racks."""
    fabric: str | None

    def named(self, *bandwidths: str) -> str:
        """Return the name with other bandwidths."""
        return ":".join((self.parts, *bandwidths, *([] if self.fabric is None else [self.fabric])))


def _spoken_networks(match: re.Match[str], at: str) -> _Said:
    """Return what a name says of networks: a fabric stands last, and is a word that is one, or nearly.

    Raises:
        UsageError: no such fabric is known.
    """
    texts = [match[each].strip() for each in ("bandwidth", "between", "fabric") if match[each] is not None]
    known = [name for fabric in FABRICS for name in (fabric.name, *fabric.aliases)]
    fabric = texts.pop() if len(texts) > 2 or (texts and get_close_matches(texts[-1].casefold(), known)) else None
    try:
        name = None if fabric is None else network_fabric(fabric).name
    except UsageError as error:
        raise UsageError(f"{at}: {error}") from error
    bandwidth, between, *_ = [*texts, None, None]
    return _Said(match["parts"], bandwidth, between, name)


def _networks(said: _Said, racks: int, at: str, notes: list[str]) -> dict[str, dict[str, str]]:
    """Return what connects the nodes, or the nodes of a rack and the racks; note what is assumed."""
    stated, between = said.bandwidth, said.between
    if racks == 1 and between is not None:
        raise UsageError(f"{at} has no racks for :{between} to connect; write RACKSxNODESxGPUSxGPU")
    if stated is None and said.fabric is not None:
        stated = f"{find_fabric(said.fabric).device_bytes_per_s * 8 / 1e9:g}Gbps/gpu"
        other = said.named(_OTHER)
        notes.append(f"{stated} are assumed, with which {said.fabric} was measured; {other} would say another")
    elif stated is None:
        notes.append(f"a network of {_ASSUMED_NETWORK} per node is assumed; {said.named(_OTHER)} would say another")
    elif racks > 1 and between is None:
        per_node, other = "" if PER.fullmatch(stated) else " per node", said.named(stated, _ASSUMED_NETWORK)
        notes.append(f"{stated}{per_node} between racks is assumed; {other} would say another")
    fabric = {} if said.fabric is None else {"fabric": said.fabric}
    nodes = {"bandwidth": stated or _ASSUMED_NETWORK, **fabric}
    return (
        {"network": nodes}
        if racks == 1
        else {"rack": nodes, "network": {"bandwidth": between, **fabric} if between else nodes}
    )


def _unused_network(node: dict[str, Any], said: _Said, at: str) -> str:
    """Return what is to be noted of the network of a single node.

    Raises:
        UsageError: it is not one of each device, or there is one device.
    """
    stated = said.bandwidth
    if stated is None or said.fabric or said.between or node["gpus"] == 1 or not rate_of(stated).per_device:
        leave = ":".join(each for each in (stated, said.between, said.fabric) if each)
        raise UsageError(f"{at} is one node, which needs no network; leave out :{leave}")
    return (
        f"{stated} is of a network, which has no other node to reach: links within the node are those of "
        f"{find(node['gpu']).name} (`bandwidth` in a file says others)"
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
    # Linux takes any letters for a file's name.
    return _cluster_of(_description_of(text, path), printable(path.name)[:LONGEST_MESSAGE])


def gpus_of(path: Path) -> tuple[Gpu, ...]:
    """Return the kinds of GPUs that the nodes of a cluster file have, each once.

    Raises:
        FileError: the file is missing or broken; names the key and its line.
    """
    description = _description_of(read_text(path, Cluster.KIND), path)
    kinds = (description.kind_of(each.gpu) for each in description.nodes)
    return tuple({gpu.name: gpu for gpu in kinds}.values())


def _description_of(text: str, path: Path) -> ClusterDescription:
    content = parse_toml(text, path)
    try:
        return ClusterDescription.of(content)
    except UsageError as error:
        line = line_of(text, content, str(error).partition(": ")[0])
        raise FileError(f"{path}: {error}{'' if line is None else f' (at line {line})'}") from error
