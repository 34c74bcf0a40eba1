"""Make one layer of a module, as capture does, however many layers capture would cut it into; and a module for it."""

import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind

from autopar.capture.graph import Layer
from capture_zoo import Made


def layer_of(module: nn.Module, *inputs: torch.Tensor) -> Layer:
    """Export a module, of tensors whose first dimension counts rows, as one layer with the module's own parameters."""
    batch = Dim("batch", min=1)
    shapes = tuple({0: batch} for _ in inputs)
    program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    attributes, parameters, names = dict[str, torch.Tensor](), dict[str, str](), list[str]()
    graph.placeholder("rows")
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        spec = specs.get(node.name)
        if node.op != "placeholder" or spec is None or spec.kind == InputKind.USER_INPUT:
            made[node] = graph.node_copy(node, made.__getitem__)
            names += [node.name] if node.op == "placeholder" else []
            continue
        assert spec.target is not None
        attribute = "held_" + spec.target.replace(".", "_")
        where = program.constants if spec.kind == InputKind.CONSTANT_TENSOR else None
        attributes[attribute] = where[spec.target] if where else operator.attrgetter(spec.target)(module)
        made[node] = graph.get_attr(attribute)
        if spec.kind == InputKind.PARAMETER:
            parameters[attribute] = spec.target
    outputs = tuple(output.arg.name for output in program.graph_signature.output_specs)
    known = ("layer", ("layer",), tuple(names), outputs)
    return Layer(*known, parameters, {}, False, "", fx.GraphModule(attributes, graph))


def numbers(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


def between(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Make two matrices, and a function between them."""
    return Made(lambda m, x: m.down(function(m.up(x))), up=nn.Linear(4, 6), down=nn.Linear(6, 4))


class FewKeys(nn.Module):
    """Queries, keys and values of one projection; of keys, one head for a group of queries, turned before use."""

    def __init__(self, keys: int, group: int, scaled: bool = False) -> None:
        super().__init__()
        self.sizes, self.group = [2 * keys * group, 2 * keys, 2 * keys], group
        self.qkv, self.out = nn.Linear(8, sum(self.sizes)), nn.Linear(self.sizes[0], 8)
        self.scale = nn.Parameter(torch.ones(2)) if scaled else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = self.qkv(x).split(self.sizes, -1)
        query, key, value = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in pieces)
        query = query if self.scale is None else query * self.scale
        query, key = (torch.cat([-each[..., 1:], each[..., :1]], -1) + each for each in (query, key))
        key, value = (each.repeat_interleave(self.group, 1) for each in (F.dropout(key, 0.2), value))
        return x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
