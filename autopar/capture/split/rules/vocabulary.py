"""Embeddings and losses over a vocabulary of which every part has some rows or classes.

A part looks up the tokens that it has, and zeros for others, so that the sum over parts is the embedding. Of the loss,
it gives for every token the logarithm of the sum of its exponentials in a column of its own, and what belongs to the
target's class in another: one sum of ``parts + 1`` numbers a token, from which every part computes the loss. No part
sees the logits of another, and no maximum is exchanged before: the columns' own logarithm of exponentials is as safe.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.capture.split.names import MismatchError, block
from autopar.capture.split.rules.rule import Dims, LocalCall, OperatorCall, Part, replace_dim, rule, unite_or_block


def _own_indices(indices: torch.Tensor, first: int, own: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which indices a part has, and where: 0 for those of others; wrong ones stay wrong, for torch to refuse."""
    inside = (indices >= first) & (indices < first + own)
    others = (indices >= 0) & (indices < total) & ~inside
    return inside, torch.where(inside, indices - first, indices.masked_fill(others, 0))


def _embed_part(weight: torch.Tensor, indices: torch.Tensor, padding_idx: int, first: int, total: int) -> torch.Tensor:
    """Look up the tokens from ``first`` on that a part has rows of; the padding's row gets no gradient.

    Returns:
        of the size of ``indices``, and the width: a summand of the embedding.
    """
    rows = weight.shape[0]
    inside, own = _own_indices(indices, first, rows, total)
    padding = padding_idx - first if first <= padding_idx < first + rows else -1
    found: torch.Tensor = torch.ops.aten.embedding.default(weight, own, padding)
    return found.masked_fill(~inside.unsqueeze(-1), 0)


def _local_embedding(call: OperatorCall, part: Part) -> LocalCall | None:
    rows = call.dims("weight")[0]
    if not part.splits(rows):
        return None
    (axis,) = part.axes
    tensors = (call.argument("weight"), call.argument("indices"))
    counts = (call.argument("padding_idx"), axis.indices.start, call.sizes("weight")[0])
    return LocalCall(_embed_part, (*tensors, *counts), {})


@rule("embedding.default", local=_local_embedding)
def _embedding(call: OperatorCall) -> Dims:
    """Sum over the vocabulary: all rows but one count nothing."""
    if call.argument("scale_grad_by_freq") or call.argument("sparse"):
        raise MismatchError("its gradient is scaled by the tokens' frequency, or sparse")
    rows, width = call.dims("weight")
    call.summed.append(rows)
    call.single_name_dims.append(rows)
    return (*call.dims("indices"), width)


def _class_dim(logits: Dims) -> int:
    return min(1, len(logits) - 1)


def _local_cross_entropy(call: OperatorCall, part: Part) -> LocalCall | None:
    at = _class_dim(call.dims("self"))
    (axis,) = part.axes
    classes, smooth = call.sizes("self")[at], bool(call.argument("label_smoothing"))
    tensors = (call.argument("self"), call.argument("target"), call.argument("weight"))
    ignored = call.argument("ignore_index")
    place = (at, axis.indices.start, classes, axis.index, axis.count, smooth, ignored)
    options = (call.argument("reduction"), ignored, float(call.argument("label_smoothing")))
    return LocalCall(_class_sums, (*tensors, *place), {}, _loss_of, (*tensors[1:], classes, axis.count, *options))


@rule("cross_entropy_loss.default", local=_local_cross_entropy)
def _cross_entropy(call: OperatorCall) -> Dims:
    """Sum over the classes; nothing else of a loss is split."""
    logits = call.dims("self")
    at = _class_dim(logits)
    if not call.is_integer(call.argument("target")):
        raise MismatchError("its targets are probabilities")
    call.summed.append(logits[at])
    call.single_name_dims.append(logits[at])
    others = replace_dim(logits, at, [])
    for dim, target in zip(others, call.dims("target"), strict=True):
        block(unite_or_block(dim, target), "the loss reads the whole of it")
    if call.argument("weight") is not None:
        block(call.dims("weight")[0], "every part needs the weights of all classes")
    return others if call.argument("reduction") == 0 else ()


class _LogSumExp(torch.autograd.Function):
    """Over the last dimension; a part all of whose classes are masked by minus infinity gets no gradient, not NaN."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        found = logits.logsumexp(-1)
        ctx.save_for_backward(logits, found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        logits, found = ctx.saved_tensors
        shares: torch.Tensor = (logits - found.masked_fill(found.isinf(), 0).unsqueeze(-1)).exp()
        return shares * gradient.unsqueeze(-1)


def _class_sums(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    class_dim: int,
    first: int,
    classes: int,
    part: int,
    parts: int,
    smooth: bool,
    ignore_index: int,
) -> torch.Tensor:
    """Return a part's summand of what the loss needs of its classes, those from ``first`` on.

    Returns:
        of the target's size, and behind it: a column per part, in its own the logarithm of its exponentials' sum; the
        logit of the target's class; and for smoothing, the sum of all logits, weighted.
    """
    logits = logits.movedim(class_dim, -1)
    own = logits.shape[-1]
    inside, at = _own_indices(target.masked_fill(target == ignore_index, 0), first, own, classes)
    exponentials: torch.Tensor = _LogSumExp.apply(logits)  # type: ignore[no-untyped-call]
    columns = [torch.zeros_like(exponentials)] * parts
    columns[part] = exponentials
    columns.append(logits.gather(-1, at.unsqueeze(-1)).squeeze(-1).masked_fill(~inside, 0))
    if smooth:
        columns.append((logits if weight is None else logits * weight[first : first + own]).sum(-1))
    return torch.stack(columns, -1)


def _loss_of(
    sums: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    classes: int,
    parts: int,
    reduction: int,
    ignore_index: int,
    smoothing: float,
) -> torch.Tensor:
    """Return the loss from the sums over parts of :func:`_class_sums`, as ``torch.nn.functional.cross_entropy`` does.

    A token's loss is ``log(sum(exp(x))) - x[target]``, times the class's weight. Smoothing takes a share of it for the
    mean of all classes' losses, each weighted by its own. A mean divides by the weights of the targets.
    """
    normaliser = sums[..., :parts].logsumexp(-1)
    counted = target != ignore_index
    weights = counted.to(sums.dtype)
    if weight is not None:
        weights = weights * weight[target.masked_fill(~counted, 0)]
    losses = weights * (normaliser - sums[..., parts])
    if smoothing:
        every = classes if weight is None else weight.sum()
        smooth = (normaliser * every - sums[..., parts + 1]).masked_fill(~counted, 0)
        losses = losses * (1 - smoothing) + smooth * (smoothing / classes)
    if reduction == 0:
        return losses
    return losses.sum() / weights.sum() if reduction == 1 else losses.sum()
