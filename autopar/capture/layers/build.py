"""Turn segments of an exported graph into layers that run on their own, and find what their forwards change.

Of a captured layer the graph tells what it changes beside its outputs; of a listed module, what operators write while
it runs, and which of its buffers are others afterwards. Running statistics of batch normalisation do not count.

    class Average(nn.Module):
        def forward(self, x):
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)  # a moving average, in a buffer
            return x - self.mean

Every micro-batch in flight keeps the buffers that its forward writes as they were: its backward, and a recomputation,
see them as its first forward did. The copies are counted in a plan's memory, and so are those of model inputs that a
recomputed layer writes. Running statistics of batch normalisation need no copies, since nothing reads them in training.

Replicas would each write their own, so such a layer has one replica in every plan that is found; profile and plan say
which layer and why, and stages of your own that ask for more are refused. ``autopar plan --replicate-state first`` (or
``average``) lifts that for buffers: after every step, those of the first replica, or the mean of all (of integers, the
first's), go to all. Training then differs from one replica's, and the plan says so.

A layer whose forward writes a parameter (``nn.Embedding(max_norm=1.0)``, a clamped weight) always has one replica, and
is not recomputed. No other stage may hold what it writes: captured layers that share it are one layer, listed modules
that do are refused. A listed module may assign a buffer anew (``self.mean = ...``).

It is found, too, how many samples a layer needs. The number of samples stays free, or within the range that torch
names: a model that has an ``if x.shape[0] < 64`` takes 1 to 63 at once. Batch normalisation in training refuses a
single value per channel, as torch's modules do; its operator, which is what a graph holds, goes on, and makes its
running variance not a number. And a model may do something else with a single sample (``if len(x) == 1:``), of which a
graph that was captured with two shows nothing. Such layers take at least two samples, and so does a listed module that
raises for one. Every plan that is found obeys; stages of your own, and edited plans, that do not are refused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.capture.graph import Layer, TensorSpec
from autopar.capture.layers.segment import GraphInputs, LayerNodes, batch_dim, is_size
from autopar.capture.model.effects import operands, reachable, storage_of, submodules, written_nodes
from autopar.capture.model.state import WriteLog, preserve_buffers, preserve_parameters
from autopar.capture.model.terms import terms_of
from autopar.errors import CaptureError
from autopar.formats.profile import Writes

_INPUT, _MEAN, _VARIANCE, _TRAINING = 0, 3, 4, 5
"""Places of arguments of ``batch_norm``."""


def _graph_writes(
    module: fx.GraphModule, parameters: Mapping[str, str], buffers: Mapping[str, str], inputs: Sequence[str]
) -> Writes | None:
    """Return what a captured layer changes; none if nothing.

    ``parameters`` and ``buffers`` lead from attributes to names; ``inputs`` are what it takes after the number of rows.
    """
    changed = written_nodes(module.graph)
    named = {buffers[str(node.target)]: node for node in changed if node.op == "get_attr" and node.target in buffers}
    statistics = {name for name, node in named.items() if _is_statistic(node)}
    statistics |= {f"{name.rpartition('.')[0]}.num_batches_tracked".removeprefix(".") for name in statistics}
    places = {node: place for place, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    return _writes_of(
        [name for name in named if name not in statistics],
        [parameters[str(node.target)] for node in changed if node.op == "get_attr" and node.target in parameters],
        [inputs[places[node] - 1] for node in changed if node in places],
    )


def _is_statistic(node: fx.Node) -> bool:
    """Tell whether a buffer's only readers are batch normalisations that write it."""
    return bool(node.users) and all(_normalizes(user, node) for user in node.users)


def _normalizes(user: fx.Node, buffer: fx.Node) -> bool:
    if user.target is torch.ops.aten.batch_norm.default:
        places = [place for place, argument in enumerate(user.args) if argument is buffer]
        return {_MEAN, _VARIANCE}.issuperset(places) and user.args[_TRAINING] is True
    inner = submodules(user)
    if len(inner) != 1:
        return False
    given = operands(user)
    placeholders = [node for node in inner[0].graph.nodes if node.op == "placeholder"]
    if len(given) != len(placeholders):
        return False
    return all(_is_statistic(inside) for outside, inside in zip(given, placeholders, strict=True) if outside is buffer)


