"""A model that a script holds already, with its batch and functions, in place of a model file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.capture.batch import named_tensors, rebuild, row_count
from autopar.capture.source import UserModel

__all__ = ["given_model", "structure_of"]


def given_model(model: nn.Module, batch: object, **functions: Callable[..., Any] | None) -> UserModel:
    """Describe a model like a model file would: its data set are the rows of ``batch``.

    Args:
        model: the module; it is what ``build`` returns, always.
        batch: a mini-batch as a data loader gives it.
        functions: ``loss``, ``optimizer``, ``scheduler`` and ``layers``, those that are not None.

    Raises:
        ModelError: the batch holds something else than tensors, or tensors of different lengths.
    """
    tensors = named_tensors(batch)

    def collate(rows: Sequence[int]) -> object:
        return rebuild(batch, {name: tensor[torch.tensor(rows)] for name, tensor in tensors.items()})

    given = {name: function for name, function in functions.items() if function is not None}
    data: dict[str, Callable[..., Any]] = {"dataset": lambda: range(row_count(tensors)), "collate": collate}
    name = type(model).__name__
    return UserModel(name, Path(name), structure_of(model), lambda: model, {**given, **data})


def structure_of(model: nn.Module) -> str:
    """Return a hash of a model's modules and of the shapes and types of what they hold, its values apart."""
    lines = [f"{name} {type(module).__qualname__} {module.extra_repr()}" for name, module in model.named_modules()]
    held = [*model.named_parameters(), *model.named_buffers()]
    lines += [f"{name} {tuple(value.shape)} {value.dtype} {value.requires_grad}" for name, value in held]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
