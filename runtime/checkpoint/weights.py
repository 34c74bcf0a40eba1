"""Weights: parameters and buffers on disk, in safetensors, keyed by the model's own names.

A folder of weights holds several files and ``model.safetensors.index.json``, or ``model.safetensors`` alone (the layout
that other libraries read, too). Where there are both, the index counts. It has the size and the SHA-256 of every file,
which reading compares; those of other libraries have not. No reader ever loads more than what it asks for. The format
has no complex numbers of double precision: such a tensor is stored as its real and imaginary parts, one more dimension,
and the file's metadata name it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from autopar.errors import FileError
from autopar.formats.document import SHOWN, new_file, parse_json, read_text, write_text
from autopar.runtime.messages.transport import sendable

Shape = tuple[tuple[int, ...], str]
"""A tensor's shape, and its type as safetensors has it."""
Whole = Callable[[str], torch.Tensor | None]
_PAIRS = "complex128"
"""Under which a file's metadata list the tensors whose last dimension is real and imaginary part."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SAID: tuple[Literal["bytes"], Literal["sha256"]] = ("bytes", "sha256")
"""What the index says of every file."""
_MOST_TENSORS = 1_000_000
_LONGEST_NAME = 200
"""Letters of a file's name."""
ATTEMPTS = 100
"""How often a set is read that another process replaces meanwhile."""
_Value = TypeVar("_Value")


class StoredFile(TypedDict):
    """A file of weights, as an index describes it."""

    name: str
    bytes: int
    sha256: str
    tensors: list[str]
    """Names of what it holds."""


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    whole: Whole = lambda name: None,
    *,
    durable: bool = True,
    hashed: bool = True,
) -> StoredFile:
    """Write one safetensors file, tensor after tensor; it is there whole, or not at all.

    Args:
        path: where.
        tensors: by name; of a divided one, its shape and type count.
        whole: called once with every name, in order and whatever fails, before its tensor is written; returns what is
            written in the tensor's place, if that is another.
        durable: whether the file is to outlive a loss of power.
        hashed: whether its SHA-256 is wanted; else that is of nothing.

    Raises:
        FileError: the file cannot be written.
    """
    values = (tensor if (found := whole(name)) is None else found for name, tensor in tensors.items())
    digest, size = hashlib.sha256(), 0
    try:
        with new_file(path, durable=durable) as file:
            for part in chain([memoryview(_header(tensors))], map(_bytes, values)):
                file.write(part)
                if hashed:
                    digest.update(part)
                size += len(part)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        deque(values, 0)
    return StoredFile(name=path.name, bytes=size, sha256=digest.hexdigest(), tensors=sorted(tensors))


def _bytes(value: torch.Tensor) -> memoryview:
    # As bytes, not elements: NumPy does not know all types.
    found: memoryview = sendable(value.detach().cpu()).reshape(-1).view(torch.uint8).numpy().data
    return found


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the beginning of a safetensors file: the length of a text, and the text: what is where behind it."""
    content: dict[str, object] = {}
    end = 0
    pairs = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    if pairs:
        content["__metadata__"] = {_PAIRS: json.dumps(pairs)}
    for name, tensor in tensors.items():
        shape, kind = shape_of(tensor)
        if tensor.dtype == torch.complex128:
            shape, kind = (*shape, 2), "F64"
        begin, end = end, end + tensor.numel() * tensor.element_size()
        content[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def publish(folder: Path, files: Iterable[StoredFile]) -> None:
    """Make files that were written into a folder its set of weights.

    Whoever reads the folder finds the set before or this one, whole: it changes as the index is renamed. Then what the
    index before named is removed, and a file that other libraries would read in place of the index.

    Raises:
        FileError: the index cannot be written; the set is that before.
    """
    stored = {file["name"]: file for file in files}
    before = indexed_file_names(folder)
    content = {
        "metadata": {"files": {name: {key: file[key] for key in _SAID} for name, file in sorted(stored.items())}},
        "weight_map": dict(sorted((tensor, name) for name, file in stored.items() for tensor in file["tensors"])),
    }
    write_text(folder / INDEX, json.dumps(content, indent=1) + "\n")
    for name in {*before, SINGLE} - stored.keys():
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def indexed_file_names(folder: Path) -> set[str]:
    """Return the files of weights that a folder's index names; none where there is none that can be read."""
    try:
        return {file.path.name for file in _read_index(folder / INDEX) if file.path.suffix == ".safetensors"}
    except FileError:
        return set()


