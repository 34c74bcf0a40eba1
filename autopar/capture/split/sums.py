"""Sums: how tensors enter a region that is computed in parts, and leave it; and by what parts exchange them.

    Enter(sums)(x, (0, 1))      # x, with the sum of both parts' gradients
    Leave(sums)(y, (0, 1))      # the sum of both parts' y

Outside, every part has whole tensors, and whole gradients. A whole tensor that is read inside has of every part a
summand of its gradient: ``Enter`` sums them. What a region sums over has of every part a summand of its value:
``Leave`` sums those, and every part has the gradient of the whole. (Megatron-LM, Shoeybi et al. 2019, section 3: f and
g.)

Where the sequence is split outside, a part has a slice of every tensor, and of its gradient. Then a tensor is gathered
to enter, and reduce-scattered to leave: :class:`Move` does that, and what else brings parts together or apart.
(Korthikanti et al. 2022, section 4.2.2: g and g-bar.)

Where nothing but products of matrices reads what enters a region, and these are computed under autocast, parts exchange
it, and its gradient, in autocast's type and so in half the bytes: :func:`lowered`. The largest float16 is 65,504, and a
sum of some may be larger. So parts divide what they give by a power of two, for which no sum is too large, and multiply
what comes, in float32. Only numbers that are tiny for float16 lose digits by it: as if the loss were scaled by as much
less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from autopar.capture.split.rules import Ranges, take_ranges


class Sums(Protocol):
    """What the parts of a layer sum by, one after the other, all in the same order."""

    def sum(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
        """Return the sum of what these parts give here, of the same bits for each. The tensor stays as it is."""

    def gather(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        """Return what these parts give here, one behind the other along a dimension, in their order."""

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        """Return this part's slice of the sum of what these parts give; slices of a dimension are of one length."""


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


class Summand(NamedTuple):
    """A gradient of which parts have summands after a backward, to be added up by whoever runs it."""

    parts: tuple[int, ...]
    """Those that have some."""
    dim: int = 0
    indices: Ranges | None = None
    """Of that dimension of the part's own; others are complete. None: all are summands."""


class Enter(nn.Module):
    """Let a whole tensor into a region: itself forwards, the sum of its gradients backwards.

    Of a tensor of which only some pieces are whole, the gradients of those are summed.
    """

    def __init__(self, sums: Sums) -> None:
        super().__init__()
        self._sums = sums

    def forward(
        self,
        tensor: torch.Tensor,
        parts: tuple[int, ...],
        dim: int = 0,
        indices: Ranges | None = None,
        products: int = 0,
    ) -> torch.Tensor:
        """Return the tensor.

        Args:
            tensor: what enters.
            parts: those that read it.
            dim: of a dimension.
            indices: those that are whole, or all of it.
            products: how often products of matrices read it; 0 where something else does, too.
        """
        return _Enter.apply(tensor, lowered(self._sums, tensor, products), parts, dim, indices)  # type: ignore[no-untyped-call, no-any-return]


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


class Move(nn.Module):
    """Let a tensor be whole on every part, or in slices; its gradient goes the other way.

    ``gather`` makes a whole of slices, ``take`` a slice of a whole; ``reduce_scatter`` makes slices of parts' sum.

        Move(sums, 0, 2, "gather", "reduce_scatter")    # into a region, whose parts have summands of the gradient
        Move(sums, 0, 2, "reduce_scatter", "gather")    # out of a region, which gives summands
        Move(sums, 0, 2, "gather", "take")              # for operators that every part computes whole, alike
        Move(sums, 0, 2, "take", "gather")              # a slice of what every part has as a whole
    """

    def __init__(self, sums: Sums, index: int, count: int, forwards: str, backwards: str) -> None:
        super().__init__()
        self._slices, self._directions = _Slices(sums, index, count), (forwards, backwards)
        self.parts = tuple(range(count))
        """Those that have a slice each."""

    def forward(self, tensor: torch.Tensor, dim: int, period: int | None = None, products: int = 0) -> torch.Tensor:
        """Return the whole, or a slice of it.

        Args:
            tensor: a slice, or the whole.
            dim: which dimension slices are of.
            period: after how many indices of the whole those of a part come again; none: they come once.
            products: how often products of matrices read the whole; 0 where something else does, too.
        """
        return _Move.apply(tensor, self._slices.lowered(tensor, products), self._directions, dim, period)  # type: ignore[no-untyped-call, no-any-return]


class _Slices:
    """What is done with slices of a dimension, of which every part has one."""

    def __init__(self, sums: Sums, index: int, count: int) -> None:
        self._sums, self._index, self._count = sums, index, count

    def lowered(self, tensor: torch.Tensor, products: int) -> _Slices:
        """Return those that are exchanged in autocast's type, where products alone read the whole of a tensor."""
        return _Slices(lowered(self._sums, tensor, products), self._index, self._count)

    def act(self, action: str, tensor: torch.Tensor, dim: int, period: int | None) -> torch.Tensor:
        """Gather, take or reduce-scatter; memory has the dimensions in the order that it has them in."""
        if period is not None:
            own = period // self._count if action == "gather" else period
            rows = torch.ops.aten.unflatten.int(tensor, dim, (-1, own))
            return self.act(action, rows, dim + 1, None).flatten(dim, dim + 1)
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        ordered = tensor.detach().permute(order).contiguous()
        found = self._action(action)(ordered, order.index(dim), tuple(range(self._count)))
        return found.permute([order.index(place) for place in range(len(order))])

    def _action(self, name: str) -> Callable[[torch.Tensor, int, tuple[int, ...]], torch.Tensor]:
        return {"gather": self._sums.gather, "reduce_scatter": self._sums.reduce_scatter, "take": self._take}[name]

    def _take(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        length = tensor.shape[dim] // len(parts)
        return tensor.narrow(dim, self._index * length, length).clone(memory_format=torch.contiguous_format)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        tensor: torch.Tensor,
        slices: _Slices,
        directions: tuple[str, str],
        dim: int,
        period: int | None,
    ) -> torch.Tensor:
        ctx.slices, ctx.backwards, ctx.place = slices, directions[1], (dim, period)
        return slices.act(directions[0], tensor, dim, period)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:  # noqa: ANN401
        return ctx.slices.act(ctx.backwards, gradient, *ctx.place), None, None, None, None
