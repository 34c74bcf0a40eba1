"""Operators that order numbers anew, repeat them, cut and join dimensions, or take numbers from places in them.

Names are regrouped, moved and added. Pieces of a dimension can be split each for itself. Where indices are picked, or
change their order, they cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from autopar.capture.split.names import MismatchError, Name, block, cut, factor, join, resolve, size
from autopar.capture.split.rules.rule import (
    ROWS,
    Dims,
    LocalCall,
    OperatorCall,
    Part,
    broadcast,
    new_dim,
    normal,
    plain_size,
    replace_dim,
    rule,
    unite_or_block,
)


def _regroup(dims: Dims, sizes: tuple[int, ...]) -> Dims:
    """Return the dimensions of a view: all names in their order, taken until they make up one size after another.

    A name that goes over the end of a dimension is factored. Takes as many steps as there are names.

    Raises:
        MismatchError: a name would have to be divided otherwise.
    """
    names = list(resolve(tuple(name for dim in dims for name in dim)))
    found = []
    for length in sizes:
        taken: list[Name] = []
        while size(tuple(taken)) != length:
            names = list(resolve(tuple(names)))
            missing, rest = divmod(length, size(tuple(taken)))
            if rest or not names or not length:
                raise MismatchError(f"its names do not make up a dimension of size {length}")
            if missing % names[0].size:
                factor(names[0], missing)
            else:
                taken.append(names.pop(0))
        found.append(tuple(taken))
    return tuple(found)


def _local_sizes(sizes: list[Any], dims: Dims, part: Part) -> list[Any]:
    """Return sizes that an operator was given, for a part: those of dimensions that are split become shorter."""
    found = list(sizes)
    for place, dim in enumerate(dims):
        if not part.splits(dim) or found[place] == -1:
            continue
        if not isinstance(found[place], fx.Node):
            found[place] = part.length(dim)
        else:
            _name_size(found, dims, part)
            found[place] = -1
    return found


def _name_size(sizes: list[Any], dims: Dims, part: Part) -> None:
    """Write out the size that was left open, for another to be."""
    if -1 in sizes:
        open_place = sizes.index(-1)
        length = part.length(dims[open_place])
        if length % ROWS == 0:
            raise MismatchError("two of its sizes depend on the number of rows")
        sizes[open_place] = length


_SIZES = ("size", "shape", "sizes")
"""What operators call the sizes that they are given: of views, ``reshape`` and ``unflatten``."""


def _local_view(call: OperatorCall, part: Part) -> LocalCall | None:
    """Name a part's sizes; those of ``flatten`` come of themselves."""
    dims, name = call.dims_of(call.node), next((each for each in _SIZES if call.argument(each)), None)
    if name is None:
        return None
    if name == "sizes":
        _, at = call.dims_and_place()
        dims = dims[at : at + len(call.argument(name))]
    sizes = _local_sizes(call.argument(name), dims, part)
    return LocalCall(call.node.target, *call.replace_arguments(**{name: sizes}))


@rule(
    "_unsafe_view.default",
    "flatten.using_ints",
    "reshape.default",
    "unflatten.int",
    "view.default",
    local=_local_view,
)
def _view(call: OperatorCall) -> Dims:
    """Regroup names."""
    return _regroup(call.dims("self"), call.sizes_of(call.node))


def _with_rank_of(dims: Dims, sizes: Sequence[object]) -> Dims:
    """Return as many dimensions as there are sizes: new ones in front have one index each."""
    return ((),) * (len(sizes) - len(dims)) + dims


def _local_expand(call: OperatorCall, part: Part) -> LocalCall | None:
    old, new = call.argument("size"), _local_sizes(call.argument("size"), call.dims_of(call.node), part)
    given = _with_rank_of(call.dims("self"), new)
    if any(b == -1 != a and not resolve(dim) for a, b, dim in zip(old, new, given, strict=True)):
        raise MismatchError("how often it repeats depends on the number of rows")
    return LocalCall(call.node.target, *call.replace_arguments(size=new))


@rule("broadcast_to.default", "expand.default", local=_local_expand)
def _expand(call: OperatorCall) -> Dims:
    """Add names for what is repeated."""
    sizes = call.sizes_of(call.node)
    given = _with_rank_of(call.dims("self"), sizes)
    return tuple(dim if resolve(dim) else new_dim(length) for dim, length in zip(given, sizes, strict=True))


