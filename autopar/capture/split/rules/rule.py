"""What a rule is: a function of an operator's call that names what comes out, by the names of what goes in.

A rule promises this of every name in its operator's inputs and outputs that it does not block. Give each input the
indices of one part of the name, and the operator gives that part of the output, if the output has the name; or a
summand of it, if the rule has said that it is summed over; or the whole of it, if it has the name nowhere.
``tests/capture/split/rules`` holds it to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from autopar.capture.model.effects import values_by_name
from autopar.capture.split.names import Dim, MismatchError, Name, block, carries, positions, resolve, unite

ROWS = 2**31 - 1
"""What stands for the number of rows: a prime that no size of a model is a multiple of."""

COUNTS_ROWS = "it counts rows"

Dims = tuple[Dim, ...]
"""Of a tensor."""

Ranges = tuple[tuple[int, int], ...]
"""Ascending indices as half-open ranges; neighbours are one."""


def plain_size(length: int | torch.SymInt) -> int:
    """Return a size as a number, with ``ROWS`` for the number of rows.

    Raises:
        MismatchError: it is no polynomial of them.
    """
    if isinstance(length, int):
        return length
    expression = length.node.expr
    value = expression.subs(dict.fromkeys(expression.free_symbols, ROWS))
    if not value.is_Integer:
        raise MismatchError(f"a size {expression} is not known")
    return int(value)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions in the order of memory, the outermost first.

    Where the tensor repeats itself (``expand``), that is the order of one like it that does not, which operators fill.
    """
    sizes, strides = list(map(plain_size, tensor.shape)), list(map(plain_size, tensor.stride()))
    # As torch's infer_dense_strides sorts them, the innermost first: a stride of 0 says nothing.
    order = list(range(tensor.dim()))[::-1]
    for last in range(1, len(order)):
        at = last
        for inner in range(last - 1, -1, -1):
            one, other = order[inner], order[at]
            if not strides[one] or not strides[other]:
                continue
            if strides[one] < strides[other]:
                break
            if strides[one] > strides[other] or sizes[one] > sizes[other]:
                order[inner], order[at] = other, one
                at = inner
    return tuple(order[::-1])


def new_dim(length: int, obstacle: str | None = None) -> Dim:
    """Return a dimension that no other is known to be; the number of rows cannot be split."""
    return () if length == 1 else (Name(length, obstacle or (None if length % ROWS else COUNTS_ROWS)),)


def new_dims(value: torch.Tensor) -> Dims:
    """Return dimensions for a tensor of which nothing is known."""
    return tuple(new_dim(plain_size(each), None if isinstance(each, int) else COUNTS_ROWS) for each in value.shape)


class OperatorCall:
    """One call of an operator, with the dimensions of the tensors that it is given."""

    def __init__(self, node: fx.Node, dims: Mapping[fx.Node, tuple[Dims, ...]], values: Mapping[fx.Node, Any]) -> None:
        self.node = node
        self.summed: list[Dim] = []
        """What it sums over: parts give summands."""
        self.single_name_dims: list[Dim] = []
        """Dimensions whose indices are counted: they are split by a name only if that is all of them."""
        self._dims, self._values = dims, values
        if not isinstance(node.target, torch._ops.OpOverload):
            raise MismatchError("it is no operator of torch")
        self._arguments = values_by_name(node.target, node.args, node.kwargs)

    def argument(self, name: str) -> Any:  # noqa: ANN401
        """Return an argument by its name in the operator's schema; None if that has none of this name."""
        return self._arguments.get(name)

    def replace_arguments(self, /, **arguments: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments, those named replaced."""
        args: list[Any] = list(self.node.args)
        kwargs: dict[str, Any] = dict(self.node.kwargs)
        for name, value in arguments.items():
            place = list(self._arguments).index(name)
            if name not in kwargs and place < len(args):
                args[place] = value
            else:
                kwargs[name] = value
        return tuple(args), kwargs

    def dims(self, name: str) -> Dims:
        """Return the dimensions of a tensor argument."""
        return self.dims_of(self.argument(name))

    def dims_and_place(self) -> tuple[Dims, int]:
        """Return the dimensions of the argument ``self``, and which of them the argument ``dim`` says."""
        dims = self.dims("self")
        return dims, normal(self.argument("dim"), len(dims))

    def dims_of(self, node: Any) -> Dims:  # noqa: ANN401
        """Return the dimensions of a tensor.

        Raises:
            MismatchError: nothing is known of it.
        """
        if not isinstance(node, fx.Node) or len(self._dims.get(node, ())) != 1:
            raise MismatchError("one of its arguments is no tensor")
        return self._dims[node][0]

    def sizes(self, name: str) -> tuple[int, ...]:
        """Return a tensor argument's sizes, with ``ROWS`` for the number of rows."""
        return self.sizes_of(self.argument(name))

    def sizes_of(self, node: fx.Node) -> tuple[int, ...]:
        """Return a tensor's sizes, with ``ROWS`` for the number of rows."""
        return tuple(plain_size(length) for length in self._values[node].shape)

    def memory_order(self, name: str) -> tuple[int, ...]:
        """Return a tensor argument's dimensions in the order of memory, the outermost first."""
        return memory_order(self._values[self.argument(name)])

    def tensors(self) -> list[fx.Node]:
        """Return the tensors that it is given."""
        return [node for node in self.node.all_input_nodes if isinstance(self._values.get(node), torch.Tensor)]

    def is_integer(self, node: fx.Node) -> bool:
        """Tell whether a tensor holds indices."""
        kind = self._values[node].dtype
        return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)

    def values(self) -> Any:  # noqa: ANN401
        """Return what it gives: tensors without values."""
        return self._values[self.node]


