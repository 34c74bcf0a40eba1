"""TextGraph: nodes and edges as PipeDream's profiler writes them, one a line.

    node7 -- LSTM(2048, 1024) -- forward_compute_time=3.190, backward_compute_time=5.348, \
activation_size=[6291456.0; 131072.0], parameter_size=50364416.000 -- stage_id=1
        node6 -- node7

A line that is indented is an edge, every other one a node. Times are milliseconds and sizes bytes, of one profiled
mini-batch; the sizes of several outputs stand in brackets; ``stage_id`` may be missing. (Narayanan et al., "PipeDream:
Generalized Pipeline Parallelism for DNN Training", SOSP 2019; DAPPLE's profiles have the same format.)
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple, NoReturn

from autopar.errors import FileError
from autopar.interop.order import cycle

_NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MOST = 1e15
"""More milliseconds or bytes than any layer takes: a larger number is a slip."""
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_MOST_LETTERS = 1024


class Node(NamedTuple):
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

    nodes: tuple[Node, ...]
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


def _node(line: str, number: int, path: Path) -> Node:
    parts = line.strip().split(" -- ")
    stage = _stage(parts.pop(), number, path) if parts[-1].startswith("stage_id=") else None
    if len(parts) < 3 or not parts[0]:
        wanted = f"`name -- description -- {_FIELDS[0]}=..., ...`, or an edge, which is indented"
        _refuse(path, number, f"expected a node, {wanted}; found {line[:80]!r}")
    description = " -- ".join(parts[1:-1]).strip()
    if not parts[0].isprintable() or not description.isprintable():
        _refuse(path, number, "holds control characters")
    if len(parts[0]) > _MOST_LETTERS:
        _refuse(path, number, f"the node's name has {len(parts[0])} letters, at most {_MOST_LETTERS} are read")
    found = _fields(parts[-1], number, path)
    forward_ms, backward_ms, activation, parameters = (_sum(found[name], name, number, path) for name in _FIELDS)
    return Node(
        name=parts[0],
        description=description[:_MOST_LETTERS],
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
