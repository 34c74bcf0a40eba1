"""Piper's files: a profile of its inputs, layers with their ways to run and edges, as autopar's own.

    profile = piper_profile(Path("bert.json").read_text(), Path("bert.json"))

Sizes are bytes, times seconds of one micro-batch ("sample"). ``TMPCs`` maps a number of devices to the ways in which
that many run the layer together; ``syncTimeFw`` and ``syncTimeBw``, in bytes despite their names, say for the edge from
or to another node what the group exchanges if that edge crosses stages. (Tarnawski et al., "Piper: Multidimensional
Planner for DNN Parallelization", NeurIPS 2021, section 3; the fields are those of its published inputs.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import networkx as nx
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from autopar.errors import FileError
from autopar.formats.document import Bytes, Count, Name, Record, Seconds, first_fault, parse_json
from autopar.formats.profile import (
    Cost,
    DeviceKind,
    Layer,
    ModelSource,
    Noise,
    Profile,
    SavedStorage,
    Tensor,
)
from autopar.interop.order import cycle, dependent, topological

_Size = Annotated[float, Field(ge=0, lt=2.0**62)]


class _Object(BaseModel):
    """A piece of the file; keys beyond those that are read are allowed, since the format allows them."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class PiperWay(_Object):
    """One way in which a number of devices run a layer."""

    name: Name = Field(alias="id")
    time_s: Seconds = Field(alias="timePerSample")
    parameters: _Size = Field(alias="parameterSize")
    memory_a: _Size = Field(alias="memoryUsageA")
    """Per micro-batch in flight."""
    memory_b: _Size = Field(alias="memoryUsageB")
    forth: dict[str, _Size] = Field(alias="syncTimeFw")
    """By the node at the tail of an edge that leads here."""
    back: dict[str, _Size] = Field(alias="syncTimeBw")
    """By the node at the head of an edge that leads away."""


class LayerNode(_Object):
    """A layer, and its ways by the number of devices."""

    id: int
    name: Name = "node"
    ways: dict[str, tuple[PiperWay, ...]] = Field(alias="TMPCs")


class LayerEdge(_Object):
    """What one layer makes and another reads."""

    source: int = Field(alias="sourceId")
    target: int = Field(alias="destId")
    size: _Size = Field(alias="communicationCost")


class PiperGraph(_Object):
    """The whole file."""

    memory: Annotated[float, Field(ge=1, lt=2.0**62)] = Field(alias="maxMemoryPerDevice")
    devices: Count = Field(alias="maxDevices")
    micro_batches: Count = Field(validation_alias=AliasChoices("mbsInBatch", "maxBatchSize"))
    bytes_per_s: Annotated[float, Field(gt=0, lt=2.0**62)] = Field(alias="bandwidth")
    nodes: tuple[LayerNode, ...]
    edges: tuple[LayerEdge, ...]


def parse(text: str, path: Path) -> PiperGraph:
    """Read and check a graph; ``path`` is only named in errors.

    Raises:
        FileError: the text is not strict JSON, a field is missing or out of range, a node or edge is given twice, an
            edge names no node, exchanges do not fit the edges, or edges form a cycle; names the JSON path.
    """
    content = parse_json(text, path)
    try:
        graph = PiperGraph.model_validate_json(text)
    except ValidationError as error:
        raise FileError(f"{path}: {first_fault(error, content)}") from error
    if not graph.nodes:
        _refuse(path, "$.nodes", "holds no nodes")
    places = _unique(((node.id, f"$.nodes[{index}].id") for index, node in enumerate(graph.nodes)), "node", path)
    _check_edges(graph, places, path)
    for index, node in enumerate(graph.nodes):
        _check_ways(graph, node, f"$.nodes[{index}].TMPCs", path)
    return graph


def _unique(keys: Iterable[tuple[object, str]], what: str, path: Path) -> Mapping[object, int]:
    """Return every key's index; refuse one that is given twice."""
    found: dict[object, int] = {}
    for index, (key, at) in enumerate(keys):
        if key in found:
            _refuse(path, at, f"{what} {key!r} is given twice")
        found[key] = index
    return found


def _check_edges(graph: PiperGraph, places: Mapping[object, int], path: Path) -> None:
    _unique((((edge.source, edge.target), f"$.edges[{index}]") for index, edge in enumerate(graph.edges)), "edge", path)
    for index, edge in enumerate(graph.edges):
        for key, node in (("sourceId", edge.source), ("destId", edge.target)):
            if node not in places:
                _refuse(path, f"$.edges[{index}].{key}", f"no node has the id {node}")
    drawn = _drawn(graph)
    closed = cycle(drawn)
    if closed:
        around = " -> ".join(str(source) for source, _ in (*closed[:8], closed[0]))
        at = f"$.edges[{drawn.edges[closed[0]]['at']}]"
        _refuse(path, at, f"edges form a cycle: {around}; a model's layers have an order")


