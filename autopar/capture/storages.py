"""The bytes of all storages that are alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every storage made while it is active, until it is freed.

    Fake tensors count as real ones do, if parameters and inputs are fake as well; of tensors that several ranks hold
    together, this one's part; and storages that change their size as large as they are.

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
        self._sizes: dict[int, int] = {}

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result: torch.UntypedStorage = resize(storage, size)
            if storage._cdata in self._sizes:
                self._count(storage._cdata, storage.nbytes())
            return result

        # No operator changes a storage's size: torch's FSDP2 lets go of gathered parameters that way.
        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign, assignment]
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *exc_info: object) -> None:
        del torch.UntypedStorage.resize_
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]

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
        key = storage._cdata
        if key not in self._sizes:
            self._count(key, storage.nbytes())
            weakref.finalize(storage, self._remove, key)

    def _count(self, key: int, size: int) -> None:
        self.alive_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    def _remove(self, key: int) -> None:
        self.alive_bytes -= self._sizes.pop(key)


def _identity(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: object) -> list[torch.Tensor]:
    """Return the dense tensors of a value, those that sparse ones and subclasses are made of among them."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.sparse_coo:
            return [value._indices(), value._values()]
        if value.layout is torch.sparse_csr:
            return [value.crow_indices(), value.col_indices(), value.values()]
        outer: Any = value
        if is_traceable_wrapper_subclass(outer):
            return _tensors([getattr(outer, name) for name in outer.__tensor_flatten__()[0]])
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
