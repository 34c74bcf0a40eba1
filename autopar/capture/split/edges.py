"""Which tensors cross a layer's edge in slices of the sequence.

find_edges(module, layer, {"embedding": 1}, 2)    # its input comes in two slices of dimension 1, one on each part
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.capture.graph import Layer
from autopar.capture.split.names import MismatchError


@dataclass(frozen=True)
class Edges:
    """What comes and goes in slices, with the dimension that they are of."""

    inputs: Mapping[fx.Node, int] = field(default_factory=dict)
    outputs: Mapping[int, int] = field(default_factory=dict)
    """By place among the outputs."""

    def output_nodes(self, module: fx.GraphModule) -> Iterator[tuple[fx.Node, int]]:
        """Yield the nodes that give slices, with the dimension."""
        found = output_nodes(module)
        for place, dim in self.outputs.items():
            yield found[place], dim


NO_EDGES = Edges()
"""Where all tensors cross as a whole."""


def input_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """Return a layer's inputs, behind the number of rows."""
    return [node for node in module.graph.nodes if node.op == "placeholder"][1:]


def output_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """Return what a layer gives."""
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0])


def find_edges(module: fx.GraphModule, layer: Layer, sequence: Mapping[str, int], count: int) -> Edges:
    """Return what crosses the edge of a layer's module in slices.

    Args:
        module: the layer's, as it was analysed.
        layer: names its inputs and outputs.
        sequence: those that are in slices, by name, with the dimension.
        count: of slices.

    Raises:
        MismatchError: the layer has no such tensor, or slices of it would not be even.
    """
    if not sequence:
        return NO_EDGES
    inputs = dict(zip(layer.inputs, input_nodes(module), strict=True))
    outputs = output_nodes(module)
    for name, dim in sequence.items():
        nodes = [inputs[name]] if name in inputs else []
        nodes += [node for each, node in zip(layer.outputs, outputs, strict=True) if each == name]
        if not nodes:
            raise MismatchError(f"tensor {name} is no input or output of the layer")
        if not all(has_even_slices(node, dim, count) for node in nodes):
            raise MismatchError(f"dimension {dim} of tensor {name} has no {count} even slices")
    return Edges(
        {inputs[name]: dim for name, dim in sequence.items() if name in inputs},
        {place: sequence[name] for place, name in enumerate(layer.outputs) if name in sequence},
    )


def has_even_slices(node: object, dim: int, count: int) -> bool:
    """Tell whether a tensor's dimension is of a length that so many parts divide; the number of rows is none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not 0 <= dim < value.dim():
        return False
    length = value.shape[dim]
    return isinstance(length, int) and length > 1 and length % count == 0
