"""Operators that cut dimensions and join them, or take numbers from places in them; other dimensions are kept.

Pieces of a dimension can be split each for itself. Where indices are picked, or change their order, they cannot.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from autopar.capture.split.names import MismatchError, Name, block, cut, join
from autopar.capture.split.rules.rule import (
    Dims,
    LocalCall,
    OperatorCall,
    Part,
    broadcast,
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


def _local_division(call: OperatorCall, part: Part) -> LocalCall | None:
    """Divide what a part has at the same places, by sizes: they may be uneven."""
    given, at = call.dims_and_place()
    if not part.splits(given[at]):
        return None
    ends = [part.before(given[at], bound) for bound in _bounds(call, at)]
    return LocalCall(_SPLIT, (call.argument("self"), [end - start for start, end in pairwise(ends)], at), {})


@rule("chunk.default", "split.Tensor", "split_with_sizes.default", local=_local_division)
def _division(call: OperatorCall) -> list[Dims]:
    """Cut a dimension into pieces, one behind the other."""
    given, at = call.dims_and_place()
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


def _local_slice(call: OperatorCall, part: Part) -> LocalCall | None:
    given, at = call.dims_and_place()
    if not part.splits(given[at]):
        return None
    start, end = (part.before(given[at], bound) for bound in _range(call, at))
    return LocalCall(call.node.target, (call.argument("self"), at, start, end), {})


@rule("slice.Tensor", local=_local_slice)
def _take_slice(call: OperatorCall) -> Dims:
    """Take one piece of a dimension."""
    given, at = call.dims_and_place()
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
def _gate(call: OperatorCall) -> Dims:
    """Multiply the first half of a dimension by what is made of the second."""
    given, at = call.dims_and_place()
    length = call.sizes("self")[at]
    first, second = cut(given[at], (0, length // 2, length))
    return replace_dim(given, at, [unite_or_block(first, second)])


@rule("cat.default")
def _cat(call: OperatorCall) -> Dims:
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


def _block_places(call: OperatorCall, places: list[int]) -> Dims:
    dims = call.dims("self")
    for place in places:
        block(dims[normal(place, len(dims))], "its indices are taken in another order")
    return dims


@rule("cumsum.default", "flip.default", "roll.default", "tril.default", "triu.default")
def _reorder(call: OperatorCall) -> Dims:
    """Bring the indices of dimensions into another order, read all those before, or compare those of the last two."""
    name = str(call.node.target).split(".")[1]
    places = [call.argument("dim")] if name == "cumsum" else [-2, -1] if name[:3] == "tri" else call.argument("dims")
    if not places:
        raise MismatchError("it flattens what it moves")
    return _block_places(call, places)


@rule("constant_pad_nd.default", "pad.default")
def _pad(call: OperatorCall) -> Dims:
    """Put numbers before and behind dimensions, of which the last ones are named first."""
    count = len(call.argument("pad")) // 2
    dims = _block_places(call, list(range(-count, 0)))
    sizes = call.output_sizes()[len(dims) - count :]
    return (*dims[: len(dims) - count], *(whole_dim(size, "it is padded") for size in sizes))


@rule("index_select.default")
def _index_select(call: OperatorCall) -> Dims:
    """Take some indices of a dimension."""
    dims = _block_places(call, [call.argument("dim")])
    return replace_dim(dims, normal(call.argument("dim"), len(dims)), list(call.dims("index")) or [()])


@rule("gather.default")
def _gather(call: OperatorCall) -> Dims:
    """Take for every place an index of one dimension; the place is the same in the others, which may be shorter."""
    dims = _block_places(call, [call.argument("dim")])
    index = call.dims("index")
    for place, (own, length) in enumerate(zip(index, call.sizes("index"), strict=True)):
        if place == normal(call.argument("dim"), len(dims)):
            continue
        if length == call.sizes("self")[place]:
            unite_or_block(own, dims[place])
        else:
            block(own, "it is shorter than what it is taken of")
            block(dims[place], "the first indices are taken of it")
    return index


@rule("index.Tensor")
def index(call: OperatorCall) -> Dims:
    """Take indices of some dimensions; those of what they are taken by come in their place, or first."""
    dims, indices = call.dims("self"), call.argument("indices")
    places = [place for place, each in enumerate(indices) if each is not None]
    if any(not call.is_integer(indices[place]) for place in places):
        raise MismatchError("how many indices it takes depends on values")
    _block_places(call, places)
    found = broadcast(call.dims_of(indices[place]) for place in places)
    others = [dim for place, dim in enumerate(dims) if place not in places]
    first = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    return (*others[:first], *found, *others[first:])


@rule("stack.default")
def _stack(call: OperatorCall) -> Dims:
    """Put tensors of the same dimensions behind one another in a new one."""
    tensors = [call.dims_of(node) for node in call.argument("tensors")]
    found = list(broadcast(tensors))
    found.insert(normal(call.argument("dim"), len(found) + 1), whole_dim(len(tensors), "tensors are stacked in it"))
    return tuple(found)
