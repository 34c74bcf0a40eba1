"""PipeDream: a profile of its text format, nodes and edges one a line, as autopar's own.

    node7 -- LSTM(2048, 1024) -- forward_compute_time=3.190, backward_compute_time=5.348, \
activation_size=[6291456.0; 131072.0], parameter_size=50364416.000 -- stage_id=1
        node6 -- node7

A line that is indented is an edge, every other one a node. Times are milliseconds and sizes bytes, of one profiled
mini-batch; the sizes of several outputs stand in brackets; ``stage_id`` may be missing. (Narayanan et al., "PipeDream:
Generalized Pipeline Parallelism for DNN Training", SOSP 2019; DAPPLE's profiles have the same format.)
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, NoReturn

from autopar.errors import FileError, UsageError
from autopar.formats.profile import Cost, DeviceKind, Layer, ModelSource, Noise, Profile, SavedStorage, Tensor
from autopar.interop.order import cycle, topological

_NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MOST = 1e15
"""More milliseconds or bytes than any layer takes: a larger number is a slip."""
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
MOST_LETTERS = 1024


class GraphNode(NamedTuple):
    """One line of a node."""

    name: str
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    parameters_bytes: int
    stage: int | None
    line: int


class Edge(NamedTuple):
    """What one node makes and another reads, by their indices."""

    source: int
    target: int
    line: int


class TextGraph(NamedTuple):
    """Nodes in the file's order, and every edge once."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[Edge, ...]


def parse(text: str, path: Path) -> TextGraph:
    """Read a graph; ``path`` is only named in errors.

    Raises:
        FileError: a line is neither node nor edge, a number is none or negative, a node is given twice or not at all,
            or edges form a cycle; names the line.
    """
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1)]
    filled = [(number, line) for number, line in lines if line.strip()]
    nodes = [_node(line, number, path) for number, line in filled if line[0] not in "\t "]
    places: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if node.name in places:
            first = nodes[places[node.name]].line
            _refuse(path, node.line, f"node {node.name!r} is given twice, first in line {first}")
        places[node.name] = index
    edges: dict[tuple[int, int], Edge] = {}
    for number, line in filled:
        if line[0] in "\t ":
            edge = _edge(line, number, places, path)
            edges.setdefault((edge.source, edge.target), edge)
    graph = TextGraph(tuple(nodes), tuple(edges.values()))
    _refuse_cycle(graph, path)
    return graph


def _node(line: str, number: int, path: Path) -> GraphNode:
    parts = line.strip().split(" -- ")
    stage = _stage(parts.pop(), number, path) if parts[-1].startswith("stage_id=") else None
    if len(parts) < 3 or not parts[0]:
        wanted = f"`name -- description -- {_FIELDS[0]}=..., ...`, or an edge, which is indented"
        _refuse(path, number, f"expected a node, {wanted}; found {line[:80]!r}")
    description = " -- ".join(parts[1:-1]).strip()
    if not parts[0].isprintable() or not description.isprintable():
        _refuse(path, number, "holds control characters")
    if len(parts[0]) > MOST_LETTERS:
        _refuse(path, number, f"the node's name has {len(parts[0])} letters, at most {MOST_LETTERS} are read")
    found = _fields(parts[-1], number, path)
    forward_ms, backward_ms, activation, parameters = (_sum(found[name], name, number, path) for name in _FIELDS)
    return GraphNode(
        name=parts[0],
        description=description[:MOST_LETTERS],
        forward_s=forward_ms / 1e3,
        backward_s=backward_ms / 1e3,
        activation_bytes=math.ceil(activation),
        parameters_bytes=math.ceil(parameters),
        stage=stage,
        line=number,
    )


def _fields(text: str, number: int, path: Path) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(", ")]
    found: dict[str, str] = {}
    for name, equals, value in pairs:
        if name not in _FIELDS or not equals:
            _refuse(path, number, f"expected {', '.join(f'{each}=' for each in _FIELDS)}; found {name[:80]!r}")
        if name in found:
            _refuse(path, number, f"{name} is given twice")
        found[name] = value
    for name in _FIELDS:
        if name not in found:
            _refuse(path, number, f"{name} is missing")
    return found


def _sum(text: str, name: str, number: int, path: Path) -> float:
    """Return a number, or the sum of several in brackets."""
    listed = text.startswith("[") and text.endswith("]")
    numbers = [part.strip() for part in text[1:-1].split(";")] if listed else [text.strip()]
    for each in numbers:
        if not _NUMBER.fullmatch(each) or float(each) > _MOST:
            unit = "milliseconds" if name.endswith("time") else "bytes"
            _refuse(path, number, f"{name} must be {unit} from 0 to {_MOST:.0e}, found {each[:80]!r}")
    total = math.fsum(float(each) for each in numbers)
    if total > _MOST:
        _refuse(path, number, f"{name} adds up to {total}, more than {_MOST:.0e}")
    return total


