"""Operators on the whole of a dimension, on numbers against numbers, products of matrices, and tables.

Of a sum every part gives the sum of its own, of a mean too, in its share of the whole. What is normalised, or reduced
otherwise, cannot be split. What products multiply is summed over, all other dimensions are kept: where a part has only
some of what is summed over, it gives a summand of the product, and the bias is added to the sum. Of a convolution,
input channels are summed over, and output channels are kept; in depthwise ones both are one. What goes over the edge of
one position is in the next, so that places are not split.

Of an embedding, and of a loss over a vocabulary, every part has some rows or classes. A part looks up the tokens that
it has, and zeros for others, so that the sum over parts is the embedding. Of the loss, it gives for every token the
logarithm of the sum of its exponentials in a column of its own, and what belongs to the target's class in another: one
sum of ``parts + 1`` numbers a token, from which every part computes the loss. No part sees the logits of another, and
no maximum is exchanged before: the columns' own logarithm of exponentials is as safe.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import fx

from autopar.capture.split.names import Dim, MismatchError, block, size
from autopar.capture.split.rules.rule import (
    Dims,
    LocalCall,
    OperatorCall,
    Part,
    broadcast,
    new_dim,
    normal,
    replace_dim,
    rule,
    unite_or_block,
)


@rule("to.other", "type_as.default")
def _like(call: OperatorCall) -> Dims:
    """Take the type of another tensor, of which nothing else counts."""
    return call.dims("self")


def _reduced_dims(call: OperatorCall) -> tuple[Dims, list[Dim]]:
    """Return what is left of dimensions, and those that are reduced: all unless some are named."""
    given, named = call.dims("self"), call.argument("dim")
    named = [named] if isinstance(named, int) else named
    places = {normal(dim, len(given)) for dim in named or range(len(given))}
    keep = call.argument("keepdim")
    kept = (() if place in places else dim for place, dim in enumerate(given) if keep or place not in places)
    return tuple(kept), [given[place] for place in sorted(places)]


def _mean_share(operator: Callable[..., torch.Tensor], share: float, *args: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401
    """Return a mean over a part's numbers times the share that they are of all."""
    return operator(*args, **options) * share


def _local_mean(call: OperatorCall, part: Part) -> LocalCall | None:
    """Return a part's summand of a mean over dimensions; none of a sum."""
    share = prod(part.length(dim) / size(dim) for dim in call.summed if part.splits(dim))
    if share == 1 or not (call.node.target is torch.ops.aten.mean.default or call.argument("reduction") == 1):
        return None
    return LocalCall(_mean_share, (call.node.target, share, *call.node.args), call.node.kwargs)


@rule("mean.default", "sum.default", "sum.dim_IntList", local=_local_mean)
def _sum(call: OperatorCall) -> Dims:
    """Sum over some dimensions, or take the mean over all."""
    kept, reduced = _reduced_dims(call)
    call.summed += reduced
    return kept


@rule("huber_loss.default", "l1_loss.default", "mse_loss.default", "smooth_l1_loss.default", local=_local_mean)
def _loss(call: OperatorCall) -> Dims:
    """Compare every number with its target; sum them over all dimensions, or take the mean."""
    dims = broadcast([call.dims("self"), call.dims("target")])
    if call.argument("reduction") == 0:
        return dims
    call.summed += dims
    return ()


@rule("amax.default", "amin.default", "logsumexp.default", "mean.dim", "std.correction", "var.correction")
def _reduce(call: OperatorCall) -> Dims:
    """Read the whole of some dimensions."""
    kept, reduced = _reduced_dims(call)
    for dim in reduced:
        block(dim, "the whole of it is reduced")
    return kept


@rule("_log_softmax.default", "_safe_softmax.default", "_softmax.default", "log_softmax.int", "softmax.int")
def softmax(call: OperatorCall) -> Dims:
    """Divide by a sum over the whole of a dimension."""
    given, at = call.dims_and_place()
    block(given[at], "softmax reads the whole of it")
    return given


@rule("layer_norm.default", "rms_norm.default")
def _norm(call: OperatorCall) -> Dims:
    """Divide by a norm over the whole of the last dimensions, and scale them."""
    given = call.dims("input")
    last = given[len(given) - len(call.argument("normalized_shape")) :]
    for dim in last:
        block(dim, "it is normalised as a whole")
    for name in ("weight", "bias"):
        if call.argument(name) is not None:
            for dim, own in zip(last, call.dims(name), strict=True):
                unite_or_block(dim, own)
    return given


_ADD = torch.ops.aten.add.Tensor


def _local_linear(call: OperatorCall, part: Part) -> LocalCall | None:
    bias = call.argument("bias")
    if bias is None or not part.splits(call.dims("input")[-1]):
        return None
    return LocalCall(call.node.target, *call.replace_arguments(bias=None), _ADD, (bias,), then_broadcasts=True)


