"""Operators that order numbers anew, or repeat them: names are regrouped, moved and added."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.split.names import MismatchError, Name, block, factor, resolve, size
from autopar.capture.split.rules.rule import Call, Dims, LocalCall, Part, new_dim, normal, replace_dim, rule


def regroup(given: Dims, sizes: tuple[int, ...]) -> Dims:
    """Return the dimensions of a view: all names in their order, taken until they make up one size after another.

    A name that goes over the end of a dimension is factored. Takes as many steps as there are names.

    Raises:
        MismatchError: a name would have to be divided otherwise.
    """
    names = list(resolve(tuple(name for dim in given for name in dim)))
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


def local_sizes(sizes: list[Any], dims: Dims, part: Part) -> list[Any]:
    """Return sizes that an operator was given, for a part: those of dimensions that are split become shorter."""
    found = list(sizes)
    for place, dim in enumerate(dims):
        if not part.carried(dim) or found[place] == -1:
            continue
        if not isinstance(found[place], fx.Node):
            found[place] = part.length(dim)
        elif -1 in found:
            raise MismatchError("two of its sizes depend on the number of rows")
        else:
            found[place] = -1
    return found


def _local_view(call: Call, part: Part) -> LocalCall:
    name = "shape" if str(call.node.target).startswith("aten.reshape") else "size"
    sizes = local_sizes(call.argument(name), call.dims_of(call.node), part)
    return LocalCall(call.node.target, *call.replaced(**{name: sizes}))


@rule("_unsafe_view.default", "reshape.default", "view.default", local=_local_view)
def view(call: Call) -> Dims:
    """Regroup names."""
    return regroup(call.dims("self"), call.output_sizes())


@rule("flatten.using_ints")
def flatten(call: Call) -> Dims:
    """Regroup names; sizes come of themselves."""
    return regroup(call.dims("self"), call.output_sizes())


def _local_unflatten(call: Call, part: Part) -> LocalCall:
    at = normal(call.argument("dim"), len(call.dims("self")))
    sizes = call.argument("sizes")
    dims = call.dims_of(call.node)[at : at + len(sizes)]
    return LocalCall(call.node.target, *call.replaced(sizes=local_sizes(sizes, dims, part)))


@rule("unflatten.int", local=_local_unflatten)
def unflatten(call: Call) -> Dims:
    """Regroup names."""
    return regroup(call.dims("self"), call.output_sizes())


def _local_expand(call: Call, part: Part) -> LocalCall:
    sizes = local_sizes(call.argument("size"), call.dims_of(call.node), part)
    return LocalCall(call.node.target, *call.replaced(size=sizes))


@rule("expand.default", local=_local_expand)
def expand(call: Call) -> Dims:
    """Add names for what is repeated."""
    given, sizes = call.dims("self"), call.output_sizes()
    given = ((),) * (len(sizes) - len(given)) + given
    return tuple(dim if resolve(dim) else new_dim(length) for dim, length in zip(given, sizes, strict=True))


def _local_repeat(call: Call, part: Part) -> LocalCall:
    at = normal(call.argument("dim"), len(call.dims("self")))
    repeats = part.length(call.dims_of(call.node)[at]) // part.length(call.dims("self")[at])
    return LocalCall(call.node.target, *call.replaced(repeats=repeats))


@rule("repeat_interleave.self_int", local=_local_repeat)
def repeat_interleave(call: Call) -> Dims:
    """Add a name inside a dimension."""
    given, at = call.dims("self"), call.argument("dim")
    if at is None:
        raise MismatchError("it flattens what it repeats")
    at = normal(at, len(given))
    return replace_dim(given, at, [(*given[at], Name(call.argument("repeats")))])


@rule("transpose.int")
def transpose(call: Call) -> Dims:
    """Exchange two dimensions."""
    given = list(call.dims("self"))
    first, second = (normal(call.argument(name), len(given)) for name in ("dim0", "dim1"))
    given[first], given[second] = given[second], given[first]
    return tuple(given)


@rule("t.default")
def turn(call: Call) -> Dims:
    """Exchange rows and columns."""
    return call.dims("self")[::-1]


@rule("permute.default")
def permute(call: Call) -> Dims:
    """Bring dimensions into another order."""
    given = call.dims("self")
    return tuple(given[place] for place in call.argument("dims"))


@rule("unsqueeze.default")
def unsqueeze(call: Call) -> Dims:
    """Add a dimension of size 1."""
    given = call.dims("self")
    at = normal(call.argument("dim"), len(given) + 1)
    return (*given[:at], (), *given[at:])


def _local_squeeze(call: Call, part: Part) -> LocalCall:
    """Leave a dimension that is of size 1 in a part only."""
    given = call.dims("self")
    if part.carried(given[normal(call.argument("dim"), len(given))]):
        return LocalCall(torch.ops.aten.alias.default, (call.argument("self"),), {})
    return LocalCall(call.node.target, call.node.args, call.node.kwargs)


@rule("squeeze.dim", local=_local_squeeze)
def squeeze(call: Call) -> Dims:
    """Drop a dimension, if it is of size 1."""
    given = call.dims("self")
    at = normal(call.argument("dim"), len(given))
    return given if resolve(given[at]) else replace_dim(given, at, [])


@rule("select.int")
def select(call: Call) -> Dims:
    """Drop a dimension of which one index is taken."""
    given = call.dims("self")
    at = normal(call.argument("dim"), len(given))
    block(given[at], "one index is taken of it")
    return replace_dim(given, at, [])


@rule("unbind.int")
def unbind(call: Call) -> list[Dims]:
    """Drop a dimension, a tensor for every index."""
    given = call.dims("self")
    at = normal(call.argument("dim"), len(given))
    block(given[at], "every index of it becomes a tensor")
    return [replace_dim(given, at, [])] * len(call.values())


def _local_creation(call: Call, part: Part) -> LocalCall:
    sizes = local_sizes(call.argument("size"), call.dims_of(call.node), part)
    return LocalCall(call.node.target, *call.replaced(size=sizes))


@rule("full.default", "new_ones.default", "new_zeros.default", "ones.default", "zeros.default", local=_local_creation)
def creation(call: Call) -> Dims:
    """Add names: the same number is everywhere."""
    return tuple(new_dim(length) for length in call.output_sizes())
