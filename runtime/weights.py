"""Weights: parameters and buffers on disk, in safetensors, keyed by the model's own names.

A folder of weights holds ``model.safetensors``, or several files and ``model.safetensors.index.json`` (the layout that
other libraries read, too). No reader ever loads more than what it asks for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from autopar.errors import FileError
from autopar.formats.document import parse_json, write_text

__all__ = ["Shape", "names", "read", "shape_of", "shapes", "write", "write_index"]

Shape = tuple[tuple[int, ...], str]
"""A tensor's shape, and its type as safetensors has it."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one safetensors file.

    Raises:
        FileError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        save_file(_apart(tensors), temporary)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise FileError(f"cannot write {path}: {error}") from error


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give every tensor a storage of its own, as the format asks; copy only those that have none."""
    apart: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        held = tensor.detach().cpu().contiguous()
        storage = held.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != held.nbytes:
            held = held.clone()
        storages.add(held.untyped_storage().data_ptr())
        apart[name] = held
    return apart


def write_index(folder: Path, files: Mapping[str, Iterable[str]]) -> None:
    """Write the index of a folder: file name -> names of the tensors it holds."""
    places = {name: file for file, names in sorted(files.items()) for name in names}
    content = {"metadata": {}, "weight_map": dict(sorted(places.items()))}
    write_text(folder / INDEX, json.dumps(content, indent=1) + "\n")


def read(folder: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read the named tensors of a folder; names that it does not hold are left out.

    Raises:
        FileError: the folder holds no weights, or a file is damaged.
    """
    wanted = set(names)
    found: dict[str, torch.Tensor] = {}
    for path, held in _files(folder).items():
        if held is not None and wanted.isdisjoint(held):
            continue
        with _opened(path) as file:
            for name in sorted(wanted.intersection(file.keys())):
                found[name] = file.get_tensor(name)
    return found


def names(folder: Path) -> set[str]:
    """Return the names of all tensors of a folder.

    Raises:
        FileError: as :func:`read`.
    """
    found: set[str] = set()
    for path in _files(folder):
        with _opened(path) as file:
            found.update(file.keys())
    return found


def shapes(folder: Path) -> dict[str, Shape]:
    """Return shape and type of all tensors of a folder; none of them is read.

    Raises:
        FileError: as :func:`read`.
    """
    found: dict[str, Shape] = {}
    for path in _files(folder):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = tuple(part.get_shape()), part.get_dtype()
    return found


def shape_of(tensor: torch.Tensor) -> Shape:
    """Return shape and type of a tensor, as :func:`shapes` does.

    >>> shape_of(torch.zeros(2, 3, dtype=torch.bfloat16)), shape_of(torch.zeros((), dtype=torch.int64))
    (((2, 3), 'BF16'), ((), 'I64'))
    """
    name = str(tensor.dtype).removeprefix("torch.")
    for kind, short in (("bfloat", "BF"), ("float", "F"), ("uint", "U"), ("int", "I")):
        if name.startswith(kind):
            return tuple(tensor.shape), short + name.removeprefix(kind).upper()
    return tuple(tensor.shape), name.upper()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise FileError(f"cannot read weights {path}: {error}") from error


def _files(folder: Path) -> dict[Path, set[str] | None]:
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    index = folder / INDEX
    if not index.is_file():
        raise FileError(f"{folder}: holds neither {SINGLE} nor {INDEX}")
    content = parse_json(index.read_text(encoding="utf-8"), index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict):
        raise FileError(f"{index}: $.weight_map: expected an object of tensor names and file names")
    files: dict[Path, set[str] | None] = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise FileError(f"{index}: $.weight_map.{name}: expected the name of a file in the same folder")
        held = files.setdefault(folder / file, set())
        assert held is not None
        held.add(name)
    return files
