"""Python state: values outside of tensors that a forward reaches, as they are at a moment, by path.

``M.state['n']`` is in an attribute of the model M, ``closure variable n of loss`` in a function, ``global COUNT of
model.py`` in a file of the user's own. Values are compared by structure, never by ``==``, which may be costly, raise,
or give no truth value. Globals of installed packages are not looked at, nor what C extensions keep.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy
import torch
from torch import nn

from autopar.capture.reached import Path, parts_of
from autopar.capture.restore import restorers

Roots = Mapping[Path, object]
"""Where walks begin: a model and its loss, by the names that paths are to begin with."""

MOST_OBJECTS = 200_000
"""A walk ends there; nearer objects come first."""
SHORT = 32
"""Longer containers of numbers and texts are compared as one."""
LARGEST_ARRAY_BYTES = 2**26
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...))
_SHOWN = (itertools.count, itertools.repeat, range, slice, torch.dtype, torch.device, numpy.generic)


@dataclass(eq=False)
class Snapshot:
    """What roots reached."""

    values: dict[Path, list[object]] = field(default_factory=dict)
    """Something that is equal as long as the value is the same; closures of one name have one path."""
    tensors: dict[Path, list[tuple[torch.Tensor, int]]] = field(default_factory=dict)
    """With how often they had been written."""
    restorers: list[Callable[[], None]] = field(default_factory=list)

    def restore(self) -> None:
        """Put back the values that are kept; iterators stay where they are."""
        for put_back in self.restorers:
            put_back()


def roots_of(model: nn.Module, loss: Callable[..., Any] | None) -> dict[Path, object]:
    """Return where the walk through a model's and its loss's state begins."""
    return {Path(type(model).__name__): model} | ({} if loss is None else {Path("loss"): loss})


def snapshot(roots: Roots, kept: Callable[[Path], bool] = lambda path: False) -> Snapshot:
    """Note the state that the roots reach; that of paths that are ``kept`` can be restored."""
    found = Snapshot()
    for path, value, before in _walk(roots):
        if isinstance(value, torch.Tensor):
            found.tensors.setdefault(path, []).append((value, 0 if value.is_inference() else value._version))
        else:
            token = _token(value) if before is None else ("same", before)
            found.values.setdefault(path, []).append(token)
        if before is None and not isinstance(value, _ATOMS) and kept(path):
            with contextlib.suppress(Exception):
                found.restorers.extend(restorers(value))
    return found


def tensors_reached(roots: Roots) -> list[tuple[Path, torch.Tensor]]:
    """Return the tensors that the roots reach, but for parameters and buffers where modules register them."""
    return [(path, value) for path, value, _ in _walk(roots) if isinstance(value, torch.Tensor)]


def contents(value: object) -> dict[Path, list[object]]:
    """Return something that is equal for values, such as samples of data, that hold the same."""
    found: dict[Path, list[object]] = {}
    for path, part, before in _walk({Path(""): value}):
        tensor = isinstance(part, torch.Tensor) and part.layout is torch.strided
        token = _tensor_token(part) if tensor else _token(part) if before is None else ("same", before)
        found.setdefault(path, []).append(token)
    return found


def _tensor_token(value: Any) -> object:  # noqa: ANN401
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return value.shape, value.dtype, zlib.crc32(flat.numpy().tobytes())


@contextlib.contextmanager
def preserved(roots: Roots, ignored: tuple[str, ...]) -> Iterator[Snapshot]:
    """Put the state that the roots reach back at the end of the block, but for what is ignored: the user's logs."""
    before = snapshot(roots, lambda path: not path.named_by(ignored))
    try:
        yield before
    finally:
        before.restore()


