"""Ledger: the bytes that stand-ins stand for, over the time of a rank's clock.

A tensor of a few bytes is given the bytes of the one that it stands for, and counts as long as its storage is alive: so
what is held, and when it is let go, is what the executor really does.
"""

from __future__ import annotations

import weakref

import torch

from autopar.runtime.times import PricedClock


class MemoryLedger:
    """Counts the bytes of one rank."""

    def __init__(self, clock: PricedClock, state: int) -> None:
        """Begin with the bytes that are held throughout."""
        self._clock, self._state = clock, state
        self._sizes: dict[int, int] = {}
        self.alive_bytes = state
        self.is_halved = False
        """Whether the backward that runs is the first half of one."""
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the moments of the step before."""
        self.moments: list[tuple[float, int]] = [(0.0, self.alive_bytes)]
        """When how many bytes were alive, at every change."""
        self.peak_bytes = self.alive_bytes

    def count(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """Give a tensor's storage some bytes, unless it has been given some; return the tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if size > 0 and key not in self._sizes:
            self._sizes[key] = size
            self._change(size)
            weakref.finalize(storage, self._remove, key)
        return tensor

    def spike(self, size: int) -> None:
        """Note bytes that are held for a while, beside what is alive."""
        if size > 0:
            self._note(self.alive_bytes + size)
            self._note(self.alive_bytes)

    def _remove(self, key: int) -> None:
        self._change(-self._sizes.pop(key))

    def _change(self, size: int) -> None:
        self.alive_bytes += size
        self._note(self.alive_bytes)

    def _note(self, size: int) -> None:
        self.moments.append((self._clock.now_s, size))
        self.peak_bytes = max(self.peak_bytes, size)