@rule("linear.default", local=_local_linear)
def _linear(call: OperatorCall) -> Dims:
    """Sum over the input's last dimension, which is the weight's columns."""
    given, weight = call.dims("input"), call.dims("weight")
    call.summed.append(unite_or_block(given[-1], weight[1]))
    if call.argument("bias") is not None:
        unite_or_block(call.dims("bias")[0], weight[0])
    return (*given[:-1], weight[0])


def _local_sum_with_product(call: OperatorCall, part: Part) -> LocalCall | None:
    factors = _factors(call)
    if not part.splits(call.dims_of(factors[0])[-1]):
        return None
    product = torch.ops.aten.mm.default if call.argument("mat1") else torch.ops.aten.bmm.default
    summand = call.argument("self"), call.argument("beta"), call.argument("alpha")
    return LocalCall(product, factors, {}, _add_scaled, summand, then_broadcasts=True)


def _factors(call: OperatorCall) -> tuple[fx.Node, fx.Node]:
    """Return the matrices that are multiplied, or as many pairs of them as there are."""
    return call.argument("mat1") or call.argument("batch1"), call.argument("mat2") or call.argument("batch2")


def _add_scaled(product: torch.Tensor, summand: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    """Add something to a product, either times a factor."""
    return (summand if beta == 1 else summand * beta) + (product if alpha == 1 else product * alpha)


@rule("addmm.default", "baddbmm.default", local=_local_sum_with_product)
def _sum_with_product(call: OperatorCall) -> Dims:
    """Multiply two matrices, or as many pairs as there are, and add something to the product."""
    return broadcast([_product_dims(call, *map(call.dims_of, _factors(call))), call.dims("self")])


@rule("einsum.default")
def _einsum(call: OperatorCall) -> Dims:
    """Sum over the dimensions whose letters are not in what comes out."""
    inputs, arrow, output = call.argument("equation").replace(" ", "").partition("->")
    if not arrow or "." in inputs:
        raise MismatchError("its equation leaves dimensions out")
    found: dict[str, Dim] = {}
    for letters, node in zip(inputs.split(","), call.argument("tensors"), strict=True):
        if len(set(letters)) < len(letters):
            raise MismatchError("it takes a diagonal")
        for letter, dim in zip(letters, call.dims_of(node), strict=True):
            (found[letter],) = broadcast([(found.get(letter, ()),), (dim,)])
    call.summed += [dim for letter, dim in found.items() if letter not in output]
    return tuple(found[letter] for letter in output)


@rule("bmm.default", "matmul.default", "mm.default")
def product(call: OperatorCall) -> Dims:
    """Sum over the dimension between matrices; those before the last two are broadcast."""
    return _product_dims(call, call.dims("self"), call.dims_of(call.argument("mat2") or call.argument("other")))


def _product_dims(call: OperatorCall, one: Dims, other: Dims) -> Dims:
    if min(len(one), len(other)) < 2:
        raise MismatchError("it multiplies a vector")
    call.summed.append(unite_or_block(one[-1], other[-2]))
    return (*broadcast([one[:-2], other[:-2]]), one[-2], other[-1])


_NEIGHBOURS = "a convolution reads neighbours"


def _add_channels(total: torch.Tensor, bias: torch.Tensor, places: int) -> torch.Tensor:
    """Add a number to every channel, behind which are dimensions of places."""
    return total + bias.view(-1, *[1] * places)


def _local_convolution(call: OperatorCall, part: Part) -> LocalCall | None:
    places = len(call.dims("weight")) - 2
    if not part.splits(call.dims("input")[-places - 1]):
        return None
    if call.argument("groups") > 1:
        groups = part.length(call.dims("weight")[0])
        return LocalCall(call.node.target, *call.replace_arguments(groups=groups))
    bias = call.argument("bias")
    if bias is None:
        return None
    return LocalCall(call.node.target, *call.replace_arguments(bias=None), _add_channels, (bias, places))


@rule("conv1d.default", "conv1d.padding", "conv2d.default", "conv2d.padding", local=_local_convolution)
def _convolution(call: OperatorCall) -> Dims:
    """Sum over input channels, or keep channels that are convolved each for itself."""
    given, weight, sizes = call.dims("input"), call.dims("weight"), call.sizes_of(call.node)
    places = len(weight) - 2
    channels, groups = given[-places - 1], call.argument("groups")
    if groups == 1:
        call.summed.append(unite_or_block(channels, weight[1]))
    elif call.sizes("weight")[:2] == (groups, 1):
        unite_or_block(channels, weight[0])
    else:
        raise MismatchError("its channels are in groups")
    if call.argument("bias") is not None:
        unite_or_block(call.dims("bias")[0], weight[0])
    for dim in (*given[-places:], *weight[-places:]):
        block(dim, _NEIGHBOURS)
    return (*given[: -places - 1], weight[0], *(new_dim(size, _NEIGHBOURS) for size in sizes[-places:]))


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
