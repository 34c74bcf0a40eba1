"""Operators that take dimensions to pieces and put them together."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from autopar.capture.split.names import MismatchError, Name, block, cut, join
from autopar.capture.split.rules.rule import (
    Dims,
    LocalCall,
    OperatorCall,
    Part,
    normal,
    plain_size,
    replace_dim,
    rule,
    unite_or_block,
    whole_dim,
)

_SPLIT = torch.ops.aten.split_with_sizes.default


def _bounds(call: OperatorCall, at: int) -> list[int]:
    sizes = (plain_size(piece.shape[at]) for piece in call.values())
    return list(accumulate(sizes, initial=0))


def _local_division(call: OperatorCall, part: Part) -> LocalCall:
    """Divide what a part has at the same places, by sizes: they may be uneven."""
    given = call.dims("self")
    at = normal(call.argument("dim"), len(given))
    if not part.splits(given[at]):
        return LocalCall(call.node.target, call.node.args, call.node.kwargs)
    ends = [part.before(given[at], bound) for bound in _bounds(call, at)]
    return LocalCall(_SPLIT, (call.argument("self"), [end - start for start, end in pairwise(ends)], at), {})


@rule("chunk.default", "split.Tensor", "split_with_sizes.default", local=_local_division)
def division(call: OperatorCall) -> list[Dims]:
    """Cut a dimension into pieces, one behind the other."""
    given = call.dims("self")
    at = normal(call.argument("dim"), len(given))
    return [replace_dim(given, at, [piece]) for piece in cut(given[at], _bounds(call, at))]


def _range(call: OperatorCall, at: int) -> tuple[int, int]:
    """Return the indices that a slice takes, first and end."""
    length, ends = call.sizes("self")[at], []
    for name, default in (("start", 0), ("end", length)):
        bound = call.argument(name)
        bound = default if bound is None else bound
        if not isinstance(bound, int):
            raise MismatchError("where it begins or ends depends on the number of rows")
        ends.append(max(0, min(bound + length if bound < 0 else bound, length)))
    return ends[0], ends[1]


def _local_slice(call: OperatorCall, part: Part) -> LocalCall:
    given = call.dims("self")
    at = normal(call.argument("dim"), len(given))
    if not part.splits(given[at]):
        return LocalCall(call.node.target, call.node.args, call.node.kwargs)
    start, end = (part.before(given[at], bound) for bound in _range(call, at))
    return LocalCall(call.node.target, (call.argument("self"), at, start, end), {})


@rule("slice.Tensor", local=_local_slice)
def take_slice(call: OperatorCall) -> Dims:
    """Take one piece of a dimension."""
    given = call.dims("self")
    at = normal(call.argument("dim"), len(given))
    if call.output_sizes()[at] == call.sizes("self")[at] and call.argument("step") == 1:
        return given
    if call.argument("step") != 1:
        block(given[at], "indices are left out of it")
        return replace_dim(given, at, [whole_dim(call.output_sizes()[at], "indices are left out of it")])
    start, end = _range(call, at)
    if start >= end:
        return replace_dim(given, at, [(Name(0, "it has no indices"),)])
    bounds = sorted({0, start, end, call.sizes("self")[at]})
    return replace_dim(given, at, [cut(given[at], bounds)[bounds.index(start)]])


@rule("glu.default")
def gate(call: OperatorCall) -> Dims:
    """Multiply the first half of a dimension by what is made of the second."""
    given = call.dims("self")
    at = normal(call.argument("dim"), len(given))
    length = call.sizes("self")[at]
    first, second = cut(given[at], (0, length // 2, length))
    return replace_dim(given, at, [unite_or_block(first, second)])


@rule("cat.default")
def cat(call: OperatorCall) -> Dims:
    """Put dimensions behind one another; all others are the same."""
    tensors = [call.dims_of(node) for node in call.argument("tensors")]
    first, *others = tensors
    if any(len(dims) != len(first) for dims in others):
        raise MismatchError("its tensors differ in their number of dimensions")
    at = normal(call.argument("dim"), len(first))
    for dims in others:
        for place, dim in enumerate(dims):
            if place != at:
                unite_or_block(first[place], dim)
    return replace_dim(first, at, [join([dims[at] for dims in tensors])])
