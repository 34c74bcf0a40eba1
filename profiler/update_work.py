"""What an optimizer's step over a layer moves, found by stepping tiny parameters."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture import UserModel
from autopar.capture.source import NamedParameters
from autopar.profiler.kernels import KernelLog
from autopar.profiler.optimizer_memory import work_at_once

_NUMBERS = 4096
# Kernels that move less than this are over a count of steps, which does not grow with the parameters.
_COUNT_BYTES = 64


def moved_per_number(user: UserModel, parameters: NamedParameters) -> float:
    """Return the bytes that the user's optimizer reads and writes per number in the trained ones of parameters.

    Counted over the kernels of its second step, on parameters with as many dimensions; as on CUDA, torch's own
    optimizers work on many of them at once unless told otherwise.
    """
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    if not trained:
        return 0.0
    small = [nn.Parameter(torch.full(_shape(each.dim()), 0.5, dtype=each.dtype)) for _, each in trained]
    optimizer = user.make_optimizer([(name, each) for (name, _), each in zip(trained, small, strict=True)])
    work_at_once(optimizer)
    for parameter in small:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    with KernelLog() as log:
        optimizer.step()
    moved = [kernel.read_bytes + kernel.written_bytes for kernel in log.kernels]
    numbers = sum(parameter.numel() for parameter in small)
    return float(sum(size for size in moved if size > _COUNT_BYTES) / numbers)


def _shape(dimensions: int) -> tuple[int, ...]:
    """Return a shape of about as many numbers whatever its dimensions.

    >>> _shape(1), _shape(2), _shape(4)
    ((4096,), (64, 64), (8, 8, 8, 8))
    """
    return (round(_NUMBERS ** (1 / dimensions)),) * dimensions if dimensions else ()
