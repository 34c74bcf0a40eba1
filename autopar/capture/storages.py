"""The bytes of all storages that are alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["StorageTracker"]


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every storage made while it is active, until it is freed.

    Fake tensors count as real ones do, if parameters and inputs are fake as well.

    >>> with StorageTracker() as tracker:
    ...     a = torch.ones(4)
    ...     b = a.exp()
    ...     del a
    ...     c = b.exp().exp()
    >>> tracker.peak_bytes, tracker.alive_bytes
    (48, 32)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive_bytes = self.peak_bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        given = {_identity(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if _identity(tensor) not in given:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.alive_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.alive_bytes -= size


def _identity(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
