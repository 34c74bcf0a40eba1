"""Operators that take numbers from places in a dimension, or change their order in it: others are kept."""

from __future__ import annotations

from autopar.capture.split.names import MismatchError, block
from autopar.capture.split.rules.rule import (
    Dims,
    OperatorCall,
    broadcast,
    normal,
    replace_dim,
    rule,
    unite_or_block,
    whole_dim,
)


def _block_places(call: OperatorCall, places: list[int]) -> Dims:
    dims = call.dims("self")
    for place in places:
        block(dims[normal(place, len(dims))], "its indices are taken in another order")
    return dims


@rule("cumsum.default")
def running(call: OperatorCall) -> Dims:
    """Read all indices before."""
    return _block_places(call, [call.argument("dim")])


@rule("flip.default", "roll.default")
def turn_round(call: OperatorCall) -> Dims:
    """Bring the indices of dimensions into another order."""
    places = call.argument("dims")
    if not places:
        raise MismatchError("it flattens what it moves")
    return _block_places(call, places)


@rule("tril.default", "triu.default")
def triangle(call: OperatorCall) -> Dims:
    """Compare the indices of the last two dimensions."""
    return _block_places(call, [-2, -1])


@rule("constant_pad_nd.default", "pad.default")
def pad(call: OperatorCall) -> Dims:
    """Put numbers before and behind dimensions, of which the last ones are named first."""
    count = len(call.argument("pad")) // 2
    dims = _block_places(call, list(range(-count, 0)))
    sizes = call.output_sizes()[len(dims) - count :]
    return (*dims[: len(dims) - count], *(whole_dim(size, "it is padded") for size in sizes))


@rule("index_select.default")
def index_select(call: OperatorCall) -> Dims:
    """Take some indices of a dimension."""
    dims = _block_places(call, [call.argument("dim")])
    return replace_dim(dims, normal(call.argument("dim"), len(dims)), list(call.dims("index")) or [()])


@rule("gather.default")
def gather(call: OperatorCall) -> Dims:
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
def stack(call: OperatorCall) -> Dims:
    """Put tensors of the same dimensions behind one another in a new one."""
    tensors = [call.dims_of(node) for node in call.argument("tensors")]
    found = list(broadcast(tensors))
    found.insert(normal(call.argument("dim"), len(found) + 1), whole_dim(len(tensors), "tensors are stacked in it"))
    return tuple(found)
