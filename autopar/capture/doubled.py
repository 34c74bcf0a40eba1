"""A user's model in float64: parameters, buffers and inputs are cast, so that rounding hides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from autopar.capture.batch import named_tensors, rebuild
from autopar.capture.source import UserModel

_DOUBLE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


def in_double(dtype: torch.dtype) -> torch.dtype:
    """Return the type of so many bits as float64 has; integers and truth values stay what they are.

    >>> in_double(torch.bfloat16), in_double(torch.complex64), in_double(torch.int32)
    (torch.float64, torch.complex128, torch.int32)
    """
    return _DOUBLE.get(dtype, dtype)


def doubled(user: UserModel) -> UserModel:
    """Return the same model file, whose ``model()`` and ``collate()`` give float64 where they gave floating numbers.

    Weights and data are made in the types that the user's code makes, so they have the values of ordinary training.
    """

    def model() -> object:
        made = user.factory()
        return made._apply(_cast) if isinstance(made, nn.Module) else made  # type: ignore[no-untyped-call]

    def collate(samples: Sequence[object]) -> object:
        batch = user.collate(samples)
        return rebuild(batch, {name: _cast(tensor) for name, tensor in named_tensors(batch).items()})

    return replace(user, factory=model, functions={**user.functions, "collate": collate})


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(in_double(tensor.dtype))
