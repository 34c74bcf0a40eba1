"""Operators that make every number of the numbers in its place: broadcast inputs, and nothing else.

torch tags most of them as pointwise. Those here are, and are not tagged.
"""

from __future__ import annotations

import torch

from autopar.capture.split.rules.rule import Dims, OperatorCall, SplitRule, broadcast, rule


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
def elementwise(call: OperatorCall) -> Dims:
    """Broadcast all tensors."""
    return broadcast(map(call.dims_of, call.tensors()))


@rule("to.other", "type_as.default")
def like(call: OperatorCall) -> Dims:
    """Take the type of another tensor, of which nothing else counts."""
    return call.dims("self")


def pointwise(target: object) -> SplitRule | None:
    """Return the rule of an operator that torch says is pointwise; not those that draw, or write into what they read.

    What they write into may be read elsewhere as a whole.
    """
    tags, schema = getattr(target, "tags", ()), getattr(target, "_schema", None)
    draws_or_writes = torch.Tag.nondeterministic_seeded in tags or (schema is not None and schema.is_mutable)
    return SplitRule(elementwise) if torch.Tag.pointwise in tags and not draws_or_writes else None
