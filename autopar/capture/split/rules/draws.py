"""Operators that draw random numbers, attention in one operator among them.

    F.dropout(x, 0.1)     # of (rows, 8, 6, 4) heads, a part has (rows, 2, 6, 4), and draws rows * 8 * 6 * 4 numbers

A part draws the numbers of the whole tensor, and takes its own. So what is computed does not depend on the number of
parts, and the generator is left as the whole layer leaves it: what is drawn next, in a region or outside, is alike on
every part. Parts begin a layer with the same seed.

A generator fills a tensor in the order of memory. Of a part's tensor that order is read as it is, but for dimensions of
size 1, of which it tells nothing: there, the order is that of the whole tensor when the layer was captured.

Attention keeps batch and heads, and the values' width. With dropout, torch computes it on a CPU by plain operators, and
draws for weights of ``(rows, heads, queries, keys)``. A part does so too, draws the weights of all heads, and takes its
own. On a GPU a fused kernel draws inside, which no part can repeat: there, it is refused, unless every part is to draw
for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from autopar.capture.model.batch import number_of
from autopar.capture.model.effects import values_by_name
from autopar.capture.split.names import Dim, MismatchError, Name, block, resolve, size
from autopar.capture.split.rules.rule import (
    ROWS,
    Dims,
    LocalCall,
    OperatorCall,
    Part,
    Ranges,
    broadcast,
    memory_order,
    rule,
    take_ranges,
    unite_or_block,
)
from autopar.errors import UsageError

SplitDims = tuple[tuple[int, int, Ranges], ...]
"""Of every dimension that is split: which one, how long the whole is, and the indices that a part has.

Where rows are outside of it in the same dimension, that is for one row.
"""


def own_ranges(dims: Dims, part: Part) -> SplitDims:
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
    own: SplitDims,
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


def drop_part(tensor: torch.Tensor, rate: float, order: tuple[int, ...], own: SplitDims) -> torch.Tensor:
    """Do what dropout does to a part of a tensor, bit for bit."""
    if tensor.is_cuda:
        # The fused kernel scales after it has rounded nothing.
        return _native_drop_part(tensor, rate, order, own)[0]
    return tensor * _draw_part(torch.ops.aten.dropout.default, tensor, order, own, rate, True)


def _fused_mask(ones: torch.Tensor, rate: float) -> torch.Tensor:
    mask: torch.Tensor = torch.ops.aten.native_dropout.default(ones, rate, True)[1]
    return mask


def _native_drop_part(
    tensor: torch.Tensor, rate: float, order: tuple[int, ...], own: SplitDims
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


@rule("dropout.default", "native_dropout.default", local=_local_dropout)
def _dropout(call: OperatorCall) -> Dims | list[Dims]:
    """Leave every number in its place, or make it zero; the native one also tells which."""
    dims = call.dims("input")
    return [dims] * 2 if isinstance(call.values(), (tuple, list)) else dims


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


_FUSED = (
    "fused attention draws its dropout inside a GPU's kernel, and cannot be split there; turn dropout of attention "
    "off, write it in plain operators (Transformers: `attn_implementation='eager'`), or pass `split_seeds=True`, with "
    "which every part draws for itself"
)


def attend_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    rate: float,
    causal: bool,
    scale: float | None,
    share_keys: bool,
    own: SplitDims,
) -> torch.Tensor:
    """Attend with dropout, at a rate, of the weights of some of all heads; ``own`` says which part of them it is.

    Raises:
        UsageError: on a GPU.
    """
    if query.is_cuda:
        raise UsageError(_FUSED)
    if share_keys:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    # As torch does, which computes in single precision what is of half.
    half = query.dtype in (torch.float16, torch.bfloat16)
    wide = [each.float() if half else each for each in (query, key, value)]
    factor = 1 / sqrt(query.shape[-1]) if scale is None else scale
    scores = _hide((wide[0] * factor) @ wide[1].transpose(-1, -2), mask, causal)
    weights = torch.ops.aten._safe_softmax.default(scores, -1)
    found = drop_part(weights, rate, tuple(range(weights.dim())), own) @ wide[2]
    return found.to(query.dtype)


def attend_locally(
    part: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    rate: float,
    causal: bool,
    scale: float | None,
    share_keys: bool,
) -> torch.Tensor:
    """Attend with dropout that a part draws for itself, as torch does it: no part knows the others' numbers."""
    with _own_numbers(query.device, part):
        return F.scaled_dot_product_attention(query, key, value, mask, rate, causal, scale=scale, enable_gqa=share_keys)