@dataclass(frozen=True)
class Axis:
    """A name that is split, and which of its parts one is."""

    name: Name
    index: int
    count: int

    @property
    def indices(self) -> range:
        return share(self.name.size, self.index, self.count)


@dataclass(frozen=True)
class Part:
    """What one rank of a team has of the names of a region; of two, ranks have all pairs of parts."""

    axes: tuple[Axis, ...]

    def splits(self, dim: Dim) -> bool:
        """Tell whether a dimension is split."""
        return any(carries(dim, axis.name) for axis in self.axes)

    def positions(self, dim: Dim) -> torch.Tensor:
        """Return the indices of a dimension that belong to the part; takes as long as the dimension."""
        return positions(dim, {axis.name: axis.indices for axis in self.axes})

    def ranges(self, dim: Dim) -> Ranges:
        """Return those indices as ranges; takes as long as the dimension."""
        return ranges(self.positions(dim))

    def before(self, dim: Dim, end: int) -> int:
        """Return how many of a dimension's first indices belong to the part; takes as long as the dimension."""
        return int((self.positions(dim) < end).sum())

    def length(self, dim: Dim) -> int:
        """Return how long the part's dimension is: a product over its names."""
        lengths = {axis.name: len(axis.indices) for axis in self.axes}
        total = 1
        for name in resolve(dim):
            whole = name.size if name.pieces is None else sum(map(self.length, name.pieces))
            total *= lengths.get(name, whole)
        return total


def ranges(indices: torch.Tensor) -> Ranges:
    """Return ascending indices as ranges.

    >>> ranges(torch.tensor([0, 1, 2, 5, 6]))
    ((0, 3), (5, 7))
    """
    gaps = (indices.diff() != 1).nonzero().flatten().tolist()
    bounds = [0, *(gap + 1 for gap in gaps), len(indices)]
    values: list[int] = indices.tolist()
    return tuple((values[start], values[end - 1] + 1) for start, end in pairwise(bounds))


def take_ranges(tensor: torch.Tensor, dim: int, indices: Ranges) -> torch.Tensor:
    """Copy the entries at some indices of a dimension; memory has the dimensions in the order that it has them in."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    at = order.index(dim)
    ordered = tensor.permute(order)
    copy = torch.cat([ordered.narrow(at, start, stop - start) for start, stop in indices], at)
    return copy.permute([order.index(place) for place in range(len(order))])


def share(size: int, index: int, count: int) -> range:
    """Return the indices of a part: consecutive, and where sizes are uneven, longer by one in the first parts.

    >>> [share(7, index, 3) for index in range(3)]
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    quotient, rest = divmod(size, count)
    start = index * quotient + min(index, rest)
    return range(start, start + quotient + (index < rest))


