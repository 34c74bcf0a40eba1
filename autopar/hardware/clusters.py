"""Clusters: built-in ones by name, own ones from a file.

    name    = part { "+" part } [ ":" bandwidth ]
    part    = [ nodes "x" ] gpus "x" GPU
    8xH100                      one node of eight
    4x8xA100-80G:200Gbps        four nodes of eight; each node sends 200 Gbit/s to the others
    4xA100+2x4xV100:100Gbps     three nodes of four, two of them with other GPUs

GPU is a name that :func:`autopar.hardware.gpus.find` knows; the bandwidth is a node's to the network, in one direction,
in bits (``200Gbps``) or bytes (``25GB/s``) per second.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.document import MOST_RANKS, Name, Record, first_fault, read_text
from autopar.formats.units import parse_bandwidth, parse_bytes
from autopar.hardware.gpus import find
from autopar.hardware.machines import Network, Node, cluster_of

__all__ = ["EXAMPLES", "cluster_named", "described", "is_file", "read_cluster"]

EXAMPLES = (
    "8xH100",
    "4x8xA100-80G:200Gbps",
    "2x4xV100",
    "2x8xB200:3200Gbps",
    "4xRTX4090",
    "8xH100+8xA100-80G:200Gbps",
)
_GRAMMAR = (
    "a name is [NODESx]GPUSxGPU[:BANDWIDTH], such as 8xH100 or 4x8xA100-80G:200Gbps; nodes with other GPUs are added, "
    "as in 8xH100+8xA100-80G:200Gbps"
)
_PART = re.compile(r"(?:(?P<nodes>\d{1,9})x)?(?P<gpus>\d{1,9})x(?P<gpu>[^:+\s/\\][^:+/\\]*)", re.IGNORECASE)
_SAME_PART = re.sub(r"\?P<\w+>", "?:", _PART.pattern)
_NAME = re.compile(rf"(?P<parts>{_SAME_PART}(?:\+{_SAME_PART})*)(?::(?P<bandwidth>[^:+]+))?", re.IGNORECASE)
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
        raise UsageError(f"no cluster is called {text!r}, and no such file exists; {_GRAMMAR}")
    nodes = [node for part in match["parts"].split("+") for node in _nodes(part, text)]
    devices = sum(node.gpus for node in nodes)
    if devices > MOST_RANKS:
        raise UsageError(f"cluster {text!r} has {devices} devices; at most {MOST_RANKS} can be planned for")
    notes = [_origin(text.strip(), nodes)]
    if len(nodes) == 1 and match["bandwidth"] is not None:
        raise UsageError(f"cluster {text!r} is one node, which needs no network; leave out :{match['bandwidth']}")
    if len(nodes) > 1 and match["bandwidth"] is None:
        notes.append(f"a network of {_ASSUMED_NETWORK} per node is assumed; {text.strip()}:200Gbps would say another")
    if len({node.gpu.name for node in nodes}) > 1:
        notes.append(_SLOWEST)
    rate = parse_bandwidth(match["bandwidth"] or _ASSUMED_NETWORK, f"cluster {text!r}: bandwidth")
    return cluster_of(text.strip(), nodes, Network(rate), notes)


def _nodes(part: str, text: str) -> list[Node]:
    """Return the nodes of a part of the name ``text``.

    Raises:
        UsageError: its GPU is not known, or there are too many or none.
    """
    match = _PART.fullmatch(part)
    assert match is not None
    nodes, gpus = int(match["nodes"] or 1), int(match["gpus"])
    if nodes < 1 or gpus < 1:
        raise UsageError(f"cluster {text!r} has no devices{f' in {part}' if part != text.strip() else ''}; {_GRAMMAR}")
    if nodes * gpus > MOST_RANKS:
        raise UsageError(f"cluster {text!r} has {nodes * gpus} devices; at most {MOST_RANKS} can be planned for")
    return [Node(find(match["gpu"]), gpus)] * nodes


def _origin(what: str, nodes: Iterable[Node]) -> str:
    kinds = ", ".join(dict.fromkeys(node.gpu.name for node in nodes))
    return f"links and collectives of {what} are estimated from what is published of {kinds}"


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster that was measured (``.json``), or one that is described (``.toml``, see ``docs/clusters.md``).

    Raises:
        FileError: the file is missing or broken, or names a GPU that is not known; names the key.
    """
    path = Path(path)
    return described(read_text(path, Cluster.KIND), path)


def described(text: str, path: Path) -> Cluster:
    """Return the cluster of a file whose text has been read; see :func:`read_cluster`."""
    if path.suffix != ".toml":
        return Cluster.parse(text, path)
    try:
        # By way of JSON, in which tuples are lists and nothing else is loose.
        description = _Description.model_validate_json(json.dumps(tomllib.loads(text), default=str))
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"{path}: not TOML: {error}") from error
    except ValidationError as error:
        raise FileError(f"{path}: {first_fault(error)}") from error
    return _built(description, path)


class _Nodes(Record):
    count: int = Field(default=1, ge=1, le=MOST_RANKS)
    gpus: int = Field(ge=1, le=MOST_RANKS)
    gpu: Name
    memory: str | None = None
    price_per_hour: float | None = Field(default=None, ge=0)
    bandwidth: str | None = None


class _Network(Record):
    bandwidth: str
    latency_s: float = Field(default=0.0, ge=0, lt=10)


class _Description(Record):
    name: Name | None = None
    nodes: Annotated[tuple[_Nodes, ...], Field(min_length=1)]
    network: _Network | None = None


def _built(description: _Description, path: Path) -> Cluster:
    total = sum(each.count * each.gpus for each in description.nodes)
    if total > MOST_RANKS:
        raise FileError(f"{path}: $.nodes: {total} devices; at most {MOST_RANKS} can be planned for")
    network = description.network
    if network is None and sum(each.count for each in description.nodes) > 1:
        raise FileError(f'{path}: $.network: several nodes need a [network] with a bandwidth, such as "200Gbps"')
    nodes = []
    for index, each in enumerate(description.nodes):
        nodes += [_node(each, f"{path}: $.nodes[{index}]")] * each.count
    joined = Network(0.0)
    if network is not None:
        joined = Network(
            _parsed(parse_bandwidth, network.bandwidth, f"{path}: $.network.bandwidth:"), network.latency_s
        )
    notes = [_origin(path.name, nodes)]
    if len({(node.gpu.name, node.bytes_per_s) for node in nodes}) > 1:
        notes.append(_SLOWEST)
    return cluster_of(description.name or path.stem, nodes, joined, notes)


def _node(nodes: _Nodes, at: str) -> Node:
    gpu = _parsed(lambda name, flag: find(name), nodes.gpu, f"{at}.gpu:")
    memory = None if nodes.memory is None else _parsed(parse_bytes, nodes.memory, f"{at}.memory:")
    rate = None if nodes.bandwidth is None else _parsed(parse_bandwidth, nodes.bandwidth, f"{at}.bandwidth:")
    return Node(gpu, nodes.gpus, memory, nodes.price_per_hour, rate)


def _parsed(parse: Callable[[str, str], _Value], text: str, at: str) -> _Value:
    try:
        return parse(text, at)
    except UsageError as error:
        message = str(error)
        raise FileError(message if message.startswith(at) else f"{at} {message}") from error
