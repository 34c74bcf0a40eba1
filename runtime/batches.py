"""Batches: the mini-batches of a rank, one step's after the other's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from autopar.runtime.copies import Copies
from autopar.runtime.prefetch import Batch, Prefetch

__all__ = ["Batches", "Loader"]


class Loader(Protocol):
    """What a rank's mini-batches come from."""

    samples: int
    """In the dataset; 0 where this rank does not read it."""

    def load(self, step: int) -> Batch:
        """Return a step's; steps count from 0."""


class Batches:
    """Loads them; for a GPU, while it computes the step before."""

    def __init__(self, loader: Loader, copies: Copies | None) -> None:
        """Take what loads them, and what copies them on to a device with a memory of its own."""
        self.samples = loader.samples
        self._prefetch = None if copies is None else Prefetch(loader.load, copies)
        self._load: Callable[[int], Batch] = loader.load if self._prefetch is None else self._prefetch.load
        self._next: int | None = None

    def load(self, step: int, *, more: bool) -> Batch:
        """Return a step's, on the device; ``more`` says whether another step follows."""
        self._next = step + 1 if more else None
        return self._load(step)

    def look_ahead(self) -> None:
        """Begin to bring that of the step that follows, where there is one and the device works meanwhile."""
        if self._prefetch is not None and self._next is not None:
            self._prefetch.look_ahead(self._next)