def _stage(text: str, number: int, path: Path) -> int:
    value = text.removeprefix("stage_id=")
    if not re.fullmatch(r"[0-9]{1,9}", value):
        _refuse(path, number, f"stage_id must be a whole number, found {value[:80]!r}")
    return int(value)


def _edge(line: str, number: int, places: dict[str, int], path: Path) -> Edge:
    parts = line.strip().split(" -- ")
    if len(parts) != 2:
        _refuse(path, number, f"expected an edge, `node1 -- node2`; found {line.strip()[:80]!r}")
    for name in parts:
        if name not in places:
            _refuse(path, number, f"an edge names node {name[:80]!r}, which no line describes")
    return Edge(places[parts[0]], places[parts[1]], number)


def _refuse_cycle(graph: TextGraph, path: Path) -> None:
    closed = cycle(len(graph.nodes), [(edge.source, edge.target) for edge in graph.edges])
    if closed:
        first = graph.edges[closed[0]]
        names = [graph.nodes[graph.edges[position].source].name for position in closed[:8]]
        around = " -> ".join([*names, names[0] if len(closed) <= 8 else "..."])
        _refuse(path, first.line, f"edges form a cycle: {around}; a model's layers have an order")


def _refuse(path: Path, line: int, message: str) -> NoReturn:
    raise FileError(f"{path}:{line}: {message}")


_MEMORY_BYTES = 16 * 10**9
"""What PipeDream's planner takes a device to have where it is told nothing."""
_MOST_SAMPLES = 2**31


def pipedream_profile(text: str, path: Path, profiled_batch: int = 1) -> Profile:
    """Return the profile that a text graph describes; ``path`` is recorded as its source and named in errors.

    Layers are the nodes in one topological order, nodes of equal right by the numbers in their names. Left out are the
    nodes that PipeDream's planner leaves out: ``Input`` nodes, whose outputs become model inputs, and ``__getitem__``
    nodes that nothing reads.

    >>> line = "-- forward_compute_time=1, backward_compute_time=2, activation_size=[4; 4], parameter_size=8"
    >>> text = f"node1 -- Linear {line}\\nnode2 -- ReLU {line}\\n\\tnode1 -- node2"
    >>> profile = pipedream_profile(text, Path("two.txt"), profiled_batch=2)
    >>> [layer.name for layer in profile.layers], profile.tensors[0].bytes_per_sample
    (['node1', 'node2'], 4)

    Raises:
        FileError: the text is no such graph; names the line.
        UsageError: ``profiled_batch`` is below 1.
    """
    if not 1 <= profiled_batch < _MOST_SAMPLES:
        raise UsageError(f"`profiled_batch` must lie in 1..{_MOST_SAMPLES - 1}, found {profiled_batch}")
    graph = parse(text, path)
    inputs, unread = _inputs(graph), _unread(graph)
    kept = [index for index in range(len(graph.nodes)) if index not in inputs | unread]
    if not kept:
        raise FileError(f"{path}: holds no nodes{' but Input' if graph.nodes else ''}; expected a profile's text graph")
    order = _order(graph, kept)
    return Profile(
        model=ModelSource(source=path.name, sha256=hashlib.sha256(text.encode()).hexdigest()),
        batch=profiled_batch,
        device=DeviceKind(type="cuda", name="V100", memory_bytes=_MEMORY_BYTES),
        precision="fp32",
        layers=_layers(graph, order, profiled_batch),
        tensors=_tensors(graph, sorted(inputs), order, profiled_batch),
        noise=Noise(median_spread=0.0, max_spread=0.0),
        notes=_notes(graph, inputs, unread, order, profiled_batch),
    )


def _inputs(graph: TextGraph) -> set[int]:
    read = {edge.target for edge in graph.edges}
    return {
        index for index, node in enumerate(graph.nodes) if index not in read and node.description.startswith("Input")
    }


def _unread(graph: TextGraph) -> set[int]:
    made = {edge.source for edge in graph.edges}
    return {
        index
        for index, node in enumerate(graph.nodes)
        if index not in made and node.description.startswith("__getitem__")
    }


def _order(graph: TextGraph, node_indices: Sequence[int]) -> list[int]:
    place = {index: new for new, index in enumerate(node_indices)}
    edges = [(place[edge.source], place[edge.target]) for edge in graph.edges if {edge.source, edge.target} <= {*place}]
    names = [graph.nodes[index].name for index in node_indices]
    sizes = [graph.nodes[index].activation_bytes for index in node_indices]
    return [node_indices[new] for new in topological(names, sizes, edges)]


def _layers(graph: TextGraph, order: Sequence[int], batch: int) -> tuple[Layer, ...]:
    trained = _gradient_nodes(graph, order)
    read = dict.fromkeys(order, 0)
    for edge in graph.edges:
        if edge.target in read and edge.source in trained:
            read[edge.target] += graph.nodes[edge.source].activation_bytes
    loading = _loading_s(graph, order)
    return tuple(_layer(graph.nodes[index], read[index], loading.get(index, 0.0), batch) for index in order)


