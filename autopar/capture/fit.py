"""Whether a model can be trained in a given memory, found out without holding it."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture.source import UserModel
from autopar.errors import AutoparError

__all__ = ["fits", "training_bytes"]

_PROBE = 64


def fits(user: UserModel, memory_bytes: int, seed: int = 0) -> bool:
    """Tell whether parameters, gradients, optimizer state and buffers take at most ``memory_bytes``.

    The model is built hollow for that. One whose constructor needs values of parameters is assumed to fit: there is no
    other way to build it.
    """
    try:
        return training_bytes(user, user.build(seed, hollow=True)) <= memory_bytes
    except AutoparError:
        return True


def training_bytes(user: UserModel, model: nn.Module) -> int:
    """Return the bytes of a model's parameters, their gradients, the optimizer's state and the buffers."""
    parameters = list(model.parameters())
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    held = sum(tensor.nbytes for tensor in (*parameters, *model.buffers()))
    return held + trained + round(trained * _state_share(user))


def _state_share(user: UserModel) -> float:
    """Return the bytes of optimizer state per byte of a parameter, found out with a small one."""
    probe = nn.Parameter(torch.zeros(_PROBE, _PROBE))
    optimizer = user.make_optimizer([probe])
    probe.grad = torch.zeros_like(probe)
    optimizer.step()
    state = optimizer.state[probe].values()
    return sum(value.nbytes for value in state if isinstance(value, torch.Tensor) and value.dim()) / probe.nbytes
