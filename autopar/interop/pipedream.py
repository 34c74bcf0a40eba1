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
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import networkx as nx

from autopar.errors import FileError, UsageError
from autopar.formats.profile import Cost, DeviceKind, Layer, ModelSource, Noise, Profile, SavedStorage, Tensor
from autopar.interop.order import cycle, dependent, topological

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_FORM = f"`name -- description -- {', '.join(f'{each}=...' for each in _FIELDS)}`"
_VALUES = re.compile(", ".join(f"{each}=([^,]*)" for each in _FIELDS))
_NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MOST = 1e15
"""More milliseconds or bytes than any layer takes: a larger number is a slip."""
_MOST_LETTERS = 1024


def parse(text: str, path: Path) -> nx.DiGraph[str]:
    """Read a graph, whose nodes have what their lines say; ``path`` is only named in errors.

    Raises:
        FileError: a line is neither node nor edge, a number is none or negative, a node is given twice or not at all,
            or edges form a cycle; names the line.
    """
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1)]
    filled = [(number, line) for number, line in lines if line.strip()]
    graph: nx.DiGraph[str] = nx.DiGraph()
    for number, line in filled:
        if line[0] not in "\t ":
            name, fields = _node(line, number, path)
            if name in graph:
                first = graph.nodes[name]["line"]
                _refuse(path, number, f"node {name!r} is given twice, first in line {first}")
            graph.add_node(name, line=number, **fields)
    for number, line in filled:
        if line[0] in "\t ":
            ends = _edge(line, number, graph, path)
            if not graph.has_edge(*ends):
                graph.add_edge(*ends, at=number)
    closed: list[tuple[str, str]] = cycle(graph)
    if closed:
        names = [source for source, _ in closed[:8]]
        around = " -> ".join([*names, names[0] if len(closed) <= 8 else "..."])
        _refuse(path, graph.edges[closed[0]]["at"], f"edges form a cycle: {around}; a model's layers have an order")
    return graph


def _node(line: str, number: int, path: Path) -> tuple[str, dict[str, Any]]:
    parts = line.strip().split(" -- ")
    stage = parts.pop().removeprefix("stage_id=") if parts[-1].startswith("stage_id=") else None
    values = _VALUES.fullmatch(parts[-1]) if len(parts) > 2 else None
    if values is None or not parts[0]:
        _refuse(path, number, f"expected a node, {_FORM}, or an edge, which is indented; found {line[:80]!r}")
    name, description = parts[0], " -- ".join(parts[1:-1]).strip()
    if not name.isprintable() or not description.isprintable():
        _refuse(path, number, "holds control characters")
    if len(name) > _MOST_LETTERS:
        _refuse(path, number, f"the node's name has {len(name)} letters, at most {_MOST_LETTERS} are read")
    if stage is not None and not re.fullmatch(r"[0-9]{1,9}", stage):
        _refuse(path, number, f"stage_id must be a whole number, found {stage[:80]!r}")
    forward_ms, backward_ms, activation, parameters = (
        _sum(value, field, number, path) for field, value in zip(_FIELDS, values.groups(), strict=True)
    )
    return name, {
        "description": description[:_MOST_LETTERS],
        "seconds": (forward_ms / 1e3, backward_ms / 1e3),
        "size": math.ceil(activation),
        "parameters_bytes": math.ceil(parameters),
        "stage": None if stage is None else int(stage),
    }


def _sum(text: str, name: str, number: int, path: Path) -> float:
    """Return a number, or the sum of several in brackets."""
    is_list = text.startswith("[") and text.endswith("]")
    numbers = [part.strip() for part in (text[1:-1].split(";") if is_list else [text])]
    for each in numbers:
        if not _NUMBER.fullmatch(each) or float(each) > _MOST:
            unit = "milliseconds" if name.endswith("time") else "bytes"
            _refuse(path, number, f"{name} must be {unit} from 0 to {_MOST:.0e}, found {each[:80]!r}")
    total = math.fsum(map(float, numbers))
    if total > _MOST:
        _refuse(path, number, f"{name} adds up to {total}, more than {_MOST:.0e}")
    return total


def _edge(line: str, number: int, graph: nx.DiGraph[str], path: Path) -> list[str]:
    ends = line.strip().split(" -- ")
    if len(ends) != 2:
        _refuse(path, number, f"expected an edge, `node1 -- node2`; found {line.strip()[:80]!r}")
    for name in ends:
        if name not in graph:
            _refuse(path, number, f"an edge names node {name[:80]!r}, which no line describes")
    return ends


def _refuse(path: Path, line: int, message: str) -> NoReturn:
    raise FileError(f"{path}:{line}: {message}")


_MEMORY_BYTES = 16 * 10**9
"""What PipeDream's planner takes a device to have where it is told nothing."""