@dataclass(frozen=True)
class LocalCall:
    """What a part calls in place of an operator; arguments are nodes of the whole layer's graph."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    then: Callable[..., Any] | None = None
    """What is called with the sum over parts, if the operator gives summands."""
    then_args: tuple[Any, ...] = ()
    then_broadcasts: bool = False
    """Whether every number that comes is made of those in its place, to which arguments are broadcast."""


_Names = Callable[[OperatorCall], Dims | list[Dims]]
"""Returns the dimensions of what an operator gives; a list of them where it gives several tensors."""
_Local = Callable[[OperatorCall, Part], LocalCall | None]
"""Returns what a part calls; none: the operator, with the same arguments."""


@dataclass(frozen=True)
class SplitRule:
    """What is known of an operator."""

    names: _Names
    local: _Local | None = None


RULES: dict[str, SplitRule] = {}
"""By the operator's name and overload."""


def rule(*operators: str, local: _Local | None = None) -> Callable[[_Names], _Names]:
    """Register a function as the rule of operators, as ``linear.default``."""

    def register(names: _Names) -> _Names:
        RULES.update(dict.fromkeys((f"aten.{operator}" for operator in operators), SplitRule(names, local)))
        return names

    return register


def unite_or_block(one: Dim, other: Dim) -> Dim:
    """Make two dimensions one; where names cannot say how, neither is split."""
    try:
        unite(one, other)
    except MismatchError as error:
        block(one, str(error))
        block(other, str(error))
    return one


def broadcast(tensors: Iterable[Dims]) -> Dims:
    """Return the dimensions of what tensors broadcast to; those of size 1 are no obstacle."""
    given = list(tensors)
    rank = max(map(len, given), default=0)
    found: list[Dim] = [()] * rank
    for dims in given:
        for place, dim in enumerate(dims, rank - len(dims)):
            if resolve(dim):
                found[place] = unite_or_block(found[place], dim) if resolve(found[place]) else dim
    return tuple(found)


def normal(dim: int, rank: int) -> int:
    """Return a dimension counted from the front."""
    return dim % rank if rank else 0


def replace_dim(dims: Dims, at: int, by: Sequence[Dim]) -> Dims:
    """Return dimensions with others in place of one."""
    return (*dims[:at], *by, *dims[at + 1 :])


@rule(
    "__and__.Tensor",
    "__or__.Tensor",
    "_to_copy.default",
    "alias.default",
    "contiguous.default",
    "detach.default",
    "expand_as.default",
    "full_like.default",
    "lift_fresh_copy.default",
    "masked_fill.Tensor",
    "ones_like.default",
    "to.device",
    "to.dtype",
    "to.dtype_layout",
    "where.Scalar",
    "where.ScalarOther",
    "where.ScalarSelf",
    "zeros_like.default",
)
def _elementwise(call: OperatorCall) -> Dims:
    """Broadcast all tensors."""
    return broadcast(map(call.dims_of, call.tensors()))


def find_rule(target: object) -> SplitRule | None:
    """Return the rule of an operator, if it has one.

    One that torch says is pointwise broadcasts its inputs, but those that draw, or write into what they read: that may
    be read elsewhere as a whole.
    """
    tags, schema = getattr(target, "tags", ()), getattr(target, "_schema", None)
    draws_or_writes = torch.Tag.nondeterministic_seeded in tags or (schema is not None and schema.is_mutable)
    pointwise = SplitRule(_elementwise) if torch.Tag.pointwise in tags and not draws_or_writes else None
    return RULES.get(str(target), pointwise)


def apply_rule(
    node: fx.Node, dims: Mapping[fx.Node, tuple[Dims, ...]], values: Mapping[fx.Node, Any]
) -> tuple[OperatorCall, tuple[Dims, ...]]:
    """Return an operator's call, of tensors with these dimensions, and the dimensions of all that it gives.

    Raises:
        MismatchError: it has no rule, or its rule does not apply.
    """
    rule = find_rule(node.target)
    if rule is None:
        raise MismatchError("it has no rule")
    call = OperatorCall(node, dims, values)
    found = rule.names(call)
    return call, tuple(found) if isinstance(found, list) else (found,)


def local_call(call: OperatorCall, part: Part) -> LocalCall:
    """Return what a part calls in place of an operator.

    Raises:
        MismatchError: nothing would do.
    """
    rule = find_rule(call.node.target)
    found = None if rule is None or rule.local is None else rule.local(call, part)
    return found or LocalCall(call.node.target, call.node.args, call.node.kwargs)
