"""Merged: a graph with fewer layers, or other names, as an earlier autopar had them.

It did not split stages into their blocks, and named a layer that joins modules after the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from autopar.capture.build import Values
from autopar.capture.export import Exported, assemble, with_gradients
from autopar.capture.gradient_flow import gradient_flow
from autopar.capture.graph import LayerGraph
from autopar.capture.segment import Segment


def merged(graph: LayerGraph, names: Sequence[str]) -> LayerGraph:
    """Return a graph with layers of these names, where each is a layer of the graph or holds some of them in a row.

    A graph of which no such layers can be made is returned as it is.
    """
    exported: Exported | None = graph.exported
    if exported is None or [layer.name for layer in graph.layers] == list(names):
        return graph
    groups: list[list[Segment]] = []
    for part in exported.segments:
        if len(groups) < len(names) and _within(part, names[len(groups)]):
            groups.append([])
        if not groups or not _within(part, names[len(groups) - 1]):
            return graph
        groups[-1].append(part)
    if len(groups) < len(names):
        return graph
    order = {node.name: index for index, node in enumerate(exported.program.graph.nodes)}
    segments = tuple(_joined(name, group, order) for name, group in zip(names, groups, strict=True))
    found = assemble(replace(exported, segments=segments), graph.inputs, _values(graph, exported))
    found = with_gradients(found, gradient_flow(found))
    return replace(found, notes=graph.notes)


def _within(part: Segment, name: str) -> bool:
    """Tell whether a layer is one of this name, or begins with a call that is of this name or lies within it."""
    (path, _, again), (outer, _, outer_again) = part.modules[0].partition("@"), name.partition("@")
    return part.name == name or (again == outer_again and f"{path}.".startswith(f"{outer}."))


def _joined(name: str, parts: Sequence[Segment], order: dict[str, int]) -> Segment:
    return Segment(
        name=name,
        modules=tuple(dict.fromkeys(module for part in parts for module in part.modules)),
        nodes=tuple(sorted({node for part in parts for node in part.nodes}, key=order.__getitem__)),
        owned=frozenset().union(*(part.owned for part in parts)),
        random=any(part.random for part in parts),
    )


def _values(graph: LayerGraph, exported: Exported) -> Values:
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    for layer in graph.layers:
        parameters |= {name: layer.parameter(attribute) for attribute, name in layer.parameters.items()}
        buffers |= {name: layer.module.get_buffer(attribute) for attribute, name in layer.buffers.items()}
    targets = exported.inputs.constants.items()
    return Values(parameters, buffers, {node: exported.program.constants[target] for node, target in targets})