def pipedream_profile(text: str, path: Path, profiled_batch: int = 1) -> Profile:
    """Return the profile that a text graph describes; ``path`` is recorded as its source and named in errors.

    Layers are the nodes in one order. As PipeDream's planner does, it leaves out ``Input`` nodes, whose outputs become
    model inputs, and ``__getitem__`` nodes that nothing reads.

    >>> line = "-- forward_compute_time=1, backward_compute_time=2, activation_size=[4; 4], parameter_size=8"
    >>> text = f"node1 -- Linear {line}\\nnode2 -- ReLU {line}\\n\\tnode1 -- node2"
    >>> profile = pipedream_profile(text, Path("two.txt"), 2)
    >>> [layer.name for layer in profile.layers], profile.tensors[0].bytes_per_sample
    (['node1', 'node2'], 4)

    Raises:
        FileError: the text is no such graph; names the line.
        UsageError: ``profiled_batch`` is below 1.
    """
    if not 1 <= profiled_batch < 2**31:
        raise UsageError(f"`profiled_batch` must lie in 1..{2**31 - 1}, found {profiled_batch}")
    graph = parse(text, path)
    inputs, unread = _ends(graph, "Input", graph.pred), _ends(graph, "__getitem__", graph.succ)
    kept = graph.subgraph(set(graph).difference(inputs, unread))
    if not kept:
        raise FileError(f"{path}: holds no nodes{' but Input' if inputs else ''}; expected a profile's text graph")
    order: dict[str, int] = dict(zip(topological(kept), range(len(kept)), strict=True))
    trained = dependent(kept, [name for name in order if graph.nodes[name]["parameters_bytes"]])
    return Profile(
        model=ModelSource(source=path.name, sha256=hashlib.sha256(text.encode()).hexdigest()),
        batch=profiled_batch,
        device=DeviceKind(type="cuda", name="V100", memory_bytes=_MEMORY_BYTES),
        precision="fp32",
        layers=tuple(_layers(graph, inputs, order, trained, profiled_batch)),
        tensors=tuple(_tensors(graph, inputs, order, trained, profiled_batch)),
        noise=Noise(median_spread=0.0, max_spread=0.0),
        notes=_notes(graph, inputs, unread, order, profiled_batch),
    )


def _ends(graph: nx.DiGraph[str], description: str, neighbours: Mapping[str, Collection[str]]) -> list[str]:
    """Return the nodes of a description that have no neighbours on one side, in the file's order."""
    named = graph.nodes(data="description")
    return [name for name, own in named if own.startswith(description) and not neighbours[name]]


def _readers(graph: nx.DiGraph[str], name: str, order: Mapping[str, int]) -> list[str]:
    """Return the layers that read what a node makes, the first one first."""
    return sorted((each for each in graph.succ[name] if each in order), key=order.__getitem__)


def _layers(
    graph: nx.DiGraph[str], inputs: Sequence[str], order: Mapping[str, int], trained_nodes: Collection[str], batch: int
) -> Iterator[Layer]:
    nodes = graph.nodes
    # The work of an input node is that of the first layer that reads it.
    input_s = dict.fromkeys(order, 0.0)
    for name in inputs:
        for reader in _readers(graph, name, order)[:1]:
            input_s[reader] += sum(nodes[name]["seconds"])
    for name in order:
        read = sum(nodes[each]["size"] for each in graph.pred[name] if each in trained_nodes)
        yield _layer(name, nodes[name], read, input_s[name], batch)


def _layer(name: str, node: Mapping[str, Any], gradients_bytes: int, input_s: float, batch: int) -> Layer:
    """Return a layer; ``gradients_bytes`` are those of what it reads."""
    cost = Cost(
        micro_batch=batch,
        forward_s=node["seconds"][0] + input_s,
        backward_s=node["seconds"][1],
        saved=(SavedStorage(storage=name, bytes=node["size"]),),
        peak_bytes=2 * node["size"] + gradients_bytes,
        output_bytes=node["size"],
        repeats=1,
    )
    return Layer(
        name=name,
        modules=(node["description"],) if node["description"] else (),
        parameters_bytes=node["parameters_bytes"],
        trainable_bytes=node["parameters_bytes"],
        gradient_bytes=node["parameters_bytes"],
        optimizer_bytes=0,
        costs=(cost,),
        input_s=input_s,
    )


def _tensors(
    graph: nx.DiGraph[str], inputs: Sequence[str], order: Mapping[str, int], trained_nodes: Collection[str], batch: int
) -> Iterator[Tensor]:
    """Yield the model inputs, and what every layer makes for others."""
    for name in (*inputs, *order):
        if consumers := _readers(graph, name, order):
            yield Tensor(
                name=name,
                producer=name if name in order else None,
                consumers=tuple(consumers),
                bytes_per_sample=-(-graph.nodes[name]["size"] // batch),
                dtype="float32",
                gradient=name in trained_nodes,
            )


def _notes(
    graph: nx.DiGraph[str], inputs: Sequence[str], unread: Sequence[str], order: Mapping[str, int], batch: int
) -> tuple[str, ...]:
    nodes = graph.nodes
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
            lost_s = sum(second for name in left for second in nodes[name]["seconds"])
            more = f" and {len(left) - 8} more" if len(left) > 8 else ""
            where = ", counted where they are read" if left is inputs else ""
            notes.append(f"left out: {what} ({', '.join(left[:8])}{more}), with {lost_s:.6g} s of work{where}")
    return (*notes, *_stage_notes([nodes[name]["stage"] for name in order]))


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
    return (note if len(note) <= _MOST_LETTERS else f"{note[: _MOST_LETTERS - 4]}...",)
