"""Operators that write into tensors, as those that give new ones, where nobody can tell.

    x.add_(y)      # where x is read no more, neither itself nor what shares its memory: x + y

What remains writes as it did, and the layer is not split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from autopar.capture.effects import Storages


def without_writes(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module whose operators give new tensors instead of writing, as far as that is the same.

    Its attributes are the same ones. It takes the number of operators that write, times those that share memory.
    """
    nodes = list(module.graph.nodes)
    writes = [node for node in nodes if new_operator(node) is not None]
    if not writes:
        return module
    places = {node: place for place, node in enumerate(nodes)}
    storages = Storages(nodes)
    roots = {node: storages.root(node) for node in nodes}
    unseen = {
        node for node in writes if _is_unseen(node, [each for each in nodes if roots[each] is roots[node]], places)
    }
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
        if node in unseen:
            made[node].target = new_operator(node)
    return fx.GraphModule(module, graph)


def new_operator(node: fx.Node) -> Any:  # noqa: ANN401
    """Return the operator that gives what this one writes into its first argument; none if there is none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.name.endswith("_"):
        return None
    name = target._schema.name.removeprefix("aten::").removesuffix("_")
    found = getattr(getattr(torch.ops.aten, name, None), target._overloadname, None)
    if found is None or found._schema.is_mutable or _options(found) != _options(target) or not _keeps_type(node):
        return None
    return found


def _options(operator: torch._ops.OpOverload) -> list[str]:
    """Return the names of all arguments but the first, which is what is written into."""
    return [argument.name for argument in operator._schema.arguments[1:]]


def _keeps_type(node: fx.Node) -> bool:
    """Tell whether a new tensor would have the type of the one that is written into: others do not widen it."""
    values = [source.meta.get("val") for source in node.all_input_nodes]
    types = [value.dtype for value in values if isinstance(value, torch.Tensor)]
    return bool(types) and types[0].is_floating_point and set(types[1:]) <= {types[0], torch.bool}


def _is_unseen(node: fx.Node, sharing: Iterable[fx.Node], places: Mapping[fx.Node, int]) -> bool:
    """Tell whether nobody reads a tensor after it was written into, but by what the operator gives."""
    before = [each for each in sharing if places[each] < places[node]]
    if any(each.op != "call_function" for each in before):
        return False
    return all(places[user] <= places[node] for each in before for user in each.users)