def _local_repeat(call: OperatorCall, part: Part) -> LocalCall | None:
    given, at = call.dims_and_place()
    repeats = part.length(call.dims_of(call.node)[at]) // part.length(given[at])
    return LocalCall(call.node.target, *call.replace_arguments(repeats=repeats))


@rule("repeat_interleave.self_int", local=_local_repeat)
def _repeat_interleave(call: OperatorCall) -> Dims:
    """Add a name inside a dimension."""
    if call.argument("dim") is None:
        raise MismatchError("it flattens what it repeats")
    given, at = call.dims_and_place()
    return replace_dim(given, at, [(*given[at], Name(call.argument("repeats")))])


def _local_tile(call: OperatorCall, part: Part) -> LocalCall | None:
    repeats = list(call.argument("repeats"))
    pairs = zip(_with_rank_of(call.dims("self"), repeats), call.dims_of(call.node), strict=True)
    for place, (before, after) in enumerate(pairs):
        if part.splits(after) and not isinstance(repeats[place], fx.Node):
            repeats[place] = part.length(after) // part.length(before)
    return LocalCall(call.node.target, *call.replace_arguments(repeats=repeats))


@rule("repeat.default", local=_local_tile)
def _tile(call: OperatorCall) -> Dims:
    """Add names around dimensions."""
    sizes = call.sizes_of(call.node)
    given = _with_rank_of(call.dims("self"), sizes)
    return tuple((*new_dim(length // size(dim)), *dim) for dim, length in zip(given, sizes, strict=True))


@rule(
    "movedim.int",
    "movedim.intlist",
    "numpy_T.default",
    "permute.default",
    "t.default",
    "transpose.int",
    "unsqueeze.default",
)
def _permute(call: OperatorCall) -> Dims:
    """Bring dimensions into another order, as torch does those of an example, or add one of size 1."""
    given = call.dims("self")
    example = torch.empty([2] * len(given), device="meta")
    places = dict(zip(example.stride(), given, strict=True))
    args, kwargs = call.replace_arguments(self=example)
    found: torch.Tensor = call.node.target(*args, **kwargs)  # type: ignore[operator]
    return tuple(places[stride] if size > 1 else () for size, stride in zip(found.shape, found.stride(), strict=True))


def _local_squeeze(call: OperatorCall, part: Part) -> LocalCall | None:
    """Leave a dimension that is of size 1 in a part only."""
    given, at = call.dims_and_place()
    return LocalCall(torch.ops.aten.alias.default, (call.argument("self"),), {}) if part.splits(given[at]) else None


@rule("squeeze.dim", local=_local_squeeze)
def _squeeze(call: OperatorCall) -> Dims:
    """Drop a dimension, if it is of size 1."""
    given, at = call.dims_and_place()
    return given if resolve(given[at]) else replace_dim(given, at, [])


@rule("select.int", "unbind.int")
def _pick(call: OperatorCall) -> Dims | list[Dims]:
    """Drop a dimension, of which one index is taken, or a tensor for every index."""
    given, at = call.dims_and_place()
    block(given[at], "single indices are taken of it")
    found, values = replace_dim(given, at, []), call.values()
    return [found] * len(values) if isinstance(values, (tuple, list)) else found


@rule("full.default", "new_ones.default", "new_zeros.default", "ones.default", "zeros.default", local=_local_view)
def _creation(call: OperatorCall) -> Dims:
    """Add names: the same number is everywhere."""
    return tuple(new_dim(length) for length in call.sizes_of(call.node))


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
    if call.sizes_of(call.node)[at] == call.sizes("self")[at] and call.argument("step") == 1:
        return given
    if call.argument("step") != 1:
        block(given[at], "indices are left out of it")
        return replace_dim(given, at, [new_dim(call.sizes_of(call.node)[at], "indices are left out of it")])
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
    sizes = call.sizes_of(call.node)[len(dims) - count :]
    return (*dims[: len(dims) - count], *(new_dim(size, "it is padded") for size in sizes))


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
    found.insert(normal(call.argument("dim"), len(found) + 1), new_dim(len(tensors), "tensors are stacked in it"))
    return tuple(found)
