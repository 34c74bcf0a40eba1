"""Pool: the devices that are left, by kind, while stages take theirs one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

__all__ = ["Pool"]


class Pool:
    """States of a cluster while stages take devices; a stage takes the next ones of one kind, in cluster order.

    A state is a number; taking devices leads to a larger one.

    >>> pool = Pool([0, 0, 1])
    >>> state = pool.take(0, 0, 2)
    >>> pool.devices(state, 1, 1), pool.left(state, 0), pool.take(state, 1, 1) == pool.empty
    ((2,), 0, True)
    """

    def __init__(self, kinds: Sequence[int]) -> None:
        """Sort the devices.

        Args:
            kinds: of every device.
        """
        self.kinds = tuple(sorted(set(kinds)))
        self._devices = {kind: [at for at, other in enumerate(kinds) if other == kind] for kind in self.kinds}
        counts = [range(len(self._devices[kind]) + 1) for kind in self.kinds]
        self._used = [dict(zip(self.kinds, used, strict=True)) for used in product(*counts)]
        self._strides: dict[int, int] = {}
        stride = 1
        for kind in reversed(self.kinds):
            self._strides[kind] = stride
            stride *= len(self._devices[kind]) + 1
        self.states = len(self._used)
        self.empty = self.states - 1
        """The state in which no device is left; 0 is that in which none is taken."""

    def left(self, state: int, kind: int) -> int:
        """Return how many devices of a kind are left."""
        return len(self._devices[kind]) - self._used[state][kind]

    def take(self, state: int, kind: int, width: int) -> int:
        """Return the state after taking devices that are there."""
        return state + width * self._strides[kind]

    def devices(self, state: int, kind: int, width: int) -> tuple[int, ...]:
        """Return the devices that a stage takes."""
        used = self._used[state][kind]
        return tuple(self._devices[kind][used : used + width])

    def remaining(self, state: int) -> list[int]:
        """Return all devices that are left, ascending."""
        return sorted(device for kind in self.kinds for device in self._devices[kind][self._used[state][kind] :])
