"""LayerGraph: layers with their ways to run, and edges, as Piper's input files hold them.

Sizes are bytes, times seconds of one micro-batch ("sample"). ``TMPCs`` maps a number of devices to the ways in which
that many run the layer together; ``syncTimeFw`` and ``syncTimeBw``, in bytes despite their names, say for the edge from
or to another node what the group exchanges if that edge crosses stages. (Tarnawski et al., "Piper: Multidimensional
Planner for DNN Parallelization", NeurIPS 2021, section 3; the fields are those of its published inputs.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from autopar.errors import FileError
from autopar.formats.document import Count, Name, Seconds, first_fault, parse_json
from autopar.interop.order import cycle

_Size = Annotated[float, Field(ge=0, lt=2.0**62)]


class _Object(BaseModel):
    """A piece of the file; keys beyond those that are read are allowed, since the format allows them."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class Way(_Object):
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
    ways: dict[str, tuple[Way, ...]] = Field(alias="TMPCs")


class LayerEdge(_Object):
    """What one layer makes and another reads."""

    source: int = Field(alias="sourceId")
    target: int = Field(alias="destId")
    size: _Size = Field(alias="communicationCost")


class LayerGraph(_Object):
    """The whole file."""

    memory: Annotated[float, Field(ge=1, lt=2.0**62)] = Field(alias="maxMemoryPerDevice")
    devices: Count = Field(alias="maxDevices")
    micro_batches: Count = Field(validation_alias=AliasChoices("mbsInBatch", "maxBatchSize"))
    bytes_per_s: Annotated[float, Field(gt=0, lt=2.0**62)] = Field(alias="bandwidth")
    nodes: tuple[LayerNode, ...]
    edges: tuple[LayerEdge, ...]


def parse(text: str, path: Path) -> LayerGraph:
    """Read and check a graph; ``path`` is only named in errors.

    Raises:
        FileError: the text is not strict JSON, a field is missing or out of range, a node or edge is given twice, an
            edge names no node, exchanges do not fit the edges, or edges form a cycle; names the JSON path.
    """
    content = parse_json(text, path)
    try:
        graph = LayerGraph.model_validate_json(text)
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


def _check_edges(graph: LayerGraph, places: Mapping[object, int], path: Path) -> None:
    _unique((((edge.source, edge.target), f"$.edges[{index}]") for index, edge in enumerate(graph.edges)), "edge", path)
    for index, edge in enumerate(graph.edges):
        for key, node in (("sourceId", edge.source), ("destId", edge.target)):
            if node not in places:
                _refuse(path, f"$.edges[{index}].{key}", f"no node has the id {node}")
    closed = cycle(len(graph.nodes), [(places[edge.source], places[edge.target]) for edge in graph.edges])
    if closed:
        around = " -> ".join(str(graph.edges[position].source) for position in (*closed[:8], closed[0]))
        _refuse(path, f"$.edges[{closed[0]}]", f"edges form a cycle: {around}; a model's layers have an order")


def _check_ways(graph: LayerGraph, node: LayerNode, at: str, path: Path) -> None:
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
