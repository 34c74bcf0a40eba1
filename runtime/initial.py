"""Initial weights: where they are from, and how they come into a folder that every rank reads its own from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from autopar.errors import FileError, UsageError
from autopar.runtime import weights
from autopar.runtime.seeds import seed_data

__all__ = ["given_names", "host_memory_bytes", "made_by_module", "write_made"]

_METHODS = ("reset_parameters", "_reset_parameters")


def host_memory_bytes() -> int:
    """Return the memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def given_names(module: nn.Module, folder: Path) -> dict[str, str]:
    """Return, for every parameter of a model and for buffers that are there, the name of its tensor in a folder.

    A parameter that the model has under several names may be there under any of them. Nothing is read but headers.

    Raises:
        FileError: a parameter is missing, or another shape or type is there.
    """
    held = weights.shapes(folder)
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {name: name for name, _ in module.named_buffers() if name in held}
    for name, parameter in module.named_parameters():
        known = [each for each in names[id(parameter)] if each in held]
        if not known:
            raise FileError(f"{folder}: holds no parameter {name!r} of the model")
        if held[known[0]] != (wanted := weights.shape_of(parameter)):
            raise FileError(f"{folder}: parameter {name!r} is {_text(held[known[0]])}, the model's is {_text(wanted)}")
        found[name] = known[0]
    return found


def _text(shape: tuple[tuple[int, ...], str]) -> str:
    return f"{shape[0]} {shape[1]}"


def write_made(module: nn.Module, seed: int, folder: Path) -> None:
    """Write initial weights of a model whose parameters have no values, a file a module, never holding two modules'.

    Raises:
        UsageError: as :func:`made_by_module`.
    """
    files = []
    for index, part in enumerate(chain([dict(module.named_buffers())], made_by_module(module, seed))):
        files.append(weights.write(folder / f"module-{index:05d}.safetensors", part, durable=False))
    weights.publish(folder, files)


def made_by_module(module: nn.Module, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Give the parameters of a model that has none values, one module after the other, and take them away again.

    A module makes its own by ``reset_parameters``, and by the model's ``_init_weights`` where it has one, as models of
    the Transformers library do; the generator is seeded with the module's name (docs/seeds.md).

    Raises:
        UsageError: a module has parameters, but nothing that makes their values.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    seen: set[int] = set()
    for path, part in module.named_modules():
        shapes = {name: value for name, value in part._parameters.items() if value is not None}
        new = {name: value for name, value in shapes.items() if id(value) not in seen}
        seen |= {id(value) for value in new.values()}
        if new:
            made = _made(module, path, part, shapes, seed)
            yield {names[id(value)]: made[name] for name, value in new.items()}
            del made


def _made(
    model: nn.Module, path: str, part: nn.Module, shapes: Mapping[str, nn.Parameter], seed: int
) -> dict[str, torch.Tensor]:
    """Return values for the parameters of one module."""
    makers = [getattr(part, name) for name in _METHODS if callable(getattr(part, name, None))]
    shared = getattr(model, "_init_weights", None)
    seed_data(seed, "initial", path)
    try:
        for name, shape in shapes.items():
            # What nobody makes is found by what it is filled with.
            filled = torch.full(shape.shape, float("nan"), dtype=shape.dtype)
            part._parameters[name] = nn.Parameter(filled, requires_grad=shape.requires_grad)
        with torch.no_grad():
            for make in makers:
                make()
            if callable(shared):
                shared(part)
        made = {name: part._parameters[name].detach() for name in shapes}  # type: ignore[union-attr]
    finally:
        part._parameters.update(shapes)
    left = [name for name, value in made.items() if value.isnan().any()]
    if left:
        where = f"{path}.{left[0]}" if path else left[0]
        raise UsageError(
            f"the model is larger than this host's memory, and nothing makes its parameter {where} by itself; give "
            f"{type(part).__name__} a reset_parameters(), or pass `weights`"
        )
    return made
