"""Where tensors enter a region that is computed in parts, and where they leave it.

Outside, every part has whole tensors, and whole gradients. A whole tensor that is read inside has of every part a
summand of its gradient: ``Enter`` sums them. What a region sums over has of every part a summand of its value:
``Leave`` sums those, and every part has the gradient of the whole. (Megatron-LM, Shoeybi et al. 2019, section 3: f and
g.)
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from autopar.capture.split.rules import Ranges, take_ranges


class Sums(Protocol):
    """What the parts of a layer sum by, one after the other, all in the same order."""

    def sum(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
        """Return the sum of what these parts give here, of the same bits for each. The tensor stays as it is."""


class Enter(nn.Module):
    """Let a whole tensor into a region: itself forwards, the sum of its gradients backwards.

    Of a tensor of which only some pieces are whole, the gradients of those are summed.
    """

    def __init__(self, sums: Sums) -> None:
        super().__init__()
        self._sums = sums

    def forward(
        self, tensor: torch.Tensor, parts: tuple[int, ...], dim: int = 0, indices: Ranges | None = None
    ) -> torch.Tensor:
        """Return the tensor; ``indices`` of a dimension are whole, or all of it."""
        return _Enter.apply(tensor, self._sums, parts, dim, indices)  # type: ignore[no-untyped-call, no-any-return]


class Leave(nn.Module):
    """Let what parts give out of a region: its sum forwards, the gradient itself backwards."""

    def __init__(self, sums: Sums) -> None:
        super().__init__()
        self._sums = sums

    def forward(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
        """Return the sum over parts."""
        return _Leave.apply(tensor, self._sums, parts)  # type: ignore[no-untyped-call, no-any-return]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        tensor: torch.Tensor,
        sums: Sums,
        parts: tuple[int, ...],
        dim: int,
        indices: Ranges | None,
    ) -> torch.Tensor:
        ctx.sums, ctx.parts, ctx.place = sums, parts, (dim, indices)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:  # noqa: ANN401
        dim, indices = ctx.place
        if indices is None:
            return ctx.sums.sum(gradient, ctx.parts), None, None, None, None
        total = ctx.sums.sum(take_ranges(gradient, dim, indices), ctx.parts)
        return _put_ranges(gradient, dim, indices, total), None, None, None, None


def _put_ranges(tensor: torch.Tensor, dim: int, indices: Ranges, by: torch.Tensor) -> torch.Tensor:
    """Return a tensor with other entries at some indices."""
    found, start = tensor.clone(), 0
    for first, end in indices:
        found.narrow(dim, first, end - first).copy_(by.narrow(dim, start, end - first))
        start += end - first
    return found


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sums: Sums, parts: tuple[int, ...]) -> torch.Tensor:  # noqa: ANN401
        return sums.sum(tensor, parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401
        return gradient, None, None
