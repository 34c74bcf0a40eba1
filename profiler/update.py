"""The optimizer's step over one layer's parameters: its time, and the bytes of its state."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from autopar.capture import Layer, UserModel

__all__ = ["measure_update"]

WARM_UP, REPEATS = 2, 7


def measure_update(model: UserModel, layer: Layer, device: torch.device) -> tuple[int, float]:
    """Return the optimizer's state in bytes and the seconds of one step, on copies of the layer's parameters."""
    trained = [parameter for parameter in layer.module.parameters() if parameter.requires_grad]
    if not trained:
        return 0, 0.0
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in trained]
    optimizer = model.make_optimizer(copies)
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-3)
    times = []
    for _ in range(WARM_UP + REPEATS):
        _wait(device)
        started = time.perf_counter()
        optimizer.step()
        _wait(device)
        times.append(time.perf_counter() - started)
    held: dict[int, int] = {}
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(held.values()), statistics.median(times[WARM_UP:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
