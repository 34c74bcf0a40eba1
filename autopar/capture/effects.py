"""What a node of an exported graph does besides computing: writes, aliases, random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among a node's arguments, sub-graphs of higher-order operators excluded."""
    return [argument for argument in node.all_input_nodes if not _is_submodule(argument)]


def submodules(node: fx.Node) -> list[fx.GraphModule]:
    """Return the sub-graphs that a higher-order operator calls."""
    return [_submodule(argument) for argument in node.all_input_nodes if _is_submodule(argument)]


def _is_submodule(node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(_attribute(node), fx.GraphModule)


def _submodule(node: fx.Node) -> fx.GraphModule:
    found = _attribute(node)
    assert isinstance(found, fx.GraphModule)
    return found


def _attribute(node: fx.Node) -> object:
    found: object = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found


def written(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node writes in place."""
    if isinstance(node.target, torch._ops.OpOverload):
        return list(_written_by_operator(node, node.target))
    return list(_written_by_submodules(node))


def _written_by_operator(node: fx.Node, operator: torch._ops.OpOverload) -> Iterator[fx.Node]:
    # batch_norm and its kin write their running statistics without saying so in the schema.
    flags = ("training", "train", "use_input_stats")
    training = any(_argument(operator, node.args, node.kwargs, name) is True for name in flags)
    for position, argument in enumerate(operator._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or (training and argument.name in ("running_mean", "running_var")):
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            yield from _nodes(value)


def _nodes(value: object) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _nodes(item)


def _written_by_submodules(node: fx.Node) -> Iterator[fx.Node]:
    arguments = tensor_arguments(node)
    for module in submodules(node):
        storages = Storages(module.graph.nodes)
        roots = {storages.root(target) for inner in module.graph.nodes for target in written(inner)}
        placeholders = [inner for inner in module.graph.nodes if inner.op == "placeholder"]
        flat = [argument for argument in operands(node) if isinstance(argument, fx.Node)]
        if len(flat) == len(placeholders):
            yield from (outer for outer, inner in zip(flat, placeholders, strict=True) if storages.root(inner) in roots)
        elif roots:
            yield from arguments


def operands(node: fx.Node) -> list[object]:
    """Return a higher-order operator's arguments behind its last sub-graph: what the sub-graph is called with."""
    last = max(index for index, value in enumerate(node.args) if isinstance(value, fx.Node) and _is_submodule(value))
    flat: list[object] = []
    for value in node.args[last + 1 :]:
        flat.extend(value if isinstance(value, (tuple, list)) else [value])
    return flat


def _argument(
    operator: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object], name: str
) -> object:
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name == name:
            if position < len(args):
                return args[position]
            return kwargs.get(name, argument.default_value)
    return None


def draws_random_numbers(node: fx.Node) -> bool:
    """Tell whether a node uses the random number generator, given its arguments (dropout of 0 does not)."""
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return any(draws_random_numbers(inner) for module in submodules(node) for inner in module.graph.nodes)
    return draws(operator, node.args, node.kwargs)


def draws(operator: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Tell whether an operator called so uses the random number generator."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = {argument.name for argument in operator._schema.arguments}
    if any(_argument(operator, args, kwargs, name) is False for name in ("train", "training")):
        return False
    rates = {"dropout", "dropout_p", "p"} if names & {"train", "dropout_p"} else set()
    return not any(_argument(operator, args, kwargs, rate) in (0, 0.0) for rate in rates & names)


class Storages:
    """Which nodes may share memory: as operators' schemas say, and as the example's tensors do.

    The tensors are asked too because some operators return their input without declaring it (dropout of 0).
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        holders: dict[int, fx.Node] = {}
        for node in nodes:
            for source in _aliased(node):
                self._join(node, source)
            value = node.meta.get("val")
            for tensor in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    self._join(node, holders.setdefault(tensor.untyped_storage()._cdata, node))

    def root(self, node: fx.Node) -> fx.Node:
        """Return the node that stands for all that share memory with this one."""
        while node in self._parent:
            node = self._parent[node]
        return node

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        first, second = self.root(one), self.root(other)
        if first is not second:
            self._parent[first] = second


def _aliased(node: fx.Node) -> list[fx.Node]:
    if node.op != "call_function":
        return []
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.all_input_nodes if getattr(node.target, "__name__", "") == "getitem" else []
    schema = node.target._schema
    if not any(result.alias_info for result in schema.returns):
        return []
    found: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and position < len(node.args):
            found.extend(_nodes(node.args[position]))
    return found
