"""What a layer keeps from its forward to its backward, by storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch


class SavedStorages:
    """Records the storages that autograd saves, each once, parameters and buffers excluded.

    >>> x = torch.ones(4, requires_grad=True)
    >>> saved = SavedStorages("layer", [])
    >>> with saved.recording():
    ...     y = x.exp()
    >>> saved.named({"x": x}, {"y": y})
    {'y': 16}
    """

    def __init__(self, layer: str, excluded: Iterable[torch.Tensor]) -> None:
        self._layer = layer
        self._excluded = {storage_key(tensor) for tensor in excluded}
        self._bytes: dict[int, int] = {}
        # Saved storages are held, or a later one could be taken for an earlier one of the same identity.
        self._held: list[torch.UntypedStorage] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is saved inside the block."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = storage_key(tensor)
        if key not in self._excluded and key not in self._bytes and tensor.untyped_storage().nbytes():
            self._bytes[key] = tensor.untyped_storage().nbytes()
            self._held.append(tensor.untyped_storage())
        return tensor

    def named(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Return bytes by name: a storage of an input or output has its name, others are ``layer#0``, ``#1`` ..."""
        names: dict[int, str] = {}
        for name, tensor in (*inputs.items(), *outputs.items()):
            names.setdefault(storage_key(tensor), name)
        own = (f"{self._layer}#{index}" for index in range(len(self._bytes)))
        return {names.get(key) or next(own): size for key, size in self._bytes.items()}


def storage_key(tensor: torch.Tensor) -> int:
    """Return what tensors of one storage have in common."""
    # Not the address of the bytes: fake and meta tensors have none.
    return int(tensor.untyped_storage()._cdata)