def read(folder: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read the named tensors of a folder; names that it does not hold are left out.

    Raises:
        FileError: the folder holds no weights, or a file is damaged, or is not the one that the index describes.
    """
    wanted = set(names)

    def tensors(file: _File) -> dict[str, torch.Tensor]:
        if file.tensors is not None and wanted.isdisjoint(file.tensors):
            return {}
        with _open(file) as opened:
            return {name: opened.read(name) for name in sorted(wanted & opened.names)}

    return _of_all(folder, tensors)


class TensorFile:
    """An open file of tensors, of which parts are read."""

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            FileError: it is no safetensors file.
        """
        self._path, self._stack = path, contextlib.ExitStack()
        with _errors_of(path):
            self._handle = self._stack.enter_context(safe_open(path, framework="pt"))
        self.names = frozenset(self._handle.keys())
        found = parse_json((self._handle.metadata() or {}).get(_PAIRS, "[]"), path)
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise FileError(f"{path}: __metadata__.{_PAIRS}: expected a list of names of tensors")
        self._pairs = set(found)

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return a tensor, or of every dimension a slice.

        Raises:
            FileError: the file does not hold it.
        """
        with _errors_of(self._path):
            handle = self._handle
            tensor: torch.Tensor = handle.get_slice(name)[part] if part else handle.get_tensor(name)
        if not tensor.is_complex() and name not in self._pairs:
            return tensor
        # It lies where the file has it; kernels expect a complex number at a multiple of its size.
        reals = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return torch.view_as_complex(reals.clone())

    def shape(self, name: str) -> Shape:
        """Return shape and type of a tensor, as :func:`shapes` does."""
        with _errors_of(self._path):
            part = self._handle.get_slice(name)
            shape = tuple(part.get_shape())
            return (shape[:-1], "C128") if name in self._pairs else (shape, part.get_dtype())

    def close(self) -> None:
        """Close the file."""
        self._stack.close()


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise FileError(f"cannot read weights {path}: {error}") from error


def shapes(folder: Path) -> dict[str, Shape]:
    """Return shape and type of all tensors of a folder; none of them is read.

    Raises:
        FileError: as :func:`read`.
    """

    def file_shapes(file: _File) -> dict[str, Shape]:
        with _open(file) as opened:
            return {name: opened.shape(name) for name in opened.names}

    return _of_all(folder, file_shapes)


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


class _File(NamedTuple):
    """A file of a folder's set."""

    path: Path
    tensors: frozenset[str] | None
    """Names of what it holds, where an index says so."""
    size: int | None = None
    sha256: str | None = None


def _of_all(folder: Path, of_file: Callable[[_File], dict[str, _Value]]) -> dict[str, _Value]:
    """Join what is found in all files of a folder's set; of the one that replaces it, if it is replaced meanwhile."""
    for attempt in range(ATTEMPTS):
        files = _files(folder)
        try:
            return {name: value for file in files for name, value in of_file(file).items()}
        except FileError:
            if attempt + 1 == ATTEMPTS or _files(folder) == files:
                raise
    raise AssertionError("the last attempt returns or raises")


def _files(folder: Path) -> list[_File]:
    index = folder / INDEX
    if os.path.lexists(index):
        return _read_index(index)
    if not os.path.lexists(folder / SINGLE):
        raise FileError(f"{folder}: holds neither {SINGLE} nor {INDEX}")
    return [_File(folder / SINGLE, None)]


def _read_index(index: Path) -> list[_File]:
    """Return the files that an index names, and what it says of them."""
    # A mixture of experts has tens of thousands of tensors.
    content = parse_json(read_text(index, "index of weights"), index, _MOST_TENSORS)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(places, dict):
        raise FileError(f"{index}: $.weight_map: expected an object of tensor names and file names")
    held: dict[str, list[str]] = {}
    for name, file in places.items():
        if not isinstance(file, str) or not _is_plain(file):
            raise FileError(f"{index}: $.weight_map.{name[:SHOWN]}: expected the name of a file in the same folder")
        held.setdefault(file, []).append(name)
    metadata = content.get("metadata")
    known = metadata.get("files", {}) if isinstance(metadata, dict) else {}
    return [_indexed_file(index, file, names, known) for file, names in held.items()]


def _is_plain(name: str) -> bool:
    """Tell whether a file of the same folder may be called so."""
    return 0 < len(name) < _LONGEST_NAME and name.isprintable() and Path(name).name == name


def _indexed_file(index: Path, file: str, names: Sequence[str], descriptions: object) -> _File:
    said = descriptions.get(file) if isinstance(descriptions, dict) else None
    size, sha256 = (said.get("bytes"), said.get("sha256")) if isinstance(said, dict) else (None, None)
    sound = size is None or (type(size) is int and 0 <= size < 2**63)
    if not sound or not (sha256 is None or (isinstance(sha256, str) and len(sha256) == 64)):
        raise FileError(f"{index}: $.metadata.files.{file}: expected a number of bytes and a sha256")
    return _File(index.with_name(file), frozenset(names), size, sha256)


@contextmanager
def _open(file: _File) -> Iterator[TensorFile]:
    check(file.path, file.size, file.sha256, INDEX)
    with contextlib.closing(TensorFile(file.path)) as opened:
        yield opened


def check(path: Path, size: int | None, sha256: str | None, said_by: str, *, anew: bool = False) -> None:
    """Refuse what is no file, or not the one that is described, as far as it is.

    With ``anew``, its bytes are read though this process has read a file of this size and time here before.

    Raises:
        FileError: it is another one, or cannot be read; names it.
    """
    with _errors_of(path):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise FileError(f"cannot read weights {path}: not a regular file")
        if size is not None and status.st_size != size:
            raise FileError(f"{path}: has {status.st_size} bytes, {said_by} says {size}: it is damaged, or another")
        state = status.st_ino, status.st_size, status.st_mtime_ns
        if sha256 is not None and sha256 != (_digest(path) if anew else _known_digest(path, *state)):
            raise FileError(f"{path}: its sha256 is not the one that {said_by} says: it is damaged, or another")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=4096)
def _known_digest(path: Path, inode: int, size: int, changed_ns: int) -> str:
    """Return a file's SHA-256; once for each state of the file that this process meets."""
    return _digest(path)
