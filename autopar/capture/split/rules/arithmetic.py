"""Operators on numbers in their places, on the whole of a dimension, and of numbers against numbers.

Elementwise operators broadcast their inputs, and nothing else: torch tags most of them as pointwise; those here are,
and are not tagged. Of a sum every part gives the sum of its own, of a mean too, in its share of the whole. What is
normalised, or reduced otherwise, cannot be split.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from autopar.capture.split.names import block, size
from autopar.capture.split.rules.rule import (
    Dims,
    LocalCall,
    OperatorCall,
    Part,
    SplitRule,
    broadcast,
    normal,
    rule,
    unite_or_block,
)


@rule(
    "__and__.Tensor",
    "__or__.Tensor",
    "_to_copy.default",
    "alias.default",
    "contiguous.default",
    "detach.default",
    "expand_as.default",
    "full_like.default",
    "lift_fresh_copy.default",
    "masked_fill.Tensor",
    "ones_like.default",
    "to.device",
    "to.dtype",
    "to.dtype_layout",
    "where.Scalar",
    "where.ScalarOther",
    "where.ScalarSelf",
    "zeros_like.default",
)
def _elementwise(call: OperatorCall) -> Dims:
    """Broadcast all tensors."""
    return broadcast(map(call.dims_of, call.tensors()))


@rule("to.other", "type_as.default")
def _like(call: OperatorCall) -> Dims:
    """Take the type of another tensor, of which nothing else counts."""
    return call.dims("self")


def pointwise(target: object) -> SplitRule | None:
    """Return the rule of an operator that torch says is pointwise; not those that draw, or write into what they read.

    What they write into may be read elsewhere as a whole.
    """
    tags, schema = getattr(target, "tags", ()), getattr(target, "_schema", None)
    draws_or_writes = torch.Tag.nondeterministic_seeded in tags or (schema is not None and schema.is_mutable)
    return SplitRule(_elementwise) if torch.Tag.pointwise in tags and not draws_or_writes else None


def _drop(dims: Dims, places: set[int], keep: bool) -> Dims:
    kept = (() if place in places else dim for place, dim in enumerate(dims) if keep or place not in places)
    return tuple(kept)


def _places(call: OperatorCall, rank: int) -> set[int]:
    dims = call.argument("dim")
    dims = [dims] if isinstance(dims, int) else dims
    return {normal(dim, rank) for dim in dims or range(rank)}


@rule("sum.dim_IntList")
def _sum_dims(call: OperatorCall) -> Dims:
    """Sum over some dimensions."""
    given = call.dims("self")
    places = _places(call, len(given))
    call.summed += [given[place] for place in sorted(places)]
    return _drop(given, places, call.argument("keepdim"))


@rule("sum.default")
def _sum_all(call: OperatorCall) -> Dims:
    """Sum over all dimensions."""
    call.summed += call.dims("self")
    return ()


def _mean_share(operator: Callable[..., torch.Tensor], share: float, *args: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401
    """Return a mean over a part's numbers times the share that they are of all."""
    return operator(*args, **options) * share


def _local_mean(call: OperatorCall, part: Part) -> LocalCall | None:
    """Return a part's summand of a mean over dimensions."""
    share = prod(part.length(dim) / size(dim) for dim in call.summed if part.splits(dim))
    if share == 1:
        return None
    return LocalCall(_mean_share, (call.node.target, share, *call.node.args), call.node.kwargs)


@rule("mean.default", local=_local_mean)
def _mean_all(call: OperatorCall) -> Dims:
    """Take the mean over all dimensions."""
    call.summed += call.dims("self")
    return ()


@rule("amax.default", "amin.default", "logsumexp.default", "mean.dim", "std.correction", "var.correction")
def _reduce(call: OperatorCall) -> Dims:
    """Read the whole of some dimensions."""
    given = call.dims("self")
    places = _places(call, len(given))
    for place in places:
        block(given[place], "the whole of it is reduced")
    return _drop(given, places, call.argument("keepdim"))


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
    bias = "bias" in {each.name for each in call.node.target._schema.arguments}  # type: ignore[union-attr]
    for name in ("weight", "bias") if bias else ("weight",):
        if call.argument(name) is not None:
            for dim, own in zip(last, call.dims(name), strict=True):
                unite_or_block(dim, own)
    return given


def _local_loss(call: OperatorCall, part: Part) -> LocalCall | None:
    return _local_mean(call, part) if call.argument("reduction") == 1 else None


@rule("huber_loss.default", "l1_loss.default", "mse_loss.default", "smooth_l1_loss.default", local=_local_loss)
def _loss(call: OperatorCall) -> Dims:
    """Compare every number with its target; sum them over all dimensions, or take the mean."""
    dims = broadcast([call.dims("self"), call.dims("target")])
    if call.argument("reduction") == 0:
        return dims
    call.summed += dims
    return ()
