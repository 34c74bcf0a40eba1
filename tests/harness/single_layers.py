"""Make one layer of a module, as capture does, however many layers capture would cut it into; and a module for it."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from autopar.capture.graph import Layer


def layer_of(module: nn.Module, *inputs: torch.Tensor) -> Layer:
    """Export a module, of tensors whose first dimension counts rows, as one layer."""
    batch = Dim("batch", min=1)
    shapes = tuple({0: batch} for _ in inputs)
    program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    return layer_of_program(program, module)


def layer_of_program(program: ExportedProgram, module: nn.Module) -> Layer:
    """Return the layer that a program of one module makes, with the module's own parameters."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    attributes, parameters, inputs = dict[str, torch.Tensor](), dict[str, str](), list[str]()
    graph.placeholder("rows")
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        spec = specs.get(node.name)
        if node.op != "placeholder" or spec is None or spec.kind == InputKind.USER_INPUT:
            made[node] = graph.node_copy(node, made.__getitem__)
            inputs += [node.name] if node.op == "placeholder" else []
            continue
        assert spec.target is not None
        attribute = "held_" + spec.target.replace(".", "_")
        where = program.constants if spec.kind == InputKind.CONSTANT_TENSOR else None
        attributes[attribute] = where[spec.target] if where else operator.attrgetter(spec.target)(module)
        made[node] = graph.get_attr(attribute)
        if spec.kind == InputKind.PARAMETER:
            parameters[attribute] = spec.target
    outputs = tuple(output.arg.name for output in program.graph_signature.output_specs)
    names = ("layer", ("layer",), tuple(inputs), outputs)
    return Layer(*names, parameters, {}, False, "", fx.GraphModule(attributes, graph))


class AttentionBlock(nn.Module):
    """Attention and two matrices, with norms and dropout, before or behind a residual stream."""

    def __init__(self, heads: int = 4, width: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1)
