"""Save a layer graph without its weights, and load it where the user's code need not run.

An earlier autopar did not split stages into their blocks, and named a layer that joins modules after the first of them:
for its plans, layers are merged and renamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from autopar.capture.build import SegmentedProgram, copy_program
from autopar.capture.export import assemble, placeholders, with_gradients
from autopar.capture.graph import LayerGraph
from autopar.capture.segment import LayerNodes
from autopar.capture.split_backward import gradient_flow
from autopar.errors import CaptureError, FileError

_PROGRAM, _LAYERS = "graph.pt2", "layers.json"


def save_graph(graph: LayerGraph, folder: str | Path) -> None:
    """Write a layer graph into a folder (made if missing): parameters and buffers as shapes only.

    Raises:
        CaptureError: the graph is not portable (made of ``layers(model)``).
        FileError: the folder cannot be written.
    """
    if not graph.portable:
        raise CaptureError("a graph of layers(model) cannot be saved; every rank captures the model for itself")
    exported: SegmentedProgram = graph.segmented_program
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.export.save(_hollow(exported), folder / _PROGRAM)
        (folder / _LAYERS).write_text(json.dumps(_describe(graph, exported), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise FileError(f"cannot write the captured graph into {folder}: {error.strerror}") from error


def load_graph(folder: str | Path) -> LayerGraph:
    """Read a layer graph back; its parameters and buffers are on the meta device.

    Raises:
        FileError: the folder holds no layer graph, or a broken one.
    """
    folder = Path(folder)
    try:
        content = json.loads((folder / _LAYERS).read_text(encoding="utf-8"))
        program = torch.export.load(folder / _PROGRAM)
        return _restore(program, content)
    except OSError as error:
        raise FileError(f"cannot read the captured graph in {folder}: {error.strerror or error}") from error
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise FileError(f"{folder}: not a captured graph of this autopar ({error}); capture it again") from error


def _hollow(segmented_program: SegmentedProgram) -> ExportedProgram:
    """Return the program with its parameters and buffers as shapes."""
    program = segmented_program.program
    buffers = {
        str(spec.target)
        for spec in program.graph_signature.input_specs
        if spec.arg.name in segmented_program.inputs.buffers
    }
    return copy_program(
        program,
        state={name: _meta(value) for name, value in program.state_dict.items()},
        constants={name: _meta(v) if name in buffers else _with_storage(v) for name, v in program.constants.items()},
    )


def _meta(value: Any) -> torch.Tensor:  # noqa: ANN401
    shape = torch.empty_like(value, device="meta")
    return nn.Parameter(shape, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else shape


def _with_storage(value: Any) -> Any:  # noqa: ANN401
    """Return a constant; in place of one without elements, one that has: files take all without memory for the same."""
    return value.new_zeros(1) if isinstance(value, torch.Tensor) and not value.numel() else value


def _describe(graph: LayerGraph, segmented_program: SegmentedProgram) -> dict[str, Any]:
    targets = {spec.arg.name: str(spec.target) for spec in segmented_program.program.graph_signature.input_specs}
    names = {**segmented_program.inputs.parameters, **segmented_program.inputs.buffers}
    trainable = {
        name: layer.parameter(attribute).requires_grad
        for layer in graph.layers
        for attribute, name in layer.parameters.items()
    }
    return {
        "tensors": list(graph.inputs),
        "loss": list(segmented_program.loss),
        "empty": {
            name: value.shape
            for name, value in segmented_program.program.constants.items()
            if isinstance(value, torch.Tensor) and not value.numel()
        },
        "rows": [segmented_program.inputs.least, segmented_program.inputs.most],
        "canonical": {targets[node]: name for node, name in names.items()},
        "trainable": trainable,
        "gradients": {tensor.name: tensor.gradient for tensor in graph.tensors},
        "segments": [
            {
                "name": part.name,
                "modules": part.modules,
                "nodes": part.nodes,
                "owned": sorted(part.owned_nodes),
                "random": part.random,
            }
            for part in segmented_program.segments
        ],
    }


def _restore(program: ExportedProgram, content: Mapping[str, Any]) -> LayerGraph:
    for name, shape in content["empty"].items():
        program.constants[name] = program.constants[name].new_empty(shape)
    least, most = content["rows"]
    inputs = replace(placeholders(program, content["tensors"], content["canonical"]), least=least, most=most)
    segments = tuple(
        LayerNodes(part["name"], tuple(part["modules"]), tuple(part["nodes"]), frozenset(part["owned"]), part["random"])
        for part in content["segments"]
    )
    known = {node.name for node in program.graph.nodes}
    missing = [name for part in segments for name in part.nodes if name not in known]
    if missing:
        raise ValueError(f"node {missing[0]} is missing")
    stored = {**program.constants, **program.state_dict}
    # What export reads back as a buffer may carry a graph and ask for gradients.
    values = {name: stored[target].detach() for target, name in content["canonical"].items()}
    values |= {name: nn.Parameter(values[name], requires_grad=flag) for name, flag in content["trainable"].items()}
    exported = SegmentedProgram(program, inputs, segments, tuple(content["loss"]))
    graph = assemble(exported, content["tensors"], values)
    return with_gradients(graph, content["gradients"])


def merge_layers(graph: LayerGraph, names: Sequence[str]) -> LayerGraph:
    """Return a graph with layers of these names, each of some of its layers in a row; itself where there are none."""
    exported: SegmentedProgram | None = graph.segmented_program
    if exported is None or [layer.name for layer in graph.layers] == list(names):
        return graph
    groups: list[list[LayerNodes]] = []
    for part in exported.segments:
        if len(groups) < len(names) and _within(part, names[len(groups)]):
            groups.append([])
        if not groups or not _within(part, names[len(groups) - 1]):
            return graph
        groups[-1].append(part)
    if len(groups) < len(names):
        return graph
    order = {node.name: index for index, node in enumerate(exported.program.graph.nodes)}
    segments = tuple(_merge_segments(name, group, order) for name, group in zip(names, groups, strict=True))
    found = assemble(replace(exported, segments=segments), graph.inputs, _values(graph))
    found = with_gradients(found, gradient_flow(found))
    return replace(found, notes=graph.notes)


def _within(part: LayerNodes, name: str) -> bool:
    """Tell whether a layer is one of this name, or begins with a call that is of this name or lies within it."""
    (path, _, again), (outer, _, outer_again) = part.modules[0].partition("@"), name.partition("@")
    return part.name == name or (again == outer_again and f"{path}.".startswith(f"{outer}."))


def _merge_segments(name: str, parts: Sequence[LayerNodes], order: dict[str, int]) -> LayerNodes:
    return LayerNodes(
        name=name,
        modules=tuple(dict.fromkeys(module for part in parts for module in part.modules)),
        nodes=tuple(sorted({node for part in parts for node in part.nodes}, key=order.__getitem__)),
        owned_nodes=frozenset().union(*(part.owned_nodes for part in parts)),
        random=any(part.random for part in parts),
    )


def _values(graph: LayerGraph) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a graph, by name."""
    values: dict[str, torch.Tensor] = {}
    for layer in graph.layers:
        values |= {name: layer.parameter(attribute) for attribute, name in layer.parameters.items()}
        values |= {name: layer.module.get_buffer(attribute) for attribute, name in layer.buffers.items()}
    return values
