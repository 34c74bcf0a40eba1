"""Sums in the type that autocast computes in, of what it computes in that type and hands on in float32.

Under autocast, products of matrices read a float32 tensor in bfloat16 or float16, and the gradient that they give has
that type until autocast makes float32 of it. Where nothing but products reads what enters a region, parts exchange both
in that type, in half the bytes:

    lowered(sums, tensor, 3).sum(gradient, (0, 1))    # float32 in and out, of a tensor that three products read

The largest float16 is 65,504, and a sum of some may be larger. So parts divide what they give by a power of two, for
which no sum is too large, and multiply what comes, in float32. Only numbers that are tiny for float16 lose digits by
it: as if the loss were scaled by as much less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

if TYPE_CHECKING:
    from autopar.capture.split.sums import Sums

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


def lowered(sums: Sums, tensor: torch.Tensor, products: int) -> Sums:
    """Return sums among parts of what products read, and of its gradients: in autocast's type, where that is on.

    Args:
        sums: those in the type of what they are given.
        tensor: what enters.
        products: how often products read it; 0 where something else does, too.
    """
    device = tensor.device.type
    if not products or tensor.dtype != torch.float32 or not torch.is_autocast_enabled(device):
        return sums
    return _LoweredSums(sums, torch.get_autocast_dtype(device), products)


class _LoweredSums:
    """Gives and takes float32, which parts exchange in another type."""

    def __init__(self, sums: Sums, dtype: torch.dtype, products: int) -> None:
        self._sums, self._dtype, self._products = sums, dtype, products

    def sum(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
        scale = self._scale(parts)
        return _widen(self._sums.sum(self._narrow(tensor, scale), parts), tensor, scale)

    def gather(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        return _widen(self._sums.gather(self._narrow(tensor, 1), dim, parts), tensor, 1)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        scale = self._scale(parts)
        return _widen(self._sums.reduce_scatter(self._narrow(tensor, scale), dim, parts), tensor, scale)

    def _scale(self, parts: tuple[int, ...]) -> int:
        """Return a power of two for which the sum of what parts have of all products is not too large."""
        return 1 if self._dtype == torch.bfloat16 else 2 ** (len(parts) * self._products - 1).bit_length()

    def _narrow(self, tensor: torch.Tensor, scale: int) -> torch.Tensor:
        return (tensor if scale == 1 else tensor / scale).to(self._dtype)


def _widen(found: torch.Tensor, given: torch.Tensor, scale: int) -> torch.Tensor:
    wide = found.to(given.dtype)
    return wide if scale == 1 else wide * scale
