"""Piper: a profile of its input files, as autopar's own, with every layer's ways to run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

from autopar.formats.option import LayerOption, Resharded
from autopar.formats.profile import Cost, DeviceKind, Layer, ModelSource, Noise, Profile, Saved, Tensor
from autopar.interop.layer_graph import LayerEdge, LayerGraph, LayerNode, Way, parse
from autopar.interop.order import topological

_FORWARD = 1 / 3
"""Share of the forward, which the files do not state: a backward is commonly counted as two forwards."""
_RECOMPUTES = "recomp"


def piper_profile(text: str, path: Path) -> Profile:
    """Return the profile that one of Piper's input files describes; ``path`` is recorded and named in errors.

    Layers are the nodes in one topological order, nodes of equal right by their ids. Every edge is a tensor of its own,
    as Piper charges each by itself. Micro-batches are the unit: ``batch`` counts them, and costs are those of one.

    Raises:
        FileError: the text is no such file; names the JSON path.
    """
    graph = parse(text, path)
    ids = [node.id for node in graph.nodes]
    place = {identity: index for index, identity in enumerate(ids)}
    edges = [(place[edge.source], place[edge.target]) for edge in graph.edges]
    sizes = [_output_bytes(node, graph) for node in graph.nodes]
    ordered = [graph.nodes[index] for index in topological([str(identity) for identity in ids], sizes, edges)]
    return Profile(
        model=ModelSource(source=path.name, sha256=hashlib.sha256(text.encode()).hexdigest()),
        batch=graph.micro_batches,
        device=DeviceKind(type="cuda", name="GPU", memory_bytes=int(graph.memory)),
        precision="fp32",
        layers=tuple(_layer(node, graph) for node in ordered),
        tensors=_tensors(graph, {node.id: index for index, node in enumerate(ordered)}),
        noise=Noise(median_spread=0.0, max_spread=0.0),
        notes=_notes(graph),
    )


def _name(node: LayerNode) -> str:
    return f"{node.name[:1000]}.{node.id}"


def _crossing(edge: LayerEdge) -> str:
    return f"{edge.source}>{edge.target}"


def _layer(node: LayerNode, graph: LayerGraph) -> Layer:
    options = [_option(node, int(devices), way, graph) for devices, ways in node.ways.items() for way in ways]
    options.sort(key=lambda option: option.tensor_parallel)
    alone = [option for option in options if option.tensor_parallel == 1]
    kept = next((option for option in alone if not option.recompute), alone[0])
    gradient_bytes = min(kept.parameters_bytes, max(0, kept.memory_fixed_bytes - kept.parameters_bytes))
    return Layer(
        name=_name(node),
        modules=(node.name,),
        parameters_bytes=kept.parameters_bytes,
        trainable_bytes=kept.parameters_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=0,
        buffers_bytes=max(0, kept.memory_fixed_bytes - kept.parameters_bytes - gradient_bytes),
        costs=(_cost(node, kept, graph),),
        options=tuple(options),
    )


def _cost(node: LayerNode, kept: LayerOption, graph: LayerGraph) -> Cost:
    output_bytes = _output_bytes(node, graph)
    return Cost(
        micro_batch=1,
        forward_s=kept.time_s * _FORWARD,
        backward_s=kept.time_s - kept.time_s * _FORWARD,
        saved=(Saved(storage=f"{_name(node)}:kept", bytes=kept.memory_per_flight_bytes),),
        peak_bytes=kept.memory_per_flight_bytes + output_bytes,
        output_bytes=output_bytes,
        provenance="estimated",
    )


def _output_bytes(node: LayerNode, graph: LayerGraph) -> int:
    """Return the largest that is read of what a layer makes; the edges need not agree."""
    return max((_bytes(edge.size) for edge in graph.edges if edge.source == node.id), default=0)


def _option(node: LayerNode, devices: int, way: Way, graph: LayerGraph) -> LayerOption:
    exchanged = [(edge, way.forth[str(edge.source)]) for edge in graph.edges if edge.target == node.id]
    exchanged += [(edge, way.back[str(edge.target)]) for edge in graph.edges if edge.source == node.id]
    return LayerOption(
        name=way.name,
        tensor_parallel=devices,
        recompute=_RECOMPUTES in way.name,
        time_s=way.time_s,
        parameters_bytes=_bytes(way.parameters),
        memory_per_flight_bytes=_bytes(way.memory_a),
        memory_fixed_bytes=_bytes(way.memory_b),
        resharded=tuple(Resharded(tensor=_crossing(edge), bytes=_bytes(size)) for edge, size in exchanged if size),
    )


def _tensors(graph: LayerGraph, place: Mapping[int, int]) -> tuple[Tensor, ...]:
    nodes = {node.id: node for node in graph.nodes}
    trained = _trained(graph, place)
    edges = sorted(graph.edges, key=lambda edge: (place[edge.source], place[edge.target]))
    return tuple(
        Tensor(
            name=_crossing(edge),
            producer=_name(nodes[edge.source]),
            consumers=(_name(nodes[edge.target]),),
            bytes_per_sample=_bytes(edge.size),
            dtype="float32",
            gradient=edge.source in trained,
        )
        for edge in edges
    )


def _trained(graph: LayerGraph, place: Mapping[int, int]) -> set[int]:
    """Return the nodes whose outputs depend on a parameter: over the others no gradient flows back."""
    found: set[int] = set()
    for node in sorted(graph.nodes, key=lambda each: place[each.id]):
        own = any(way.parameters for ways in node.ways.values() for way in ways)
        if own or any(edge.target == node.id and edge.source in found for edge in graph.edges):
            found.add(node.id)
    return found


def _bytes(size: float) -> int:
    return math.ceil(size)


def _notes(graph: LayerGraph) -> tuple[str, ...]:
    return (
        f"read from Piper's input format: {graph.devices} devices of {graph.memory:.0f} bytes, which each send "
        f"{graph.bytes_per_s:.0f} bytes/s, and {graph.micro_batches} micro-batches per batch; name devices and "
        "bandwidth with `gpus`, `cluster`, `memory_bytes` and `bytes_per_s`",
        "a sample of this profile is one micro-batch, and its batch counts them; times are taken to be seconds",
        "the file states forward and backward together: a third is taken to be the forward",
        "the file names no device and no precision, and no optimizer beyond the memory that its layers state",
    )
