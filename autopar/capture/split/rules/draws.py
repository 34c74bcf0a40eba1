"""Operators that draw random numbers: a part draws those of the whole tensor, and takes its own.

    F.dropout(x, 0.1)     # of (rows, 8, 6, 4) heads, a part has (rows, 2, 6, 4), and draws rows * 8 * 6 * 4 numbers

So what is computed does not depend on the number of parts, and the generator is left as the whole layer leaves it: what
is drawn next, in a region or outside, is alike on every part. Parts begin a layer with the same seed.

A generator fills a tensor in the order of memory. Of a part's tensor that order is read as it is, but for dimensions of
size 1, of which it tells nothing: there, the order is that of the whole tensor when the layer was captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.capture.split.names import Dim, MismatchError, resolve, size
from autopar.capture.split.rules.rule import (
    ROWS,
    Dims,
    LocalCall,
    OperatorCall,
    Part,
    Ranges,
    memory_order,
    rule,
    take_ranges,
)

Taken = tuple[tuple[int, int, Ranges], ...]
"""Of every dimension that is split: which one, how long the whole is, and the indices that a part has.

Where rows are outside of it in the same dimension, that is for one row.
"""


def own_ranges(dims: Dims, part: Part) -> Taken:
    """Return which part of a tensor one has.

    Raises:
        MismatchError: what is split comes again in every row, and rows are counted inside of it.
    """
    split = ((place, _inside_rows(dim)) for place, dim in enumerate(dims) if part.splits(dim))
    found = tuple((place, size(dim), part.ranges(dim)) for place, dim in split if part.splits(dim))
    if len(found) < sum(map(part.splits, dims)):
        raise MismatchError("rows are counted inside of what is split")
    return found


def _inside_rows(dim: Dim) -> Dim:
    """Return the names of a dimension inside of those that count rows."""
    product = resolve(dim)
    last = max((place for place, name in enumerate(product) if name.size % ROWS == 0), default=-1)
    return product[last + 1 :]


def _draw_part(
    draw: Callable[..., torch.Tensor],
    like: torch.Tensor,
    order: tuple[int, ...],
    own: Taken,
    *args: Any,  # noqa: ANN401
    **options: Any,  # noqa: ANN401
) -> torch.Tensor:
    """Draw for a tensor of ones as large as the whole, and take a part.

    Args:
        draw: called with the tensor of ones, and further arguments.
        like: what a part has of the whole.
        order: its dimensions as memory had them when the layer was captured, the outermost first.
        own: which part of the whole it is.
    """
    sizes = list(like.shape)
    for place, length, ranges in own:
        sizes[place] = sizes[place] // sum(end - start for start, end in ranges) * length
    order = _memory_order(like, order)
    ones = like.detach().new_ones([sizes[place] for place in order])
    found = draw(ones.permute([order.index(place) for place in range(len(sizes))]), *args, **options)
    for place, length, ranges in own:
        if found.shape[place] == length:
            found = take_ranges(found, place, ranges)
        else:
            rows = torch.ops.aten.unflatten.int(found, place, (-1, length))
            found = take_ranges(rows, place + 1, ranges).flatten(place, place + 1)
    return found


def _memory_order(tensor: torch.Tensor, order: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tensor's dimensions as memory has them; ``order`` is right unless a stride says otherwise."""
    own = memory_order(tensor)
    long = [place for place in order if tensor.shape[place] > 1]
    return order if [place for place in own if tensor.shape[place] > 1] == long else own


def drop_part(tensor: torch.Tensor, rate: float, order: tuple[int, ...], own: Taken) -> torch.Tensor:
    """Do what dropout does to a part of a tensor, bit for bit."""
    if tensor.is_cuda:
        # The fused kernel scales after it has rounded nothing.
        return tensor * _draw_part(_fused_mask, tensor, order, own, rate) * (1 / (1 - rate) if rate < 1 else 0.0)
    return tensor * _draw_part(torch.ops.aten.dropout.default, tensor, order, own, rate, True)


def _fused_mask(ones: torch.Tensor, rate: float) -> torch.Tensor:
    mask: torch.Tensor = torch.ops.aten.native_dropout.default(ones, rate, True)[1]
    return mask


def _native_drop_part(
    tensor: torch.Tensor, rate: float, order: tuple[int, ...], own: Taken
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``native_dropout`` does to a part of a tensor, bit for bit."""
    mask = _draw_part(_fused_mask, tensor, order, own, rate)
    return tensor * mask * (1 / (1 - rate) if rate < 1 else 0.0), mask


def _local_dropout(call: OperatorCall, part: Part) -> LocalCall | None:
    own, train, rate = own_ranges(call.dims("input"), part), call.argument("train"), call.argument("p")
    native = call.node.target is torch.ops.aten.native_dropout.default
    if not own or train is False or not (native or (train and rate)):
        return None
    drop = _native_drop_part if native else drop_part
    return LocalCall(drop, (call.argument("input"), rate, call.memory_order("input"), own), {})


@rule("dropout.default", local=_local_dropout)
def _dropout(call: OperatorCall) -> Dims:
    """Leave every number in its place, or make it zero."""
    return call.dims("input")


@rule("native_dropout.default", local=_local_dropout)
def _native_dropout(call: OperatorCall) -> list[Dims]:
    """Leave every number in its place, or make it zero; and tell which."""
    return [call.dims("input")] * 2


def _local_draw(call: OperatorCall, part: Part) -> LocalCall | None:
    own = own_ranges(call.dims("self"), part)
    if not own:
        return None
    like, *others = call.node.args
    return LocalCall(_draw_part, (call.node.target, like, call.memory_order("self"), own, *others), call.node.kwargs)


@rule("bernoulli.p", "rand_like.default", "randn_like.default", local=_local_draw)
def draw(call: OperatorCall) -> Dims:
    """Draw a number for every one that it is given, of which nothing but its place counts."""
    return call.dims("self")