def _drawn(graph: PiperGraph) -> nx.DiGraph[int]:
    """Return the nodes by their ids, and their edges, as :mod:`autopar.interop.order` takes them."""
    found: nx.DiGraph[int] = nx.DiGraph()
    found.add_nodes_from((node.id, {"size": _output_bytes(node, graph)}) for node in graph.nodes)
    found.add_edges_from((edge.source, edge.target, {"at": at}) for at, edge in enumerate(graph.edges))
    return found


def _check_ways(graph: PiperGraph, node: LayerNode, at: str, path: Path) -> None:
    into = {str(edge.source) for edge in graph.edges if edge.target == node.id}
    out = {str(edge.target) for edge in graph.edges if edge.source == node.id}
    for devices, ways in node.ways.items():
        if not (devices.isascii() and devices.isdecimal() and 1 <= int(devices[:10]) < 2**31) or devices[0] == "0":
            _refuse(path, f"{at}.{devices[:80]}", "expected a number of devices")
        here = f"{at}.{devices}"
        _unique(((way.name, f"{here}[{index}].id") for index, way in enumerate(ways)), "option", path)
        for index, way in enumerate(ways):
            _check_exchanges(way.forth, into, f"{here}[{index}].syncTimeFw", path)
            _check_exchanges(way.back, out, f"{here}[{index}].syncTimeBw", path)
    if not node.ways.get("1"):
        _refuse(path, at, f"node {node.id} has no option for 1 device, which its costs would be")


def _check_exchanges(sizes: Mapping[str, float], edges: set[str], at: str, path: Path) -> None:
    for name in sorted(edges - set(sizes)):
        _refuse(path, at, f"the edge from or to node {name} is missing")
    for name in sorted(set(sizes) - edges):
        _refuse(path, f"{at}.{name[:80]}", "no edge joins the two nodes")


def _refuse(path: Path, at: str, message: str) -> NoReturn:
    raise FileError(f"{path}: {at}: {message}")


class Resharding(Record):
    """What a tensor-parallel group exchanges of a tensor that enters or leaves its stage at a layer."""

    tensor: Name
    """One of the profile's that the layer makes or reads."""
    bytes: Bytes
    """Per micro-batch and direction."""


class LayerOption(Record):
    """One way to run a layer, for one micro-batch.

    With ``y`` micro-batches in flight the layer takes ``memory_per_flight_bytes * y + memory_fixed_bytes`` of every
    device of the group.
    """

    name: Name
    """What it is called."""
    tensor_parallel: Count
    """Devices that run the layer together."""
    recompute: bool
    """Whether it keeps only its inputs, and runs forward again."""
    time_s: Seconds
    """Forward and backward, with all that the group exchanges meanwhile."""
    parameters_bytes: Bytes
    """On each device of the group."""
    memory_per_flight_bytes: Bytes
    """For every micro-batch in flight."""
    memory_fixed_bytes: Bytes
    """However many are in flight."""
    resharded: tuple[Resharding, ...] = ()
    """Of tensors not listed nothing is exchanged."""


class PiperLayer(Layer):
    """A layer, whose ``costs`` are one device's that keeps everything."""

    ways: tuple[LayerOption, ...] = Field(min_length=1)
    """All in which it can be run."""


class PiperProfile(Profile):
    """A profile of such layers."""

    layers: tuple[PiperLayer, ...] = Field(min_length=1)


_FORWARD = 1 / 3
"""Share of the forward, which the files do not state: a backward is commonly counted as two forwards."""
_RECOMPUTES = "recomp"


def piper_profile(text: str, path: Path) -> PiperProfile:
    """Return the profile that one of Piper's input files describes; ``path`` is recorded and named in errors.

    Layers are the nodes in one topological order, nodes of equal right by their ids. Every edge is a tensor of its own,
    as Piper charges each by itself. Micro-batches are the unit: ``batch`` counts them, and costs are those of one.

    Raises:
        FileError: the text is no such file; names the JSON path.
    """
    graph = parse(text, path)
    nodes, drawn = {node.id: node for node in graph.nodes}, _drawn(graph)
    order = topological(drawn)
    trained = dependent(drawn, [node.id for node in graph.nodes if _has_parameters(node)])
    return PiperProfile(
        model=ModelSource(source=path.name, sha256=hashlib.sha256(text.encode()).hexdigest()),
        batch=graph.micro_batches,
        device=DeviceKind(type="cuda", name="GPU", memory_bytes=int(graph.memory)),
        precision="fp32",
        layers=tuple(_layer(nodes[each], graph) for each in order),
        tensors=_tensors(graph, {each: place for place, each in enumerate(order)}, trained),
        noise=Noise(median_spread=0.0, max_spread=0.0),
        notes=_notes(graph),
    )