@contextlib.contextmanager
def record_writes(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Iterator[list[Writes]]:
    """Watch a listed module run inside the block; the list then holds what it changed, by its own names."""
    found: list[Writes] = []
    statistics = running_statistics(module)
    buffers = {name: each for name, each in _buffers(module).items() if name not in statistics}
    memory = {name: storage_of(each) for name, each in buffers.items()}
    log = WriteLog([*module.parameters(), *buffers.values(), *inputs.values()])
    with log:
        yield found
    written_ids = {id(tensor) for tensor, _ in log.previous_values}
    after = _buffers(module)

    def is_replaced(name: str) -> bool:
        now = after.get(name)
        return now is not buffers[name] or storage_of(now) != memory[name]

    changes = _writes_of(
        [name for name, each in buffers.items() if id(each) in written_ids or is_replaced(name)],
        [name for name, each in module.named_parameters(remove_duplicate=False) if id(each) in written_ids],
        [name for name, each in inputs.items() if id(each) in written_ids],
    )
    if changes is not None:
        found.append(changes)


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_buffers(remove_duplicate=False))


def running_statistics(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the running statistics of torch's own batch normalisations in a module, by attribute."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, each in module.named_modules(remove_duplicate=False)
        if isinstance(each, _BatchNorm) and type(each).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
        for name, buffer in each.named_buffers(recurse=False)
    }


def read_statistics(module: nn.Module, run: Callable[[], Sequence[torch.Tensor]]) -> tuple[str, ...]:
    """Return a listed module's running statistics, if they move what ``run`` (on the same inputs each time) gives."""
    statistics = running_statistics(module)
    floating = [each for each in statistics.values() if each.is_floating_point()]
    if not floating:
        return ()
    before = {name: each.clone() for name, each in _buffers(module).items()}
    given = []
    with torch.no_grad():
        for shift in (0.0, 1.0):
            for name, each in _buffers(module).items():
                each.copy_(before[name])
            for each in floating:
                each.add_(shift)
            with torch.random.fork_rng(devices=[]):
                given.append([output.detach().clone() for output in run()])
        for name, each in _buffers(module).items():
            each.copy_(before[name])
    alike = all(torch.equal(one, other) for one, other in zip(*given, strict=True))
    return () if alike else tuple(statistics)


def merge_writes(every: Sequence[Writes]) -> Writes | None:
    """Return all changes of several runs."""
    return _writes_of(
        [name for each in every for name in each.buffers],
        [name for each in every for name in each.parameters],
        [name for each in every for name in each.inputs],
    )


def _writes_of(buffers: Sequence[str], parameters: Sequence[str], inputs: Sequence[str]) -> Writes | None:
    names = [tuple(dict.fromkeys(each)) for each in (buffers, parameters, inputs)]
    return Writes(buffers=names[0], parameters=names[1], inputs=names[2]) if any(names) else None


_ALLOWED = 1e-3
"""Relative difference of what model and layers give; another order of sums makes far less."""


def _least_rows(module: fx.GraphModule) -> int:
    """Return the least number of samples that the forward of a layer can be given."""
    found = 1
    for node in module.graph.nodes:
        for inner in submodules(node):
            found = max(found, _least_rows(inner))
        if node.target is torch.ops.aten.batch_norm.default and node.args[_TRAINING] is True:
            shape = node.args[_INPUT].meta["val"].shape
            if all(isinstance(size, int) for size in shape[2:]) and math.prod(shape[2:]) == 1:
                found = 2
    return found


def right_for_one(
    step: nn.Module,
    layers: Sequence[Layer],
    tensors: Mapping[str, torch.Tensor],
    output_mask: Sequence[bool] | None = None,
) -> bool:
    """Tell whether a model's layers, in order, give for one sample what the model (with its loss or not) gives.

    ``tensors`` are a batch of two samples or more: if layers differ from the model on two of them, one tells nothing.
    ``output_mask`` says which of what ``step`` returns the layers give; none: all.
    """

    def are_alike(rows: int) -> bool:
        known = {name: tensor[:rows].clone() for name, tensor in tensors.items()}
        found: tuple[torch.Tensor, ...] = ()
        try:
            # Batch normalisation is known by its layers: elsewhere a single sample may do.
            with preserve_buffers(step), preserve_parameters(step), patch.object(functional, "_verify_batch_size"):
                expected = list(step(*(tensor.clone() for tensor in known.values())))
            with preserve_buffers(step), preserve_parameters(step):
                for layer in layers:
                    found = layer.module(rows, *(known[name].detach() for name in layer.inputs))
                    known.update(zip(layer.outputs, found, strict=True))
        except Exception:
            return False
        if output_mask is not None:
            expected = list(compress(expected, output_mask))
        return all(
            one.shape == other.shape and torch.allclose(one, other, _ALLOWED, _ALLOWED * 1e-3, equal_nan=True)
            for one, other in zip(expected, found[-len(expected) :], strict=True)
        )

    return are_alike(1) or not are_alike(2)


