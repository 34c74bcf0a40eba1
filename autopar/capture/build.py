"""Turn segments of an exported graph into layers that run on their own."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.graph import Layer, TensorSpec
from autopar.capture.least_rows import least_rows
from autopar.capture.segment import Inputs, Segment, batch_dim, is_size
from autopar.capture.writes import graph_writes
from autopar.errors import CaptureError


@dataclass(frozen=True)
class Values:
    """The tensors behind the placeholders: parameters and buffers by name, constants by placeholder."""

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    constants: Mapping[str, torch.Tensor]


def build_layers(
    graph: fx.Graph, inputs: Inputs, segments: Sequence[Segment], values: Values, results: Sequence[str] = ()
) -> list[Layer]:
    """Build one graph module per segment; ``results`` names what the graph gives, if that is no loss."""
    names = _crossing_names(graph, segments)
    loss = ["loss"] if len(_results(graph)) == 1 else ["loss_sum", "loss_count"]
    last = list(results) or loss
    return [
        _Builder(graph, inputs, values, names, part).build(last if part is segments[-1] else []) for part in segments
    ]


def _results(graph: fx.Graph) -> list[fx.Node]:
    output: Any = next(node for node in graph.nodes if node.op == "output")
    return list(output.args[0])


def _crossing_names(graph: fx.Graph, segments: Sequence[Segment]) -> dict[str, str]:
    """Return the names of the tensors that cross boundaries, by node: ``layer:node``."""
    owner = {name: part for part in segments for name in part.owned}
    nodes = {node.name: node for node in graph.nodes}
    crossing = {}
    for part in segments:
        for name in part.nodes:
            for argument in nodes[name].all_input_nodes:
                made_in = owner.get(argument.name)
                if made_in is not None and made_in is not part:
                    crossing[argument.name] = f"{made_in.name}:{argument.name}"
    for node in _results(graph):
        # What the graph gives leaves its last layer, wherever it is made.
        made_in = owner.get(node.name)
        if made_in is not None and made_in is not segments[-1]:
            crossing[node.name] = f"{made_in.name}:{node.name}"
    return {node.name: crossing[node.name] for node in graph.nodes if node.name in crossing}


@dataclass
class _Builder:
    """Copies the nodes of one segment into a graph of their own."""

    source: fx.Graph
    inputs: Inputs
    values: Values
    crossing: Mapping[str, str]
    part: Segment
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)

    def build(self, results: Sequence[str]) -> Layer:
        """Build the layer; ``results`` names what the graph gives if this is the last one."""
        chosen = set(self.part.nodes)
        nodes = [node for node in self.source.nodes if node.name in chosen]
        self.rows = self.graph.placeholder("rows")
        read = self._inputs(nodes, chosen, _results(self.source) if results else [])
        for node, name in read:
            self.copies[node] = self.graph.placeholder(f"input_{_identifier(name)}")
            self.copies[node].meta = dict(node.meta)
        for node in nodes:
            self.copies[node] = self.graph.node_copy(node, self._argument)
        sent = [node for node in nodes if node.name in self.crossing and node.name in self.part.owned]
        given = [self.copies[node] for node in sent]
        if results:
            given += [self._argument(node) for node in _results(self.source)]
        self.graph.output(tuple(given))
        module = fx.GraphModule(self.attributes, self.graph, class_name="Layer")
        inputs = tuple(name for _, name in read)
        return Layer(
            name=self.part.name,
            modules=self.part.modules,
            inputs=inputs,
            outputs=(*(self.crossing[node.name] for node in sent), *results),
            parameters=self.parameters,
            buffers=self.buffers,
            random=self.part.random,
            fingerprint=_fingerprint(module, self.part.random),
            module=module,
            writes=graph_writes(module, self.parameters, self.buffers, inputs),
            least_rows=max(self.inputs.least, least_rows(module)),
            most_rows=self.inputs.most,
        )

    def _inputs(
        self, nodes: Sequence[fx.Node], chosen: set[str], results: Sequence[fx.Node]
    ) -> list[tuple[fx.Node, str]]:
        """Return what is read from outside: tensors of the batch, then crossing tensors, each in graph order."""
        read = {argument for node in nodes for argument in node.all_input_nodes}
        read |= set(results)
        batch = [
            (n, self.inputs.tensors[n.name]) for n in self.source.nodes if n in read and n.name in self.inputs.tensors
        ]
        others = [n for n in self.source.nodes if n in read and n.name in self.crossing and n.name not in chosen]
        return batch + [(node, self.crossing[node.name]) for node in others]

    def _argument(self, node: fx.Node) -> Any:  # noqa: ANN401
        if node in self.copies:
            return self.copies[node]
        if is_size(node, self.inputs.symbol):
            return self._size(node.meta["val"].node.expr)
        self.copies[node] = self._attribute(node)
        return self.copies[node]

    def _attribute(self, node: fx.Node) -> fx.Node:
        """Return a node that reads a parameter, buffer, constant or sub-graph from the layer's module."""
        name = node.name
        value: torch.Tensor | nn.Module
        if node.name in self.inputs.parameters:
            name, value = self._named("parameter", self.inputs.parameters[node.name], self.parameters)
        elif node.name in self.inputs.buffers:
            name, value = self._named("buffer", self.inputs.buffers[node.name], self.buffers)
        elif node.name in self.inputs.constants:
            name, value = f"constant_{node.name}", self.values.constants[node.name]
        elif node.op == "get_attr":
            owner = self.source.owning_module
            assert owner is not None
            value = owner.get_submodule(str(node.target))
        else:
            raise CaptureError(f"layer {self.part.name}: node {node.name} ({node.op}) is of no kind that can be read")
        self.attributes[name] = value
        copy = self.graph.get_attr(name)
        copy.meta = dict(node.meta)
        return copy

    def _named(self, kind: str, full_name: str, table: dict[str, str]) -> tuple[str, torch.Tensor]:
        attribute = f"{kind}_{_identifier(full_name)}"
        while table.get(attribute, full_name) != full_name:
            attribute += "_"
        table[attribute] = full_name
        return attribute, (self.values.parameters if kind == "parameter" else self.values.buffers)[full_name]

    def _size(self, expression: Any) -> Any:  # noqa: ANN401
        """Write an integer expression of the batch size as nodes over ``rows``."""
        kind = type(expression).__name__
        if expression.is_Symbol:
            return self.rows
        if expression.is_Integer:
            return int(expression)
        operation = _SIZE_OPERATIONS.get(kind)
        if operation is None:
            raise CaptureError(f"layer {self.part.name}: cannot compute the size {expression} from the batch size")
        values = [self._size(argument) for argument in expression.args]
        result = values[0]
        for value in values[1:]:
            result = self.graph.call_function(operation, (result, value))
        return result


