"""Store: a captured graph in a folder, without its weights, and back where the user's code need not run.

A folder holds the layers as lines of JSON, a first line that says what they are, and the constants that they read as
bytes in a safetensors file. Who needs some layers alone reads their lines alone; of the others there is what planners
and runtimes ask of any layer: names, parameters, limits.

An earlier autopar did not split stages into their blocks, and named a layer that joins modules after the first of them:
for its plans, layers are merged and renamed.

The graph of a layer is plain JSON; nothing in it is run, or found by evaluating a text.

    ["linear", "call_function", "aten.linear.default",
     [{"node": "input_x"}, {"node": "parameter_head_weight"}], {},
     {"sizes": ["rows", 10], "strides": [10, 1], "dtype": "float32", "device": "cpu"}]

A node is its name, kind, target, arguments, keywords, and the shape of what it gives. Operators are torch's, by name,
or few functions of Python's; sizes are numbers, or sums and products of the number of ``rows``. Blocks within a graph
are graphs of their own. Parameters, buffers and constants are not part of it: who reads it gives them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import fx, nn
from torch._guards import GuardSource, Source
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from autopar.capture.graph import Layer, LayerGraph, TensorSpec
from autopar.capture.layers.build import SIZE_OPERATIONS, SegmentedProgram
from autopar.capture.layers.export import assemble, with_gradients
from autopar.capture.layers.segment import LayerNodes
from autopar.capture.layers.split_backward import gradient_flow
from autopar.errors import CaptureError, FileError
from autopar.formats.profile import Writes

LAYERS, CONSTANTS = "layers.json", "constants.safetensors"
_FORMAT = {"format": "autopar.captured", "version": 1}


def save_graph(graph: LayerGraph, folder: str | Path) -> None:
    """Write a layer graph into a folder (made if missing): parameters and buffers as shapes only.

    Raises:
        CaptureError: the graph is not portable (made of ``layers(model)``), or an operator has no name.
        FileError: the folder cannot be written.
    """
    if not graph.portable:
        raise CaptureError("a graph of layers(model) cannot be saved; every rank captures the model for itself")
    constants = dict[str, torch.Tensor]()
    layers = [_layer_content(layer, constants) for layer in graph.layers]
    lines = [json.dumps(each, separators=(",", ":")) for each in (_header(graph), *layers)]
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LAYERS).write_text("\n".join(lines) + "\n", encoding="utf-8")
        save_file(constants, folder / CONSTANTS)
    except OSError as error:
        raise FileError(f"cannot write the captured graph into {folder}: {error.strerror}") from error


def load_graph(
    folder: str | Path,
    values: Mapping[str, torch.Tensor] | None = None,
    only: Collection[str] | None = None,
    *,
    shapes: bool = True,
) -> LayerGraph:
    """Read a layer graph back.

    Args:
        folder: where it is.
        values: the model's parameters and buffers by name; none: they are shapes, on the meta device.
        only: names of layers that will run; others have no graph. None: all.
        shapes: whether nodes say what shapes they give, which splitting layers asks for, and running them does not.

    Raises:
        FileError: the folder holds no layer graph, or a broken one.
    """
    folder = Path(folder)
    try:
        header, *lines = (folder / LAYERS).read_text(encoding="utf-8").splitlines()
        return _restore(json.loads(header), lines, folder / CONSTANTS, values, only, GraphReader(shapes=shapes))
    except OSError as error:
        raise FileError(f"cannot read the captured graph in {folder}: {error.strerror or error}") from error
    except (AttributeError, IndexError, KeyError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise FileError(f"{folder}: not a captured graph of this autopar ({error}); capture it again") from error


def _header(graph: LayerGraph) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
    for layer in graph.layers:
        for name, value in layer.named_parameters():
            parameters[name] = [*_shape_content(value), value.requires_grad]
        for attribute, name in layer.buffers.items():
            buffers[name] = _shape_content(layer.module.get_buffer(attribute))
    return {
        **_FORMAT,
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "hollow": graph.on_meta,
        "notes": graph.notes,
        "names_read": None if graph.names_read is None else sorted(graph.names_read),
        "parameters": parameters,
        "buffers": buffers,
        "tensors": [[*astuple(each)[:5], dtype_name(each.dtype), each.gradient] for each in graph.tensors],
        "layers": [layer.name for layer in graph.layers],
    }


def _shape_content(value: torch.Tensor) -> list[Any]:
    return [list(value.shape), dtype_name(value.dtype)]


def _layer_content(layer: Layer, constants: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return a layer; ``constants`` is content of those that it reads, each once by what it holds."""
    assert isinstance(layer.module, fx.GraphModule)
    return {
        "name": layer.name,
        "modules": layer.modules,
        "inputs": layer.inputs,
        "outputs": layer.outputs,
        "parameters": dict(layer.parameters),
        "buffers": dict(layer.buffers),
        "random": layer.random,
        "fingerprint": layer.fingerprint,
        "writes": None if layer.writes is None else layer.writes.model_dump(),
        "rows": [layer.least_rows, layer.most_rows],
        "constants": {name: _kept(value, constants) for name, value in constants_of(layer)},
        "graph": graph_content(layer.module),
    }


