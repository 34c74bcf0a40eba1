"""What an optimizer's step over a layer moves and keeps, found by stepping tiny parameters of the same shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from autopar.capture import Layer, UserModel
from autopar.profiler.kernels import KernelLog

__all__ = ["UpdateWork", "update_work"]

# Distinct, so that a dimension of the state tells which of the parameter's it is; too large to be taken for a constant.
_SIZES = (31, 37, 41, 43, 47, 53, 59, 61)


@dataclass(frozen=True)
class UpdateWork:
    """The optimizer's step over one layer."""

    state_bytes: int
    moved_bytes: int
    """Read and written by all kernels of a step."""


def update_work(user: UserModel, layer: Layer) -> UpdateWork:
    """Step the user's optimizer on tiny parameters, and scale what it keeps and moves to the layer's.

    State that has a parameter's shape, or some of its dimensions, grows with them; other state does not. Bytes moved
    are counted per parameter number, over the kernels of a step that is not the first.
    """
    trained = [parameter for parameter in layer.module.parameters() if parameter.requires_grad]
    if not trained:
        return UpdateWork(0, 0)
    small = [nn.Parameter(torch.full(_small(parameter.shape), 0.5, dtype=parameter.dtype)) for parameter in trained]
    optimizer = user.make_optimizer(small)
    for parameter in small:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    with KernelLog() as log:
        optimizer.step()
    state_bytes = sum(_state_bytes(optimizer, like, full.shape) for like, full in zip(small, trained, strict=True))
    numbers = sum(parameter.numel() for parameter in small)
    # Kernels over single numbers, such as a count of steps, do not grow with the parameters.
    moved = sum(k.read_bytes + k.written_bytes for k in log.kernels if k.read_bytes + k.written_bytes > 64)
    return UpdateWork(state_bytes, moved * sum(parameter.numel() for parameter in trained) // numbers)


def _small(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(_SIZES[index % len(_SIZES)] for index in range(len(shape)))


def _state_bytes(optimizer: torch.optim.Optimizer, small: nn.Parameter, shape: Sequence[int]) -> int:
    full = dict(zip(_small(shape), shape, strict=True))
    tensors: Iterable[object] = optimizer.state.get(small, {}).values()
    return sum(
        prod(full.get(size, size) for size in tensor.shape) * tensor.element_size()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    )