def _walk(roots: Roots) -> Iterator[tuple[Path, object, Path | None]]:
    """Yield everything that the roots reach, nearest first, and the path where it has been yielded before."""
    first: dict[int, Path] = {}
    # Held to the end, for the address of a value that is gone may be another's.
    held: list[object] = []
    waiting: deque[tuple[Path, object]] = deque(roots.items())
    while waiting and len(held) < MOST_OBJECTS:
        path, value = waiting.popleft()
        held.append(value)
        if isinstance(value, (*_ATOMS, torch.Tensor)):
            yield path, value, None
        elif id(value) in first:
            yield path, value, first[id(value)]
        else:
            first[id(value)] = path
            yield path, value, None
            # An object may raise whatever it likes when it is asked for an attribute: then it stays closed.
            with contextlib.suppress(Exception):
                waiting.extend([] if _is_plain(value) else list(parts_of(path, value)))


def differences(before: Snapshot, after: Snapshot) -> dict[Path, str]:
    """Return the paths whose values differ, and how.

    Of a value that is there before and after, and of what it holds, the innermost path is named; of one that is there
    only once, the outermost.
    """
    one, other = before.values, after.values
    differing = [path for path in one | other if one.get(path) != other.get(path)]
    differing += _moved(before, after)
    lasting = {path for path in differing if path in one and path in other}
    holders, every = {holder for path in lasting for holder in path.holders()}, set(differing)
    kept = [
        path for path in differing if (path not in holders if path in lasting else every.isdisjoint(path.holders()))
    ]
    return {path: _change(one.get(path, []), other.get(path, [])) for path in kept}


def _moved(before: Snapshot, after: Snapshot) -> list[Path]:
    """Return the paths of tensors that were at other paths before; new tensors are no state until one is read."""
    known = {id(tensor) for tensors in before.tensors.values() for tensor, _ in tensors}
    found = []
    for path in before.tensors.keys() & after.tensors.keys():
        pairs = zip(before.tensors[path], after.tensors[path], strict=False)
        if any(one is not other and id(other) in known for (one, _), (other, _) in pairs):
            found.append(path)
    return sorted(found, key=str)


def _change(before: list[object], after: list[object]) -> str:
    for pair in zip(before, after, strict=False):
        shown = [token[1] for token in pair if isinstance(token, tuple) and token[0] in _ATOMS]
        if len(shown) == 2 and pair[0] != pair[1]:
            return f"changes from {shown[0]:.40} to {shown[1]:.40}"
    return "changes"


def _is_plain(value: object) -> bool:
    """Tell whether a container is long, and holds numbers and texts only."""
    if not isinstance(value, (list, tuple, set, frozenset, dict, deque)) or len(value) <= SHORT:
        return False
    items: Iterator[object] = itertools.chain(value, value.values()) if isinstance(value, dict) else iter(value)
    return set(map(type, items)).issubset(_ATOMS)


def _token(value: Any) -> object:  # noqa: ANN401
    kind = type(value).__qualname__
    if isinstance(value, _ATOMS):
        return type(value), repr(value)
    if _is_plain(value) or isinstance(value, bytearray):
        return kind, len(value), zlib.crc32(repr(value).encode("utf-8", "replace"))
    if isinstance(value, dict):
        return kind, tuple(_key(key) for key in value)
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(_key(item) for item in value), len(value)
    if isinstance(value, (list, tuple, deque)):
        return kind, len(value)
    if isinstance(value, numpy.ndarray) and value.dtype != object and value.nbytes <= LARGEST_ARRAY_BYTES:
        return kind, value.shape, str(value.dtype), zlib.crc32(numpy.ascontiguousarray(value).tobytes())
    if isinstance(value, torch.Generator):
        return kind, zlib.crc32(value.get_state().numpy().tobytes())
    if isinstance(value, _SHOWN):
        return kind, repr(value)
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        line = value.__code__.co_firstlineno if isinstance(value, FunctionType) else None
        return kind, value.__module__, value.__qualname__, line
    if isinstance(value, nn.Module):
        # Modules that are alike have other parameters.
        return kind, id(value), tuple(map(id, value._parameters.values()))
    return kind, None


def _key(key: object) -> object:
    return (type(key), repr(key)) if isinstance(key, _ATOMS) else type(key).__qualname__