@dataclass(frozen=True, eq=False)
class SegmentedProgram:
    """An exported program that is cut into layers: enough to cut it again."""

    program: ExportedProgram
    inputs: GraphInputs
    segments: tuple[LayerNodes, ...]
    loss: tuple[str, ...] = ("loss",)
    """Names of what it gives for the loss."""


def build_layers(
    segmented_program: SegmentedProgram, values: Mapping[str, torch.Tensor], results: Sequence[str] = ()
) -> list[Layer]:
    """Build one graph module per segment, of ``values`` by name; ``results`` names outputs that are no loss."""
    crossing = _crossing_names(segmented_program)
    *first, last = (_Builder(segmented_program, values, crossing, part) for part in segmented_program.segments)
    return [*(builder.build([]) for builder in first), last.build(results or segmented_program.loss)]


def _results(graph: fx.Graph) -> list[fx.Node]:
    output: Any = graph.output_node()
    return list(output.args[0])


def _crossing_names(segmented_program: SegmentedProgram) -> dict[str, str]:
    """Return the names of the tensors that cross boundaries, by node: ``layer:node``."""
    graph, segments = segmented_program.program.graph, segmented_program.segments
    owner = {name: part for part in segments for name in part.owned_nodes}
    nodes = {node.name: node for node in graph.nodes}
    read = [(node, part) for part in segments for name in part.nodes for node in nodes[name].all_input_nodes]
    # What the graph gives leaves its last layer, wherever it is made.
    read += [(node, segments[-1]) for node in _results(graph)]
    crossing = {node.name for node, part in read if owner.get(node.name, part) is not part}
    return {node.name: f"{owner[node.name].name}:{node.name}" for node in graph.nodes if node.name in crossing}


@dataclass
class _Builder:
    """Copies the nodes of one segment into a graph of their own."""

    segmented_program: SegmentedProgram
    values: Mapping[str, torch.Tensor]
    crossing: Mapping[str, str]
    part: LayerNodes
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)

    def build(self, results: Sequence[str]) -> Layer:
        """Build the layer; ``results`` names what the graph gives if this is the last one."""
        source, limits = self.segmented_program.program.graph, self.segmented_program.inputs
        chosen = set(self.part.nodes)
        nodes = [node for node in source.nodes if node.name in chosen]
        self.rows = self.graph.placeholder("rows")
        read = self._inputs(nodes, _results(source) if results else [])
        for node, name in read:
            self.copies[node] = self.graph.placeholder(f"input_{_identifier(name)}")
            self.copies[node].meta = dict(node.meta)
        for node in nodes:
            self.copies[node] = self.graph.node_copy(node, self._argument)
        sent = [node for node in nodes if node.name in self.crossing and node.name in self.part.owned_nodes]
        given = [self.copies[node] for node in sent]
        if results:
            given += [self._argument(node) for node in _results(source)]
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
            writes=_graph_writes(module, self.parameters, self.buffers, inputs),
            least_rows=max(limits.least, _least_rows(module)),
            most_rows=limits.most,
        )

    def _inputs(self, nodes: Sequence[fx.Node], results: Sequence[fx.Node]) -> list[tuple[fx.Node, str]]:
        """Return what is read from outside: tensors of the batch, then crossing tensors, each in graph order."""
        read = {argument for node in nodes for argument in node.all_input_nodes}.union(results).difference(nodes)
        names = {**self.segmented_program.inputs.tensors, **self.crossing}
        return [
            (node, names[node.name])
            for node in self.segmented_program.program.graph.nodes
            if node in read and node.name in names
        ]

    def _argument(self, node: fx.Node) -> Any:  # noqa: ANN401
        if node in self.copies:
            return self.copies[node]
        if is_size(node, self.segmented_program.inputs.symbol):
            return self._size(node.meta["val"].node.expr)
        self.copies[node] = self._attribute(node)
        return self.copies[node]

    def _attribute(self, node: fx.Node) -> fx.Node:
        """Return a node that reads a parameter, buffer, constant or sub-graph from the layer's module."""
        name, inputs = node.name, self.segmented_program.inputs
        value: torch.Tensor | nn.Module
        if name in inputs.parameters:
            name, value = self._tensor_attribute("parameter", inputs.parameters[name], self.parameters)
        elif name in inputs.buffers:
            name, value = self._tensor_attribute("buffer", inputs.buffers[name], self.buffers)
        elif name in inputs.constants:
            name, value = f"constant_{name}", self.segmented_program.program.constants[inputs.constants[name]]
        elif node.op == "get_attr":
            owner = self.segmented_program.program.graph.owning_module
            assert owner is not None
            value = owner.get_submodule(str(node.target))
        else:
            raise CaptureError(f"layer {self.part.name}: node {node.name} ({node.op}) is of no kind that can be read")
        self.attributes[name] = value
        copy = self.graph.get_attr(name)
        copy.meta = dict(node.meta)
        return copy

    def _tensor_attribute(self, kind: str, full_name: str, table: dict[str, str]) -> tuple[str, torch.Tensor]:
        attribute = f"{kind}_{_identifier(full_name)}"
        while table.get(attribute, full_name) != full_name:
            attribute += "_"
        table[attribute] = full_name
        return attribute, self.values[full_name]

    def _size(self, expression: Any) -> Any:  # noqa: ANN401
        """Write an integer expression of the batch size as nodes over ``rows``."""
        kind = type(expression).__name__
        if expression.is_Symbol:
            return self.rows
        if expression.is_Integer:
            return int(expression)
        operation = SIZE_OPERATIONS.get(kind)
        if operation is None:
            raise CaptureError(f"layer {self.part.name}: cannot compute the size {expression} from the batch size")
        values = [self._size(argument) for argument in expression.args]
        return functools.reduce(lambda one, other: self.graph.call_function(operation, (one, other)), values)


