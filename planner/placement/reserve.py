"""Reserve: the devices of one kind that are left, and the ways in which a stage takes some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from autopar.planner.placement.policies import choices

Free = tuple[int, ...]
"""How many devices of every group."""
States = npt.NDArray[np.int64]


class Group(NamedTuple):
    """Devices of one kind and memory in one node; stages take the next ones of them."""

    devices: tuple[int, ...]
    alike: int = 0
    """Groups of the same number, which stand one after the other, may be exchanged for each other."""


class Reserve(Protocol):
    """States of one kind's devices, numbered from none taken to none left."""

    states: int
    moves: int
    """Over all states, in how many ways at most a stage may take devices."""

    def left(self, state: int) -> int:
        """Return how many devices are left."""

    def remaining(self, state: int) -> tuple[int, ...]:
        """Return all devices that are left."""

    def after(self, width: int) -> list[States]:
        """Return the states after taking so many devices, ``[state]``, by variant; -1 where there is no such variant.

        The first variant takes the next devices in cluster order.
        """

    def devices(self, state: int, width: int, variant: int) -> tuple[int, ...]:
        """Return the devices that a variant takes, node by node."""


class Chain:
    """States that differ in the number of devices taken: a stage takes the next ones.

    With ``skip``, where the next ones stand in more nodes than necessary, it may begin with the next node instead; what
    it skips stays idle.

    >>> chain = Chain([Group((0, 1, 2)), Group((3, 4, 5))], skip=True)
    >>> [after.tolist() for after in chain.after(2)]
    [[2, 3, 4, 5, 6, -1, -1], [-1, -1, 5, -1, -1, -1, -1]]
    >>> chain.devices(2, 2, 0), chain.devices(2, 2, 1)
    ((2, 3), (3, 4))
    """

    def __init__(self, groups: Sequence[Group], *, skip: bool = False) -> None:
        self._devices = tuple(device for group in groups for device in group.devices)
        count = len(self._devices)
        self.states = count + 1
        self._group = np.repeat(np.arange(len(groups)), [len(group.devices) for group in groups])
        self._next = np.append(np.searchsorted(self._group, self._group, side="right"), count)
        self._skip = skip and len(groups) > 1
        # Few of those that skip are there; none is counted, since counting would take longer than it spares.
        self.moves = count * (count + 1) // 2 * (2 if self._skip else 1)

    @property
    def skips(self) -> bool:
        """Whether a stage may begin with the next node."""
        return self._skip

    def left(self, state: int) -> int:
        """Return how many devices are left."""
        return len(self._devices) - state

    def remaining(self, state: int) -> tuple[int, ...]:
        """Return all devices that are left."""
        return self._devices[state:]

    def after(self, width: int) -> list[States]:
        """Return the states after taking so many devices; see :class:`Reserve`."""
        states, count = np.arange(self.states), self.states - 1
        taken = np.where(states + width <= count, states + width, -1)
        if not self._skip:
            return [taken]
        begun = self._next
        fits = begun + width <= count
        spans = self._group[np.minimum(states + width, count) - 1] - self._group[np.minimum(states, count - 1)]
        fewer = self._group[np.minimum(begun + width, count) - 1] - self._group[np.minimum(begun, count - 1)]
        skipped = np.where(fits & (fewer < spans), begun + width, -1)
        return [taken, skipped] if (skipped >= 0).any() else [taken]

    def devices(self, state: int, width: int, variant: int) -> tuple[int, ...]:
        """Return the devices that a variant takes."""
        start = int(self._next[state]) if variant else state
        return self._devices[start : start + width]


