"""Divided: what ranks that divide a layer's parameters do on CPUs, where it takes more than the collective inside it.

Torch's ``fully_shard`` copies what it gathers out of one buffer and what it scatters into another, in memory that is
fresh every time, and waits for both; on GPUs that goes on beside computing. So a layer of a given size is gathered and
scattered here as in training: by ``fully_shard`` itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

PARAMETERS = 4
"""Of a layer: weights and biases of two modules."""


WIDTH = 256


class Computing:
    """Products of matrices."""

    def __init__(self) -> None:
        self._matrix = torch.full((WIDTH, WIDTH), 0.5)
        self._product = torch.empty_like(self._matrix)
        self(2)
        started = time.perf_counter()
        self(4)
        self._seconds = (time.perf_counter() - started) / 4

    def __call__(self, count: int) -> None:
        """Compute so many."""
        for _ in range(count):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def count(self, seconds: float) -> int:
        """Return how many last so long."""
        return round(seconds / self._seconds)


def gathering(size_bytes: int, group: dist.ProcessGroup) -> Callable[[], float]:
    """Return what gathers the parameters of a layer of so many bytes, lets go of them, and returns its seconds."""
    layer = _divided(size_bytes, group)

    def gather() -> float:
        started = time.perf_counter()
        layer.unshard()
        layer.reshard()
        return time.perf_counter() - started

    return gather


def scattering(size_bytes: int, group: dist.ProcessGroup) -> Callable[[], float]:
    """Return what reduces a layer's gradients, each rank to its part, and returns its seconds.

    They are those of a forward and a backward of a layer that computes nothing, less the making of the gradients: what
    ``fully_shard`` does around either is theirs, too.
    """
    layer = _divided(size_bytes, group)
    # Gathered once, the parameters stay.
    layer.set_reshard_after_backward(False)

    def scatter() -> float:
        made: list[float] = []
        started = time.perf_counter()
        layer(made).backward()
        seconds = time.perf_counter() - started - sum(made)
        for part in layer.parameters():
            part.grad = None
        return seconds

    return scatter


def _divided(size_bytes: int, group: dist.ProcessGroup) -> Any:  # noqa: ANN401
    # It takes most of a second to import, and GPUs need none of it.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))
    layer = fully_shard(_Layer(size_bytes, group.size()), mesh=mesh)
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    return layer


class _Layer(nn.Module):
    """Some parameters that computing takes no time with."""

    def __init__(self, size_bytes: int, ranks: int) -> None:
        super().__init__()
        part = -(-size_bytes // (4 * PARAMETERS * ranks))
        self.weights = nn.ParameterList(torch.zeros(ranks, part) for _ in range(PARAMETERS))

    def forward(self, made: list[float]) -> torch.Tensor:
        return _Gradients.apply(made, *self.weights)  # type: ignore[no-untyped-call, no-any-return]


class _Gradients(torch.autograd.Function):
    """Makes gradients of parameters, and notes its seconds."""

    @staticmethod
    def forward(ctx: Any, made: list[float], *weights: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.made, ctx.shapes = made, [weight.shape for weight in weights]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # noqa: ANN401
        started = time.perf_counter()
        gradients = tuple(torch.ones(shape) for shape in ctx.shapes)
        ctx.made.append(time.perf_counter() - started)
        return None, *gradients