def constants_of(layer: Layer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a captured layer reads beside inputs, parameters and buffers, with their names in it.

    Raises:
        CaptureError: what it reads is no tensor.
    """
    module: Any = layer.module
    read = dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "get_attr")
    for name in read:
        value: Any = getattr(module, name)
        if name in layer.parameters or name in layer.buffers or isinstance(value, nn.Module):
            continue
        if not isinstance(value, torch.Tensor):
            raise CaptureError(f"layer {layer.name}: a {type(value).__name__} cannot be saved with a captured graph")
        yield name, value.detach()


def _kept(value: torch.Tensor, constants: dict[str, torch.Tensor]) -> list[Any]:
    if not value.numel():
        return [None, *_shape_content(value), []]
    # As it lies: what layers share is one when it is read, and what is expanded takes no more.
    value = value.cpu().resolve_conj().resolve_neg()
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    place = hashlib.sha256(repr((value.data_ptr(), span, value.dtype)).encode())
    key = place.hexdigest()[:32]
    constants[key] = value.as_strided((span,), (1,)).clone().view(torch.uint8)
    return [key, *_shape_content(value), list(value.stride())]


def _restore(
    header: Mapping[str, Any],
    lines: Sequence[str],
    constants: Path,
    values: Mapping[str, torch.Tensor] | None,
    only: Collection[str] | None,
    reader: GraphReader,
) -> LayerGraph:
    if {key: header.get(key) for key in _FORMAT} != _FORMAT or len(lines) != len(header["layers"]):
        raise ValueError("another format")
    if values is None:
        values = {name: _on_meta(shape, dtype) for name, (shape, dtype) in header["buffers"].items()}
        for name, (shape, dtype, trained) in header["parameters"].items():
            values[name] = nn.Parameter(_on_meta(shape, dtype), requires_grad=trained)
    with safe_open(constants, framework="pt") as file:

        @functools.cache
        def read(key: str) -> torch.Tensor:
            found: torch.Tensor = file.get_tensor(key)
            return found

        def constant(key: str | None, shape: list[int], dtype: str, stride: list[int]) -> torch.Tensor:
            kind = dtype_of(dtype)
            return torch.empty(shape, dtype=kind) if key is None else read(key).view(kind).as_strided(shape, stride)

        def layer_of(line: str, name: str) -> Layer:
            content = json.loads(line)
            if content["name"] != name:
                raise ValueError(f"layer {content['name']} stands for {name}")
            attributes = {at: values[full] for at, full in (content["parameters"] | content["buffers"]).items()}
            if only is not None and name not in only:
                return _layer(content, _other_ranks_module(attributes))
            attributes |= {at: constant(*each) for at, each in content["constants"].items()}
            return _layer(content, reader.module(content["graph"], attributes))

        layers = tuple(map(layer_of, lines, header["layers"]))
    names = header["names_read"]
    return LayerGraph(
        layers=layers,
        tensors=tuple(map(_tensor, header["tensors"])),
        inputs=tuple(header["inputs"]),
        outputs=tuple(header["outputs"]),
        on_meta=header["hollow"],
        notes=tuple(header["notes"]),
        names_read=None if names is None else frozenset(names),
    )


def _on_meta(shape: Sequence[int], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype_of(dtype), device="meta")


def _tensor(content: Sequence[Any]) -> TensorSpec:
    name, producer, consumers, sizes, dim, dtype, gradient = content
    return TensorSpec(name, producer, tuple(consumers), tuple(sizes), dim, dtype_of(dtype), gradient)


def _layer(content: Mapping[str, Any], module: nn.Module) -> Layer:
    writes, (least, most) = content["writes"], content["rows"]
    return Layer(
        name=content["name"],
        modules=tuple(content["modules"]),
        inputs=tuple(content["inputs"]),
        outputs=tuple(content["outputs"]),
        parameters=content["parameters"],
        buffers=content["buffers"],
        random=content["random"],
        fingerprint=content["fingerprint"],
        module=module,
        writes=None if writes is None else Writes(**{what: tuple(names) for what, names in writes.items()}),
        least_rows=least,
        most_rows=most,
    )


def _other_ranks_module(attributes: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return the module of a layer that is another rank's: its parameters and buffers, and nothing that runs."""
    module = nn.Module()
    for name, value in attributes.items():
        if isinstance(value, nn.Parameter):
            module.register_parameter(name, value)
        else:
            module.register_buffer(name, value)
    return module


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


_Content = dict[str, Any]
"""A graph, as JSON has it."""

_ROWS = "rows"
_MODULES = {"_operator": operator, "math": math, "torch": torch}
_OF_PYTHON: dict[str, Callable[..., Any]] = {"max": max, "min": min, "round": round, "abs": abs, "pow": pow}
_HIGHER = "higher_order"
_EXAMPLE_ROWS = 2
"""The number of rows in shapes, where torch asks for an example."""


def graph_content(module: fx.GraphModule) -> _Content:
    """Return the graph of a module, and those of blocks within it.

    Raises:
        CaptureError: something in it has no text, such as an object of a library's own.
    """
    blocks = {name: graph_content(part) for name, part in module.named_children() if isinstance(part, fx.GraphModule)}
    return {"nodes": [_node_content(node) for node in module.graph.nodes], "blocks": blocks}


def _node_content(node: fx.Node) -> list[Any]:
    arguments, keywords = [_written(each) for each in node.args], {key: _written(v) for key, v in node.kwargs.items()}
    return [node.name, node.op, _target_name(node), arguments, keywords, _value_content(node.meta.get("val"))]


def _target_name(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"{_HIGHER}.{target._name}"
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    found = f"{module}:{name}"
    try:
        same = _function(found) is target
    except ValueError:
        same = False
    if not same:
        raise CaptureError(f"operator {name or target} is none that a captured graph can be saved with")
    return found


def _written(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, list):
        return [_written(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_written(each) for each in value]}
    if isinstance(value, slice):
        return {"slice": [_written(each) for each in (value.start, value.stop, value.step)]}
    if isinstance(value, dict):
        return {"dict": [[key, _written(each)] for key, each in value.items()]}
    if isinstance(value, float):
        return {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [str(value.real), str(value.imag)]}
    for kind, of_kind in _NAMED.items():
        if isinstance(value, of_kind):
            return {kind: str(value).removeprefix("torch.")}
    raise CaptureError(f"a {type(value).__name__} is no argument that a captured graph can be saved with")


_NAMED: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
    "device": torch.device,
}


def _value_content(value: Any) -> Any:  # noqa: ANN401
    """Return the shape of what a node gives."""
    if isinstance(value, torch.Tensor):
        sizes, strides = ([_expression(size) for size in each] for each in (value.shape, value.stride()))
        content = {"sizes": sizes, "strides": strides, "dtype": dtype_name(value.dtype), "device": str(value.device)}
        return {**content, "gradient": True} if value.requires_grad else content
    if isinstance(value, torch.SymInt):
        return {"size": _expression(value)}
    if isinstance(value, (list, tuple)):
        return [_value_content(each) for each in value]
    return None


def _expression(size: Any) -> Any:  # noqa: ANN401
    """Return an integer, or an expression of the number of rows as a list with the operation first."""
    return size if type(size) is int else _of_sympy(size.node.expr)


def _of_sympy(expression: Any) -> Any:  # noqa: ANN401
    kind = type(expression).__name__
    if expression.is_Symbol:
        return _ROWS
    if expression.is_Integer:
        return int(expression)
    if kind not in SIZE_OPERATIONS:
        raise CaptureError(f"the size {expression} is none that a captured graph can be saved with")
    return [kind, *map(_of_sympy, expression.args)]


def dtype_name(dtype: torch.dtype) -> str:
    """Return a type of numbers as :func:`dtype_of` reads it."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return a type of numbers by its name.

    >>> dtype_of("float32")
    torch.float32

    Raises:
        ValueError: there is none of this name.
    """
    found: torch.dtype = _of_torch(name, torch.dtype)
    return found


def _of_torch(name: str, kind: type) -> Any:  # noqa: ANN401
    found = getattr(torch, name, None)
    if not isinstance(found, kind):
        raise ValueError(f"{name!r} is no {kind.__name__}")
    return found


class _Source(Source):
    """Where the number of rows is from: nowhere. Torch's own is of a package that takes a second to import."""

    _name_template = _ROWS
    guard_source = GuardSource.CONSTANT


class GraphReader:
    """Makes graphs of their contents; the shapes in them have one number of rows."""

    def __init__(self, *, shapes: bool = True) -> None:
        """Prepare; without ``shapes``, nodes do not say what they give, and torch's compiler is not imported."""
        self._shapes = shapes
        if not shapes:
            return
        environment = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
        source = _Source()
        symbol = environment.create_symbol(_EXAMPLE_ROWS, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        self._rows = environment.create_symintnode(symbol, hint=_EXAMPLE_ROWS, source=source)

    def module(self, content: _Content, attributes: Mapping[str, Any]) -> fx.GraphModule:
        """Return the module of a graph.

        Args:
            content: as :func:`graph_content` gives it.
            attributes: parameters, buffers and constants by the names that the graph has for them.

        Raises:
            ValueError: the content is none of a graph, or names an operator or attribute that is not there.
        """
        values = {**attributes, **{name: self.module(block, {}) for name, block in content["blocks"].items()}}
        graph, nodes = fx.Graph(), dict[str, fx.Node]()
        for name, kind, target, arguments, keywords, value in content["nodes"]:
            if kind == "get_attr" and target not in values:
                raise ValueError(f"node {name} reads {target}, which is missing")
            found: Any = _operator(target) if kind == "call_function" else target
            read = functools.partial(_read, nodes)
            named = {key: read(each) for key, each in keywords.items()}
            nodes[name] = graph.create_node(kind, found, tuple(map(read, arguments)), named, name=name)
            if self._shapes:
                nodes[name].meta["val"] = self._value(value)
        return fx.GraphModule(values, graph, class_name="Layer")

    def _value(self, content: Any) -> Any:  # noqa: ANN401
        if content is None:
            return None
        if isinstance(content, list):
            return tuple(map(self._value, content))
        if "size" in content:
            return self._size(content["size"])
        sizes, strides = (tuple(map(self._size, content[each])) for each in ("sizes", "strides"))
        with self._mode:
            device = torch.device(content["device"])
            made = torch.empty_strided(sizes, strides, dtype=dtype_of(content["dtype"]), device=device)
        return made.requires_grad_() if content.get("gradient") else made

    def _size(self, content: Any) -> Any:  # noqa: ANN401
        if content == _ROWS:
            return self._rows
        if type(content) is int:
            return content
        kind, *arguments = content
        operation = {**SIZE_OPERATIONS, "Max": torch.sym_max, "Min": torch.sym_min}[kind]
        return functools.reduce(operation, map(self._size, arguments))


def _operator(name: str) -> Any:  # noqa: ANN401
    """Return an operator, or a function of Python's, by its name."""
    if ":" in name:
        return _function(name)
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        raise ValueError(f"there is no operator {name}")
    return found


def _function(name: str) -> Any:  # noqa: ANN401
    module, _, attribute = name.partition(":")
    if module == "builtins":
        found = _OF_PYTHON.get(attribute)
    elif module == "torch" and not attribute.startswith(("sym_", "_sym_")):
        found = None
    else:
        found = getattr(_MODULES.get(module), attribute, None)
    if not callable(found):
        raise ValueError(f"there is no operator {name}")
    return found


def _read(nodes: Mapping[str, fx.Node], content: Any) -> Any:  # noqa: ANN401
    read = functools.partial(_read, nodes)
    if isinstance(content, list):
        return [read(each) for each in content]
    if not isinstance(content, dict):
        return content
    ((kind, value),) = content.items()
    if kind in _NAMED:
        return torch.device(value) if kind == "device" else _of_torch(value, _NAMED[kind])
    return _READERS[kind](read, nodes, value)


_READERS: dict[str, Callable[..., Any]] = {
    "node": lambda read, nodes, value: nodes[value],
    "tuple": lambda read, nodes, value: tuple(map(read, value)),
    "slice": lambda read, nodes, value: slice(*map(read, value)),
    "dict": lambda read, nodes, value: {key: read(each) for key, each in value},
    "float": lambda read, nodes, value: float(value),
    "complex": lambda read, nodes, value: complex(*map(float, value)),
}