class _Listed:
    """States that were found by going through all ways."""

    def __init__(self, groups: Sequence[Group], ways: dict[Free, list[Free]]) -> None:
        """``ways`` are, by what is free, what may be taken; of as many devices, in cluster order first."""
        self._groups = groups
        # The most devices first, so that numbers ascend as devices are taken.
        self._free = sorted(ways, key=lambda free: (-sum(free), [-count for count in free]))
        number = {free: state for state, free in enumerate(self._free)}
        self.states = len(self._free)
        self.moves = sum(map(len, ways.values()))
        self._after: dict[int, list[States]] = {}
        self._taken: dict[tuple[int, int], list[Free]] = {}
        for state, free in enumerate(self._free):
            for taken in ways[free]:
                width = sum(taken)
                variants = self._taken.setdefault((state, width), [])
                arrays = self._after.setdefault(width, [])
                if len(variants) == len(arrays):
                    arrays.append(np.full(self.states, -1))
                arrays[len(variants)][state] = number[_less(free, taken)]
                variants.append(taken)

    def left(self, state: int) -> int:
        """Return how many devices are left."""
        return sum(self._free[state])

    def remaining(self, state: int) -> tuple[int, ...]:
        """Return all devices that are left."""
        return self._next(state, self._free[state])

    def after(self, width: int) -> list[States]:
        """Return the states after taking so many devices; see :class:`Reserve`."""
        return self._after[width]

    def devices(self, state: int, width: int, variant: int) -> tuple[int, ...]:
        """Return the devices that a variant takes, node by node."""
        return self._next(state, self._taken[state, width][variant])

    def _next(self, state: int, counts: Free) -> tuple[int, ...]:
        found: list[int] = []
        for group, free, count in zip(self._groups, self._free[state], counts, strict=True):
            used = len(group.devices) - free
            found += group.devices[used : used + count]
        return tuple(found)


def listed(
    groups: Sequence[Group], ways: Callable[[Sequence[Group], Free], Iterator[Free]], most: int
) -> Reserve | None:
    """Return the states that some ways lead to; none where there are more than ``most`` moves."""
    start = tuple(len(group.devices) for group in groups)
    if sum(start) * (sum(start) + 1) // 2 > most:
        # As many as cluster order alone has.
        return None
    known: dict[Free, list[Free]] = {start: []}
    waiting, moves = [start], 0
    while waiting:
        free = waiting.pop()
        for taken in ways(groups, free):
            moves += 1
            if moves > most:
                return None
            known[free].append(taken)
            after = _less(free, taken)
            if after not in known:
                known[after] = []
                waiting.append(after)
    return _Listed(groups, known)


def every_way(groups: Sequence[Group], free: Free) -> Iterator[Free]:
    """Yield everything that a stage may take; of groups that are alike, untouched ones are begun in cluster order.

    Which of those is taken makes no difference before a stage has devices there.

    >>> [*every_way([Group((0, 1)), Group((2, 3))], (1, 2))]
    [(1, 2), (1, 1), (1, 0), (0, 2), (0, 1)]
    >>> [*every_way([Group((0,)), Group((1,))], (1, 1))]
    [(1, 1), (1, 0)]
    """
    return (taken for taken in _ways(groups, free, 0, None) if any(taken))


def _ways(groups: Sequence[Group], free: Free, at: int, passed: int | None) -> Iterator[Free]:
    """Yield what may be taken of the groups from ``at`` on, behind an untouched group of those alike to ``passed``."""
    if at == len(groups):
        yield ()
        return
    untouched = free[at] == len(groups[at].devices)
    most = 0 if untouched and passed == groups[at].alike else free[at]
    for count in range(most, -1, -1):
        for others in _ways(groups, free, at + 1, groups[at].alike if untouched and not count else passed):
            yield (count, *others)


def by_policies(groups: Sequence[Group], free: Free) -> Iterator[Free]:
    """Yield what stages of every width take in cluster order, and by DAPPLE's policies."""
    sizes = [len(group.devices) for group in groups]
    for width in range(1, sum(free) + 1):
        yield from dict.fromkeys((_in_order(free, width), *choices(free, sizes, width)))


def _in_order(free: Free, width: int) -> Free:
    taken = []
    for count in free:
        taken.append(min(count, width))
        width -= taken[-1]
    return tuple(taken)


def _less(free: Free, taken: Free) -> Free:
    return tuple(one - other for one, other in zip(free, taken, strict=True))
