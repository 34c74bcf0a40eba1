"""Which operators autocast computes in its own type, and how often those alone read a tensor.

Under autocast, products of matrices read a float32 tensor in bfloat16 or float16, and the gradient that they give has
that type until autocast makes float32 of it.
"""

from __future__ import annotations

import torch
from torch import fx

_NAMES = (
    "addmm.default", "baddbmm.default", "bmm.default", "conv1d.default", "conv1d.padding", "conv2d.default",
    "conv2d.padding", "einsum.default", "linear.default", "matmul.default", "mm.default",
    "scaled_dot_product_attention.default",
)  # fmt: skip
PRODUCTS = frozenset(
    getattr(getattr(torch.ops.aten, name), kind) for name, kind in (each.split(".") for each in _NAMES)
)
"""Operators that autocast computes in its own type."""


def products_of(node: fx.Node) -> int:
    """Return how often products of matrices read what a node gives; 0 where anything else does, too."""
    read = list[fx.Node]()
    fx.map_arg([(user.args, user.kwargs) for user in node.users], read.append)
    return read.count(node) if all(user.target in PRODUCTS for user in node.users) else 0
