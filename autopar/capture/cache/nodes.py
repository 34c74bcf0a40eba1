"""Nodes: the graph of a captured layer as plain JSON, and back; nothing in it is run, or found by evaluating a text.

    ["linear", "call_function", "aten.linear.default",
     [{"node": "input_x"}, {"node": "parameter_head_weight"}], {},
     {"sizes": ["rows", 10], "strides": [10, 1], "dtype": "float32", "device": "cpu"}]

A node is its name, kind, target, arguments, keywords, and the shape of what it gives. Operators are torch's, by name,
or few functions of Python's; sizes are numbers, or sums and products of the number of ``rows``. Blocks within a graph
are graphs of their own. Parameters, buffers and constants are not part of it: who reads it gives them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._guards import GuardSource, Source
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from autopar.capture.layers.build import SIZE_OPERATIONS
from autopar.errors import CaptureError

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
        held = {**attributes, **{name: self.module(block, {}) for name, block in content["blocks"].items()}}
        graph, nodes = fx.Graph(), dict[str, fx.Node]()
        for name, kind, target, arguments, keywords, value in content["nodes"]:
            if kind == "get_attr" and target not in held:
                raise ValueError(f"node {name} reads {target}, which is missing")
            found: Any = _operator(target) if kind == "call_function" else target
            read = functools.partial(_read, nodes)
            named = {key: read(each) for key, each in keywords.items()}
            nodes[name] = graph.create_node(kind, found, tuple(map(read, arguments)), named, name=name)
            if self._shapes:
                nodes[name].meta["val"] = self._value(value)
        return fx.GraphModule(held, graph, class_name="Layer")

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
