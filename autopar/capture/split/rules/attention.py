"""Attention in one operator: batch and heads are kept, as is the values' width.

With dropout, torch computes it on a CPU by plain operators, and draws for weights of ``(rows, heads, queries, keys)``.
A part does so too, draws the weights of all heads, and takes its own. On a GPU a fused kernel draws inside, which no
part can repeat: there, it is refused, unless every part is to draw for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import sqrt

import torch
import torch.nn.functional as F
from torch import fx

from autopar.capture.model.batch import number_of
from autopar.capture.split.names import Dim, Name, block, resolve, size
from autopar.capture.split.rules.draws import Taken, drop_part, own_ranges
from autopar.capture.split.rules.rule import Dims, LocalCall, OperatorCall, Part, broadcast, rule, unite_or_block
from autopar.errors import UsageError

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
    own: Taken,
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
    state = generator.get_state()
    generator.manual_seed(number_of(f"{bytes(state.numpy()).hex()}/{part}"))
    try:
        yield
    finally:
        generator.set_state(state)
        torch.rand(1, generator=generator, device=device)


def drops_weights(nodes: Iterable[fx.Node]) -> bool:
    """Tell whether some nodes of a whole layer attend in one operator with dropout."""
    fused = torch.ops.aten.scaled_dot_product_attention.default
    return any(node.target is fused and _rate_of(node) for node in nodes)


def _rate_of(node: fx.Node) -> object:
    """Return the rate of dropout, the fifth argument, or none."""
    return node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p")


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