@contextmanager
def _own_numbers(device: torch.device, part: int) -> Iterator[None]:
    """Draw other numbers on every part; behind it the default generator is as on all others, and one number further."""
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    # The generator's state is a real tensor, where all others may be fake.
    with unset_fake_temporarily():
        state = generator.get_state()
        generator.manual_seed(number_of(f"{bytes(state.numpy()).hex()}/{part}"))
    try:
        yield
    finally:
        with unset_fake_temporarily():
            generator.set_state(state)
        torch.rand(1, generator=generator, device=device)


def drops_weights(nodes: Iterable[fx.Node]) -> bool:
    """Tell whether some nodes of a whole layer attend in one operator with dropout."""
    fused = torch.ops.aten.scaled_dot_product_attention.default
    attending = (node for node in nodes if node.target is fused)
    return any(values_by_name(fused, node.args, node.kwargs)["dropout_p"] for node in attending)


def draw_locally(module: fx.GraphModule, part: int) -> bool:
    """Have attention of a part's graph draw its dropout for itself, not as a part of what is drawn for all heads.

    Return whether some does: that of layers whose heads stay together draws for all.
    """
    nodes = [node for node in module.graph.nodes if node.target is attend_part]
    for node in nodes:
        node.target, node.args = attend_locally, (part, *node.args[:-1])
    module.recompile()
    return bool(nodes)


def _hide(scores: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """Add a mask to the scores of queries and keys, or leave only those that it says; or those of keys before."""
    if causal:
        scores = scores + torch.full_like(scores, -torch.inf).triu(1)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _local_attention(call: OperatorCall, part: Part) -> LocalCall | None:
    if not call.argument("dropout_p"):
        return None
    tensors = [call.argument(name) for name in ("query", "key", "value", "attn_mask")]
    options = [call.argument(name) for name in ("dropout_p", "is_causal", "scale", "enable_gqa")]
    *heads, queries, _ = call.dims_of(call.node)
    return LocalCall(attend_part, (*tensors, *options, own_ranges((*heads, queries), part)), {})


@rule("scaled_dot_product_attention.default", local=_local_attention)
def _attention(call: OperatorCall) -> Dims:
    """Keep batch, heads and the values' width; every query sees all keys and the whole of their width."""
    query, key, value = call.dims("query"), call.dims("key"), call.dims("value")
    if call.argument("enable_gqa"):
        key, value = (_repeat_heads(query, dims) for dims in (key, value))
    heads = broadcast([query[:-2], key[:-2], value[:-2]])
    unite_or_block(key[-2], value[-2])
    unite_or_block(query[-1], key[-1])
    for dim in (query[-1], query[-2], key[-2]):
        block(dim, "attention reads the whole of it")
    if call.argument("attn_mask") is not None:
        broadcast([(*heads, query[-2], key[-2]), call.dims("attn_mask")])
    return (*heads, query[-2], value[-1])


def _repeat_heads(query: Dims, dims: Dims) -> Dims:
    """Return the dimensions of keys or values whose heads are repeated, each for a group of queries."""
    times = size(query[-3]) // size(dims[-3])
    heads: Dim = (*resolve(dims[-3]), Name(times))
    return (*dims[:-3], heads, *dims[-2:])
