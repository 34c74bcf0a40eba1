"""Operators that order numbers anew, or repeat them: names are regrouped, moved and added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.split.names import MismatchError, Name, block, factor, resolve, size
from autopar.capture.split.rules.rule import (
    ROWS,
    Dims,
    LocalCall,
    OperatorCall,
    Part,
    new_dim,
    normal,
    replace_dim,
    rule,
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


def _local_view(call: OperatorCall, part: Part) -> LocalCall | None:
    """Name a part's sizes; those of ``flatten`` come of themselves."""
    kind, dims = str(call.node.target).split(".")[1], call.dims_of(call.node)
    if kind == "flatten":
        return None
    if kind == "unflatten":
        name, (_, at) = "sizes", call.dims_and_place()
        dims = dims[at : at + len(call.argument(name))]
    else:
        name = "shape" if kind == "reshape" else "size"
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
    return _regroup(call.dims("self"), call.output_sizes())


def _with_rank_of(dims: Dims, sizes: Sequence[object]) -> Dims:
    """Return as many dimensions as there are sizes: new ones in front have one index each."""
    return ((),) * (len(sizes) - len(dims)) + dims


def _local_expand(call: OperatorCall, part: Part) -> LocalCall | None:
    sizes = _local_sizes(call.argument("size"), call.dims_of(call.node), part)
    given = _with_rank_of(call.dims("self"), sizes)
    if any(
        new == -1 != old and not resolve(dim) for new, old, dim in zip(sizes, call.argument("size"), given, strict=True)
    ):
        raise MismatchError("how often it repeats depends on the number of rows")
    return LocalCall(call.node.target, *call.replace_arguments(size=sizes))


@rule("broadcast_to.default", "expand.default", local=_local_expand)
def _expand(call: OperatorCall) -> Dims:
    """Add names for what is repeated."""
    sizes = call.output_sizes()
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
    sizes = call.output_sizes()
    given = _with_rank_of(call.dims("self"), sizes)
    return tuple((*new_dim(length // size(dim)), *dim) for dim, length in zip(given, sizes, strict=True))


@rule("transpose.int")
def _transpose(call: OperatorCall) -> Dims:
    """Exchange two dimensions."""
    given = list(call.dims("self"))
    first, second = (normal(call.argument(name), len(given)) for name in ("dim0", "dim1"))
    given[first], given[second] = given[second], given[first]
    return tuple(given)


@rule("numpy_T.default", "t.default")
def _turn(call: OperatorCall) -> Dims:
    """Turn the order of dimensions round."""
    return call.dims("self")[::-1]


@rule("movedim.int", "movedim.intlist")
def _move(call: OperatorCall) -> Dims:
    """Bring some dimensions to other places; the others keep their order."""
    given = call.dims("self")
    pairs = [call.argument(name) for name in ("source", "destination")]
    source, target = ([each] if isinstance(each, int) else each for each in pairs)
    rank = len(given)
    moved = {normal(to, rank): normal(at, rank) for at, to in zip(source, target, strict=True)}
    others = iter([place for place in range(rank) if place not in moved.values()])
    return tuple(given[moved[place] if place in moved else next(others)] for place in range(rank))


@rule("permute.default")
def _permute(call: OperatorCall) -> Dims:
    """Bring dimensions into another order."""
    given = call.dims("self")
    return tuple(given[place] for place in call.argument("dims"))


@rule("unsqueeze.default")
def _unsqueeze(call: OperatorCall) -> Dims:
    """Add a dimension of size 1."""
    given = call.dims("self")
    at = normal(call.argument("dim"), len(given) + 1)
    return (*given[:at], (), *given[at:])


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


def _local_creation(call: OperatorCall, part: Part) -> LocalCall | None:
    sizes = _local_sizes(call.argument("size"), call.dims_of(call.node), part)
    return LocalCall(call.node.target, *call.replace_arguments(size=sizes))


@rule("full.default", "new_ones.default", "new_zeros.default", "ones.default", "zeros.default", local=_local_creation)
def _creation(call: OperatorCall) -> Dims:
    """Add names: the same number is everywhere."""
    return tuple(new_dim(length) for length in call.output_sizes())
