"""Pool: the devices that are left, of all kinds, while stages take theirs one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np

from autopar.planner.placement.reserve import Chain, Group, Reserve, States, by_policies, every_way, listed

SKIPPING = 10
"""How many times as many moves may be gone through where they are at most twice those of cluster order."""


class Move(NamedTuple):
    """One of the variants of taking ``width`` devices of a kind."""

    width: int
    variant: int
    after: States
    """The state after it, ``[state]``; -1 where there is no such variant."""


class Pool:
    """States of a cluster while stages take devices of one kind each.

    A state is a number, 0 while none is taken; taking devices leads to a larger one. A pool is ``complete`` where there
    is no way to take devices that it does not offer.

    >>> pool = in_order([0, 0, 1])
    >>> state = pool.take(0, 0, 2)
    >>> pool.devices(state, 1, 1), pool.left(state, 0), pool.take(state, 1, 1) == pool.empty
    ((2,), 0, True)
    """

    def __init__(self, groups: Mapping[int, Sequence[Group]], most: int = 0, *, idle: bool = True) -> None:
        """Find the states.

        Args:
            groups: devices by kind.
            most: moves to go through; where there are more, stages take devices by policies or in cluster order only.
            idle: whether a stage that is placed in cluster order may leave devices idle, to begin with a node.
        """
        self.kinds = tuple(sorted(groups))
        self._reserves, self.complete = _richest(groups, most, idle=idle)
        sizes = [reserve.states for reserve in self._reserves.values()]
        strides = [*accumulate(reversed(sizes), lambda one, other: one * other, initial=1)]
        self._strides = dict(zip(self.kinds, strides[-2::-1], strict=True))
        self.states = strides[-1]
        self.empty = self.states - 1
        """The state in which no device is left."""

    def all_of(self, kind: int) -> tuple[int, ...]:
        """Return all devices of a kind."""
        return self._reserves[kind].remaining(0)

    def chain(self, kind: int) -> tuple[int, ...] | None:
        """Return a kind's devices in the order in which stages take the next ones; None where they have a choice."""
        reserve = self._reserves[kind]
        return reserve.remaining(0) if isinstance(reserve, Chain) and not reserve.skips else None

    def taken(self, kind: int) -> States:
        """Return how many devices of a kind are taken in every state, where stages take the next ones."""
        return np.arange(self.states) // self._strides[kind] % self._reserves[kind].states

    def left(self, state: int, kind: int) -> int:
        """Return how many devices of a kind are left."""
        return self._reserves[kind].left(self._own(state, kind))

    def devices_left(self) -> States:
        """Return how many devices are left in every state."""
        found, states = np.zeros(self.states, dtype=np.int64), np.arange(self.states)
        for kind, reserve in self._reserves.items():
            own = np.array([reserve.left(state) for state in range(reserve.states)])
            found += own[states // self._strides[kind] % reserve.states]
        return found

    def remaining(self, state: int) -> list[int]:
        """Return all devices that are left, ascending."""
        return sorted(
            device for kind in self.kinds for device in self._reserves[kind].remaining(self._own(state, kind))
        )

    def moves(self, kind: int, width: int) -> list[Move]:
        """Return the variants of taking so many devices of a kind, that in cluster order first."""
        stride, states = self._strides[kind], np.arange(self.states)
        own = states // stride % self._reserves[kind].states
        found = []
        for variant, each in enumerate(self._reserves[kind].after(width)):
            after = each[own]
            found.append(Move(width, variant, np.where(after >= 0, states + (after - own) * stride, -1)))
        return found

    def variants(self, state: int, kind: int, width: int) -> list[tuple[int, int]]:
        """Return the (variant, state after it) that there are of taking devices in a state."""
        own, stride = self._own(state, kind), self._strides[kind]
        after = (int(each[own]) for each in self._reserves[kind].after(width))
        return [(variant, state + (each - own) * stride) for variant, each in enumerate(after) if each >= 0]

    def take(self, state: int, kind: int, width: int, variant: int = 0) -> int:
        """Return the state after taking devices that are there."""
        own = self._own(state, kind)
        return state + (int(self._reserves[kind].after(width)[variant][own]) - own) * self._strides[kind]

    def devices(self, state: int, kind: int, width: int, variant: int = 0) -> tuple[int, ...]:
        """Return the devices that a stage takes, node by node."""
        return self._reserves[kind].devices(self._own(state, kind), width, variant)

    def _own(self, state: int, kind: int) -> int:
        return state // self._strides[kind] % self._reserves[kind].states


def in_order(kinds: Sequence[int]) -> Pool:
    """Return a pool of devices of some kinds whose stages take the next ones."""
    return Pool({kind: [Group(tuple(at for at, other in enumerate(kinds) if other == kind))] for kind in kinds})


def _richest(groups: Mapping[int, Sequence[Group]], most: int, *, idle: bool) -> tuple[dict[int, Reserve], bool]:
    """Return the reserves that offer most among those of few enough moves, and whether they offer everything."""
    chains = {kind: Chain(own) for kind, own in sorted(groups.items())}
    simple = {kind: _alone(own) for kind, own in groups.items()}
    if all(simple.values()):
        return dict(chains), True
    for ways in (every_way, by_policies):
        found = {kind: each if simple[kind] else listed(groups[kind], ways, most) for kind, each in chains.items()}
        whole = {kind: each for kind, each in found.items() if each is not None}
        if len(whole) == len(found) and _moves(whole) <= most:
            return whole, ways is every_way
    skipping = {kind: Chain(groups[kind], skip=True) for kind in chains} if idle else {}
    if skipping and _moves(skipping) <= SKIPPING * most:
        return dict(skipping), False
    return dict(chains), False


def _alone(groups: Sequence[Group]) -> bool:
    """Whether taking devices in cluster order is all that there is."""
    return len(groups) == 1 or (
        len({group.alike for group in groups}) == 1 and all(len(group.devices) == 1 for group in groups)
    )


def _moves(reserves: Mapping[int, Reserve]) -> int:
    states = prod(reserve.states for reserve in reserves.values())
    return sum(reserve.moves * states // reserve.states for reserve in reserves.values())