def _name(node: LayerNode) -> str:
    return f"{node.name[:1000]}.{node.id}"


def _crossing(edge: LayerEdge) -> str:
    return f"{edge.source}>{edge.target}"


def _layer(node: LayerNode, graph: PiperGraph) -> PiperLayer:
    options = [_option(node, int(devices), way, graph) for devices, ways in node.ways.items() for way in ways]
    options.sort(key=lambda option: option.tensor_parallel)
    alone = [option for option in options if option.tensor_parallel == 1]
    kept = next((option for option in alone if not option.recompute), alone[0])
    gradient_bytes = min(kept.parameters_bytes, max(0, kept.memory_fixed_bytes - kept.parameters_bytes))
    return PiperLayer(
        name=_name(node),
        modules=(node.name,),
        parameters_bytes=kept.parameters_bytes,
        trainable_bytes=kept.parameters_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=0,
        buffers_bytes=max(0, kept.memory_fixed_bytes - kept.parameters_bytes - gradient_bytes),
        costs=(_cost(node, kept, graph),),
        ways=tuple(options),
    )


def _cost(node: LayerNode, option: LayerOption, graph: PiperGraph) -> Cost:
    output_bytes = _output_bytes(node, graph)
    return Cost(
        micro_batch=1,
        forward_s=option.time_s * _FORWARD,
        backward_s=option.time_s - option.time_s * _FORWARD,
        saved=(SavedStorage(storage=f"{_name(node)}:kept", bytes=option.memory_per_flight_bytes),),
        peak_bytes=option.memory_per_flight_bytes + output_bytes,
        output_bytes=output_bytes,
        provenance="estimated",
    )


def _output_bytes(node: LayerNode, graph: PiperGraph) -> int:
    """Return the largest that is read of what a layer makes; the edges need not agree."""
    return max((math.ceil(edge.size) for edge in graph.edges if edge.source == node.id), default=0)


def _option(node: LayerNode, devices: int, way: PiperWay, graph: PiperGraph) -> LayerOption:
    exchanged = [(edge, way.forth[str(edge.source)]) for edge in graph.edges if edge.target == node.id]
    exchanged += [(edge, way.back[str(edge.target)]) for edge in graph.edges if edge.source == node.id]
    return LayerOption(
        name=way.name,
        tensor_parallel=devices,
        recompute=_RECOMPUTES in way.name,
        time_s=way.time_s,
        parameters_bytes=math.ceil(way.parameters),
        memory_per_flight_bytes=math.ceil(way.memory_a),
        memory_fixed_bytes=math.ceil(way.memory_b),
        resharded=tuple(Resharding(tensor=_crossing(edge), bytes=math.ceil(size)) for edge, size in exchanged if size),
    )


def _has_parameters(node: LayerNode) -> bool:
    return any(way.parameters for ways in node.ways.values() for way in ways)


def _tensors(graph: PiperGraph, place: Mapping[int, int], trained: set[int]) -> tuple[Tensor, ...]:
    nodes = {node.id: node for node in graph.nodes}
    edges = sorted(graph.edges, key=lambda edge: (place[edge.source], place[edge.target]))
    return tuple(
        Tensor(
            name=_crossing(edge),
            producer=_name(nodes[edge.source]),
            consumers=(_name(nodes[edge.target]),),
            bytes_per_sample=math.ceil(edge.size),
            dtype="float32",
            gradient=edge.source in trained,
        )
        for edge in edges
    )


def _notes(graph: PiperGraph) -> tuple[str, ...]:
    return (
        f"read from Piper's input format: {graph.devices} devices of {graph.memory:.0f} bytes, which each send "
        f"{graph.bytes_per_s:.0f} bytes/s, and {graph.micro_batches} micro-batches per batch; name devices and "
        "bandwidth with `gpus`, `cluster`, `memory_bytes` and `bytes_per_s`",
        "a sample of this profile is one micro-batch, and its batch counts them; times are taken to be seconds",
        "the file states forward and backward together: a third is taken to be the forward",
        "the file names no device and no precision, and no optimizer beyond the memory that its layers state",
    )
