"""A model that a script holds already, with its batch and functions, in place of a model file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.capture.batch import named_tensors, rebuild, row_count
from autopar.capture.hooks import HOOKS, a, check_hook
from autopar.capture.source import UserModel
from autopar.errors import ModelError


def given_model(model: nn.Module, batch: object, **functions: Callable[..., Any] | None) -> UserModel:
    """Describe a model like a model file would: its data set are the rows of ``batch``.

    Args:
        model: the module; it is what ``build`` returns, always.
        batch: a mini-batch as a data loader gives it.
        functions: ``loss``, ``optimizer``, ``scheduler`` and ``layers``, those that are not None.

    Raises:
        ModelError: the batch holds something else than tensors, or tensors of different lengths; or a function cannot
            be called as it will be.
    """
    check_module(model)
    tensors = named_tensors(batch)

    def collate(rows: Sequence[int]) -> object:
        return rebuild(batch, {name: tensor[torch.tensor(rows)] for name, tensor in tensors.items()})

    path = Path(type(model).__name__)
    given = {
        name: check_hook(path, b"", name, function, HOOKS[name])
        for name, function in functions.items()
        if function is not None
    }
    data: dict[str, Callable[..., Any]] = {"dataset": lambda: range(row_count(tensors)), "collate": collate}
    return UserModel(path.name, path, structure_of(model), lambda: model, {**given, **data})


def check_module(model: object) -> None:
    """Refuse what is not a model.

    Raises:
        ModelError: it is something else; says what to pass.
    """
    if isinstance(model, nn.Module):
        return
    built = f": pass {model.__name__}(...)" if callable(model) and hasattr(model, "__name__") else ""
    raise ModelError(f"model is {a(model)}, where a torch.nn.Module is needed{built}")


def structure_of(model: nn.Module) -> str:
    """Return a hash of a model's modules and of the shapes and types of what they hold, its values apart."""
    lines = [f"{name} {type(module).__qualname__} {module.extra_repr()}" for name, module in model.named_modules()]
    held = [*model.named_parameters(), *model.named_buffers()]
    lines += [f"{name} {tuple(value.shape)} {value.dtype} {value.requires_grad}" for name, value in held]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