_SIZE_OPERATIONS: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": max,
    "Min": min,
}


def _identifier(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def _fingerprint(module: fx.GraphModule, random: bool) -> str:
    """Hash operators, wiring, shapes and types, but not which parameters they are."""
    place = {node: index for index, node in enumerate(module.graph.nodes)}
    lines = [f"random {random}"]
    for node in module.graph.nodes:
        arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{place[n]}")
        target = "" if node.op in ("placeholder", "get_attr") else str(node.target)
        value = operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else node.meta.get("val")
        lines.append(f"{node.op} {target} {arguments} {_shape(value)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _shape(value: object) -> str:
    if isinstance(value, torch.Tensor):
        sizes = tuple(size if type(size) is int else "rows" for size in value.shape)
        return f"{sizes} {value.dtype} {value.requires_grad if isinstance(value, nn.Parameter) else ''}"
    if isinstance(value, fx.GraphModule):
        return value.code
    return ""


def tensor_specs(
    graph: fx.Graph, inputs: Inputs, segments: Sequence[Segment], layers: Sequence[Layer]
) -> list[TensorSpec]:
    """Describe every tensor that a layer reads."""
    nodes = {node.name: node for node in graph.nodes}
    known = {name: (None, nodes[node]) for node, name in inputs.tensors.items()}
    producers = {output: layer.name for layer in layers for output in layer.outputs}
    made = {name: (producers[name], nodes[node]) for node, name in _crossing_names(graph, segments).items()}
    specs = []
    for name, (producer, node) in {**known, **made}.items():
        consumers = tuple(layer.name for layer in layers if name in layer.inputs)
        if consumers:
            specs.append(spec_of(name, producer, consumers, node.meta["val"], inputs.symbol))
    return specs


def spec_of(
    name: str, producer: str | None, consumers: tuple[str, ...], value: torch.Tensor, symbol: str
) -> TensorSpec:
    """Describe a tensor of a graph that has the batch as one dimension."""
    dim = batch_dim(value, symbol)
    assert dim is not None
    sizes = tuple(int(size) for index, size in enumerate(value.shape) if index != dim)
    return TensorSpec(name, producer, consumers, sizes, dim, value.dtype, gradient=False)