def _loading_s(graph: TextGraph, order: Sequence[int]) -> dict[int, float]:
    """Return the seconds of input nodes, by the first layer that reads them: its stage has to do their work."""
    place = {index: position for position, index in enumerate(order)}
    found: dict[int, float] = {}
    for source in sorted(_inputs(graph)):
        readers = [edge.target for edge in graph.edges if edge.source == source and edge.target in place]
        if readers:
            first = min(readers, key=place.__getitem__)
            node = graph.nodes[source]
            found[first] = found.get(first, 0.0) + node.forward_s + node.backward_s
    return found


def _layer(node: GraphNode, gradients_bytes: int, input_s: float, batch: int) -> Layer:
    """Return a layer; ``gradients_bytes`` are those of what it reads."""
    cost = Cost(
        micro_batch=batch,
        forward_s=node.forward_s + input_s,
        backward_s=node.backward_s,
        saved=(SavedStorage(storage=node.name, bytes=node.activation_bytes),),
        peak_bytes=2 * node.activation_bytes + gradients_bytes,
        output_bytes=node.activation_bytes,
        repeats=1,
    )
    return Layer(
        name=node.name,
        modules=(node.description,) if node.description else (),
        parameters_bytes=node.parameters_bytes,
        trainable_bytes=node.parameters_bytes,
        gradient_bytes=node.parameters_bytes,
        optimizer_bytes=0,
        costs=(cost,),
        input_s=input_s,
    )


def _tensors(graph: TextGraph, inputs: Sequence[int], order: Sequence[int], batch: int) -> tuple[Tensor, ...]:
    """Return the model inputs, and what every layer makes for others."""
    place = {index: position for position, index in enumerate(order)}
    readers: dict[int, list[int]] = {index: [] for index in (*inputs, *order)}
    for edge in graph.edges:
        if edge.source in readers and edge.target in place:
            readers[edge.source].append(edge.target)
    trained = _gradient_nodes(graph, order)
    return tuple(
        Tensor(
            name=graph.nodes[index].name,
            producer=graph.nodes[index].name if index in place else None,
            consumers=tuple(graph.nodes[reader].name for reader in sorted(found, key=place.__getitem__)),
            bytes_per_sample=-(-graph.nodes[index].activation_bytes // batch),
            dtype="float32",
            gradient=index in trained,
        )
        for index, found in readers.items()
        if found
    )


def _gradient_nodes(graph: TextGraph, order: Sequence[int]) -> set[int]:
    """Return the nodes whose outputs depend on a parameter: over the others no gradient flows back."""
    made: dict[int, list[int]] = {}
    for edge in graph.edges:
        made.setdefault(edge.target, []).append(edge.source)
    found: set[int] = set()
    for index in order:
        if graph.nodes[index].parameters_bytes or found.intersection(made.get(index, ())):
            found.add(index)
    return found


def _notes(graph: TextGraph, inputs: set[int], unread: set[int], order: Sequence[int], batch: int) -> tuple[str, ...]:
    samples = "1 sample, which stands for the mini-batch that was profiled" if batch == 1 else f"{batch} samples"
    notes = [
        f"read from PipeDream's text format: times and sizes are those of {samples}",
        "the file says neither what layers keep for the backward nor what they hold meanwhile: each is taken to keep "
        "its own output, and to hold gradients of its output and inputs besides",
        "the file knows no optimizer: its state counts 0 bytes; gradients take as many bytes as parameters",
        f"the file names no device and no precision: a V100 of {_MEMORY_BYTES} bytes and float32 are assumed",
    ]
    for what, left in (("Input nodes", inputs), ("__getitem__ nodes that nothing reads", unread)):
        if left:
            lost_s = sum(graph.nodes[index].forward_s + graph.nodes[index].backward_s for index in left)
            names = ", ".join(graph.nodes[index].name for index in sorted(left)[:8])
            more = f" and {len(left) - 8} more" if len(left) > 8 else ""
            where = ", counted where they are read" if left == inputs else ""
            notes.append(f"left out: {what} ({names}{more}), with {lost_s:.6g} s of work{where}")
    return (*notes, *_stage_notes([graph.nodes[index].stage for index in order]))


def _stage_notes(stages: Sequence[int | None]) -> tuple[str, ...]:
    """Say which stages the file itself proposes."""
    if all(stage is None for stage in stages):
        return ()
    cuts = [index for index, (before, stage) in enumerate(pairwise(stages), 1) if before != stage]
    if None in stages or len({stages[at] for at in (0, *cuts)}) != len(cuts) + 1:
        return ("the stages that the file assigns are no runs of consecutive layers, and are not kept",)
    ends = pairwise((0, *cuts, len(stages)))
    text = ",".join(f"{first}-{stop - 1}:1" for first, stop in ends)
    note = f"the file's own stages, one device each: `stages={text!r}`"
    return (note if len(note) <= MOST_LETTERS else f"{note[: MOST_LETTERS - 4]}...",)
