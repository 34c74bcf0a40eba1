"""Run one operator on the parts of what it is given, and hold what comes out against the whole.

That is what a rule promises of every name that it does not block (``autopar/capture/split/rules/rule.py``).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.split.names import MismatchError, Name, carries, is_partial, leaves
from autopar.capture.split.rules import Axis, Dims, LocalCall, OperatorCall, Part, SplitRule, find_rule
from autopar.capture.split.rules.rule import new_dims

Outputs = tuple[Dims, ...]


class OperatorParts:
    """An operator with real tensors, whose every name can be tried."""

    def __init__(self, target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        graph, self._values = fx.Graph(), dict[fx.Node, Any]()

        def node_of(value: object) -> object:
            if isinstance(value, list) and any(isinstance(each, torch.Tensor) for each in value):
                return [node_of(each) for each in value]
            if not isinstance(value, torch.Tensor):
                return value
            node = graph.placeholder(f"x{len(self._values)}")
            self._values[node] = value
            return node

        nodes = [node_of(each) for each in args]
        options = {name: node_of(each) for name, each in kwargs.items()}
        self._tensors = dict(self._values)
        self._node = graph.call_function(target, tuple(nodes), options)  # type: ignore[arg-type]
        torch.manual_seed(0)
        self.whole = target(*args, **kwargs)
        self._values[self._node] = self.whole
        self.dims: dict[fx.Node, Outputs] = {node: (new_dims(value),) for node, value in self._tensors.items()}
        rule = find_rule(target)
        assert rule is not None, f"{target} has no rule"
        self._rule: SplitRule = rule
        self._call = OperatorCall(self._node, self.dims, self._values)
        found = rule.names(self._call)
        self.dims[self._node] = tuple(found) if isinstance(found, list) else (found,)

    def names(self) -> list[Name]:
        """Return all names that the rule leaves to be split, and that it does not both keep and sum over."""
        every = [dim for outputs in self.dims.values() for dims in outputs for dim in dims]
        names = dict.fromkeys(name for dim in every for name in leaves(dim) if name.obstacle is None)
        return [name for name in names if self._is_legal(name)]

    def _is_legal(self, name: Name) -> bool:
        try:
            per_tensor = {
                node: [sum([carries(dim, name) for dim in dims]) for dims in outputs]
                for node, outputs in self.dims.items()
            }
            sums = any([carries(dim, name) for dim in self._call.summed])  # noqa: C419 - each may refuse
            if any(is_partial(dim, name) for dim in self._call.summed):
                return False
        except MismatchError:
            return False
        if max(count for counts in per_tensor.values() for count in counts) > 1:
            return False
        return not (sums and any(per_tensor[self._node]))

    def error(self, name: Name, count: int) -> float:
        """Return the largest difference between what parts give together and the whole."""
        parts = [Part((Axis(name, index, count),)) for index in range(count)]
        results = [self._run(part) for part in parts]
        if any(carries(dim, name) for dim in self._call.summed):
            total = torch.stack([result for result, _ in results]).sum(0)
            local = results[0][1]
            if local.then is not None:
                total = local.then(total, *fx.map_arg(local.then_args, self._tensors.__getitem__))
            return _difference(total, self.whole)
        return max(self._outputs_error(result, part) for (result, _), part in zip(results, parts, strict=True))

    def _run(self, part: Part) -> tuple[Any, LocalCall]:
        node = self._node
        local = (
            self._rule.local(self._call, part) if self._rule.local else LocalCall(node.target, node.args, node.kwargs)
        )
        given = {node: take(value, self.dims[node][0], part) for node, value in self._tensors.items()}
        args, kwargs = fx.map_arg((local.args, dict(local.kwargs)), given.__getitem__)
        torch.manual_seed(0)
        return local.target(*args, **kwargs), local

    def _outputs_error(self, result: object, part: Part) -> float:
        several = isinstance(result, (tuple, list))
        found = list(result) if isinstance(result, (tuple, list)) else [result]
        whole = list(self.whole) if several else [self.whole]
        wanted = [take(each, dims, part) for each, dims in zip(whole, self.dims[self._node], strict=True)]
        return max(_difference(one, other) for one, other in zip(found, wanted, strict=True))


def take(value: torch.Tensor, dims: Dims, part: Part) -> torch.Tensor:
    """Return what a part has of a tensor."""
    for place, dim in enumerate(dims):
        if part.splits(dim):
            # In the whole's order of memory, as operators on parts give them.
            order = sorted(range(value.dim()), key=value.stride, reverse=True)
            value = value.index_select(place, part.positions(dim)).permute(order).contiguous()
            value = value.permute([order.index(each) for each in range(len(order))])
    return value


def _difference(one: Any, other: Any) -> float:  # noqa: ANN401
    if one.shape != other.shape:
        return float("inf")
    return float((one.double() - other.double()).abs().nan_to_num(float("inf")).max()) if one.numel() else 0.0