SIZE_OPERATIONS: dict[str, Callable[..., Any]] = {
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


def tensor_specs(segmented_program: SegmentedProgram, layers: Sequence[Layer]) -> list[TensorSpec]:
    """Describe every tensor that a layer reads."""
    producers = {output: layer.name for layer in layers for output in layer.outputs}
    nodes = {node.name: node for node in segmented_program.program.graph.nodes}
    known: list[tuple[str, str, str | None]] = [(*each, None) for each in segmented_program.inputs.tensors.items()]
    known += [(node, name, producers[name]) for node, name in _crossing_names(segmented_program).items()]
    specs = []
    for node, name, producer in known:
        consumers = tuple(layer.name for layer in layers if name in layer.inputs)
        if consumers:
            specs.append(spec_of(name, producer, consumers, nodes[node].meta["val"], segmented_program.inputs.symbol))
    return specs


def spec_of(
    name: str, producer: str | None, consumers: tuple[str, ...], value: torch.Tensor, symbol: str
) -> TensorSpec:
    """Describe a tensor of a graph that has the batch as one dimension."""
    dim = batch_dim(value, symbol)
    assert dim is not None
    sizes = tuple(int(size) for index, size in enumerate(value.shape) if index != dim)
    return TensorSpec(name, producer, consumers, sizes, dim, value.dtype, gradient=False)


# Gradients of several quotients cannot be divided by one count when they are complete. So their counts are computed of
# the batch alone, before the first backward.
def counting_module(layer: Layer, batch_names: Collection[str]) -> fx.GraphModule | None:
    """Return what counts for a loss: called as the last layer's module is, it gives the counts; None where none do.

    Args:
        layer: the last, as captured.
        batch_names: of a batch's tensors.

    Raises:
        CaptureError: a count is computed of something else; names the term.
    """
    terms = [term for term in terms_of([name for name in layer.outputs if ":" in name]) if term.divisor is not None]
    if not terms:
        return None
    if not isinstance(layer.module, fx.GraphModule):
        raise CaptureError(
            f"loss() divides {terms[0].name!r} by a count of its own, which a model whose layers are listed cannot; "
            "let loss() return one (sum, count), or means"
        )
    graph = copy.deepcopy(layer.module.graph)
    end: Any = graph.output_node()
    results = dict(zip(layer.outputs, end.args[0], strict=True))
    read = dict(zip(list(graph.find_nodes(op="placeholder"))[1:], layer.inputs, strict=True))
    late = {node for node, name in read.items() if name not in batch_names}
    late |= {node for node in graph.find_nodes(op="get_attr") if node.target in layer.parameters}
    for term in terms:
        count = results[str(term.divisor)]
        if isinstance(count, fx.Node) and late & reachable([count], lambda node: node.all_input_nodes).keys():
            raise CaptureError(
                f"the count of {term.name!r} in what loss() returns is computed of the model's output, and has to be "
                "known before the first backward; compute it of the batch alone, or let loss() return one (sum, count)"
            )
    end.args = (tuple(results[str(term.divisor)] for term in terms),)
    graph.eliminate_dead_code()
    return fx.GraphModule(layer.module, graph, class_name="Counts")


def counts_of(module: fx.GraphModule, rows: int, layer: Layer, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the counts of a share of a micro-batch, of the terms that have one, as float64.

    What else the last layer reads is not there yet, and not asked for.
    """
    nothing = torch.empty(0)
    given = module(rows, *(inputs.get(name, nothing) for name in layer.inputs))
    return torch.stack([torch.as_tensor(each).detach().double().reshape(()) for each in given])
