"""Weights: parameters and buffers on disk, in safetensors, keyed by the model's own names.

A folder of weights holds ``model.safetensors``, or several files and ``model.safetensors.index.json`` (the layout that
other libraries read, too). No reader ever loads more than what it asks for. The format has no complex numbers of double
precision: such a tensor is stored as its real and imaginary parts, one more dimension, and the file's metadata name it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from autopar.errors import FileError
from autopar.formats.document import parse_json, write_text
from autopar.runtime.transport import sendable

__all__ = ["Shape", "names", "read", "shape_of", "shapes", "write", "write_index"]

Shape = tuple[tuple[int, ...], str]
"""A tensor's shape, and its type as safetensors has it."""
Whole = Callable[[str], torch.Tensor | None]
PAIRS = "complex128"
"""Under which a file's metadata list the tensors whose last dimension is real and imaginary part."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write(path: Path, tensors: Mapping[str, torch.Tensor], whole: Whole = lambda name: None) -> None:
    """Write one safetensors file, tensor after tensor.

    Args:
        path: where.
        tensors: by name; of a divided one, its shape and type count.
        whole: called once with every name, in order and whatever fails, before its tensor is written; returns what is
            written in the tensor's place, if that is another.

    Raises:
        FileError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.part")
    values = (tensor if (found := whole(name)) is None else found for name, tensor in tensors.items())
    try:
        with temporary.open("wb") as file:
            file.write(_header(tensors))
            for value in values:
                # As bytes, not elements: NumPy does not know all types.
                file.write(sendable(value.detach().cpu()).reshape(-1).view(torch.uint8).numpy().data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise FileError(f"cannot write {path}: {error}") from error
    finally:
        for _ in values:
            pass


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the beginning of a safetensors file: the length of a text, and the text: what is where behind it."""
    content: dict[str, object] = {}
    end = 0
    pairs = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    if pairs:
        content["__metadata__"] = {PAIRS: json.dumps(pairs)}
    for name, tensor in tensors.items():
        shape, kind = shape_of(tensor)
        if tensor.dtype == torch.complex128:
            shape, kind = (*shape, 2), "F64"
        begin, end = end, end + tensor.numel() * tensor.element_size()
        content[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


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
            pairs = _pairs(file)
            for name in sorted(wanted.intersection(file.keys())):
                tensor = file.get_tensor(name)
                if tensor.is_complex() or name in pairs:
                    # It lies where the file has it; kernels expect a complex number at a multiple of its size.
                    reals = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                    tensor = torch.view_as_complex(reals.clone())
                found[name] = tensor
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
            pairs = _pairs(file)
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                shape = tuple(part.get_shape())
                found[name] = (shape[:-1], "C128") if name in pairs else (shape, part.get_dtype())
    return found


def shape_of(tensor: torch.Tensor) -> Shape:
    """Return shape and type of a tensor, as :func:`shapes` does.

    >>> shape_of(torch.zeros(2, 3, dtype=torch.bfloat16)), shape_of(torch.zeros((), dtype=torch.int64))
    (((2, 3), 'BF16'), ((), 'I64'))
    """
    name = str(tensor.dtype).removeprefix("torch.")
    for kind, short in (("bfloat", "BF"), ("float", "F"), ("uint", "U"), ("int", "I"), ("complex", "C")):
        if name.startswith(kind):
            return tuple(tensor.shape), short + name.removeprefix(kind).removesuffix("fn").upper()
    return tuple(tensor.shape), name.upper()


def _pairs(file: Any) -> set[str]:  # noqa: ANN401
    """Return the tensors of a file that stand for complex numbers of double precision."""
    return set(json.loads((file.metadata() or {}).get(PAIRS, "[]")))


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
