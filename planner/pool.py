"""Pool: the devices that are left, of all kinds, while stages take theirs one after the other.

A state of it holds, for each kind, how many devices of how many nodes are left. Of each kind a stage takes some in
cluster order, or by the policies of Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models",
2021, section 4.2:

- fresh first: of nodes that no stage uses yet, so that the stage stays within a node;
- append first: of nodes that are in use already, so that no rest is left over;
- scatter first: the same number of every node in use, or of all nodes if none is, for stages that reduce little.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, product
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from autopar.planner.costs import memoize
from autopar.planner.costs.communication import Sharing
from autopar.planner.costs.model import CostModel


def policy_choices(free: Sequence[int], sizes: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Return how many devices of each node the three policies take, without repeats.

    ``free`` devices are left of ``sizes`` in every node, together at least ``count``.

    >>> policy_choices([2, 4, 4], [4, 4, 4], 2), policy_choices([4, 4], [4, 4], 2)
    ([(0, 2, 0), (2, 0, 0)], [(2, 0), (1, 1)])
    """
    nodes = range(len(free))
    fresh = [node for node in nodes if free[node] == sizes[node]]
    begun = [node for node in nodes if free[node] < sizes[node]]
    taken = (
        _one_by_one(free, (*fresh, *begun), count),
        _one_by_one(free, (*begun, *fresh), count),
        _evenly(free, begun or fresh, fresh if begun else [], count),
    )
    return list(dict.fromkeys(taken))


def _one_by_one(free: Sequence[int], order: Sequence[int], count: int) -> tuple[int, ...]:
    taken = [0] * len(free)
    for node in order:
        taken[node] = min(free[node], count)
        count -= taken[node]
    return tuple(taken)


def _evenly(free: Sequence[int], first: Sequence[int], then: Sequence[int], count: int) -> tuple[int, ...]:
    taken = [0] * len(free)
    for group in (first, then):
        open_nodes = [node for node in group if free[node]]
        while open_nodes and count:
            served = open_nodes[:count]
            for node in served:
                taken[node] += 1
            count -= len(served)
            open_nodes = [node for node in open_nodes if taken[node] < free[node]]
    return tuple(taken)


Taken = tuple[tuple[int, int], ...]
"""(kind, devices) of all kinds that a stage has devices of."""
Free = tuple[int, ...]
"""How many devices of every group."""
States = npt.NDArray[np.int64]
Numbers = TypeVar("Numbers", int, States)


class DeviceGroup(NamedTuple):
    """Devices of one kind and memory in one node; stages take the next ones of them."""

    devices: tuple[int, ...]
    alike: int = 0
    """Groups of the same number, which stand one after the other, may be exchanged for each other."""


class TakenCounts:
    """States of one kind's devices, numbered from none to all taken: a stage takes the next ones in cluster order.

    >>> chain = TakenCounts([DeviceGroup((0, 1)), DeviceGroup((3, 4))])
    >>> [after.tolist() for after in chain.after(2)], chain.devices(1, 2, 0)
    ([[2, 3, 4, -1, -1]], (1, 3))
    """

    def __init__(self, groups: Sequence[DeviceGroup]) -> None:
        self._devices = tuple(device for group in groups for device in group.devices)
        self.states = len(self._devices) + 1
        self.moves = (self.states - 1) * self.states // 2
        """Over all states, in how many ways a stage may take devices."""

    def remaining(self, state: int) -> tuple[int, ...]:
        """Return all devices that are left."""
        return self._devices[state:]

    def after(self, width: int) -> list[States]:
        """Return the states after taking so many devices, ``[state]``, by variant; -1 where there is none."""
        after = np.arange(self.states) + width
        return [np.where(after < self.states, after, -1)]

    def devices(self, state: int, width: int, variant: int) -> tuple[int, ...]:
        """Return the devices that a variant takes, node by node."""
        assert variant == 0
        return self._devices[state : state + width]


class EnumeratedStates:
    """States that were found by going through all ways, as of :class:`TakenCounts`."""

    def __init__(self, groups: Sequence[DeviceGroup], ways: dict[Free, list[Free]]) -> None:
        """``ways`` are, by what is free, what may be taken; of as many devices, in cluster order first."""
        self._groups = groups
        # The most devices first, so that numbers ascend as devices are taken.
        self._free = sorted(ways, key=lambda free: (-sum(free), [-count for count in free]))
        number = {free: state for state, free in enumerate(self._free)}
        self.states = len(self._free)
        self.moves = sum(map(len, ways.values()))
        self._after: dict[int, list[States]] = {}
        self._variant_counts: dict[tuple[int, int], list[Free]] = {}
        for state, free in enumerate(self._free):
            for taken in ways[free]:
                width = sum(taken)
                variants = self._variant_counts.setdefault((state, width), [])
                arrays = self._after.setdefault(width, [])
                if len(variants) == len(arrays):
                    arrays.append(np.full(self.states, -1))
                arrays[len(variants)][state] = number[less(free, taken)]
                variants.append(taken)

    def remaining(self, state: int) -> tuple[int, ...]:
        return self._next(state, self._free[state])

    def after(self, width: int) -> list[States]:
        return self._after[width]

    def devices(self, state: int, width: int, variant: int) -> tuple[int, ...]:
        return self._next(state, self._variant_counts[state, width][variant])

    def _next(self, state: int, counts: Free) -> tuple[int, ...]:
        found: list[int] = []
        for group, free, count in zip(self._groups, self._free[state], counts, strict=True):
            used = len(group.devices) - free
            found += group.devices[used : used + count]
        return tuple(found)


KindStates = TakenCounts | EnumeratedStates


def enumerate_states(
    groups: Sequence[DeviceGroup], ways: Callable[[Sequence[DeviceGroup], Free], Iterator[Free]], most: int
) -> EnumeratedStates | None:
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
            after = less(free, taken)
            if after not in known:
                known[after] = []
                waiting.append(after)
    return EnumeratedStates(groups, known)


def every_way(groups: Sequence[DeviceGroup], free: Free) -> Iterator[Free]:
    """Yield everything that a stage may take; of groups that are alike, untouched ones are begun in cluster order.

    Which of those is taken makes no difference before a stage has devices there.

    >>> [*every_way([DeviceGroup((0, 1)), DeviceGroup((2, 3))], (1, 2))]
    [(1, 2), (1, 1), (1, 0), (0, 2), (0, 1)]
    >>> [*every_way([DeviceGroup((0,)), DeviceGroup((1,))], (1, 1))]
    [(1, 1), (1, 0)]
    """
    return (taken for taken in _ways(groups, free, 0, None) if any(taken))


def _ways(groups: Sequence[DeviceGroup], free: Free, at: int, untouched_alike: int | None) -> Iterator[Free]:
    """Yield what may be taken of the groups from ``at`` on, behind an untouched group of sort ``untouched_alike``."""
    if at == len(groups):
        yield ()
        return
    untouched = free[at] == len(groups[at].devices)
    most = 0 if untouched and untouched_alike == groups[at].alike else free[at]
    for count in range(most, -1, -1):
        for others in _ways(groups, free, at + 1, groups[at].alike if untouched and not count else untouched_alike):
            yield (count, *others)


def by_policies(groups: Sequence[DeviceGroup], free: Free) -> Iterator[Free]:
    """Yield what stages of every width take in cluster order, and by DAPPLE's policies."""
    sizes = [len(group.devices) for group in groups]
    for width in range(1, sum(free) + 1):
        yield from dict.fromkeys((_one_by_one(free, range(len(free)), width), *policy_choices(free, sizes, width)))


def less(free: Free, counts: Free) -> Free:
    """Return what is left of every group behind so many devices."""
    return tuple(one - other for one, other in zip(free, counts, strict=True))


class Pool:
    """States of a cluster while stages take devices.

    A state is a number, 0 while none is taken; taking devices leads to a larger one. A pool is ``complete`` where there
    is no way to take devices that it does not offer.

    >>> pool = in_order([0, 0, 1])
    >>> pool.devices(0, ((0, 1), (1, 1))), pool.take(0, ((0, 2), (1, 1))) == pool.empty
    ((0, 2), True)
    >>> state = pool.take(0, ((0, 2),))
    >>> pool.remaining(state), pool.kind_devices_left(state, 0)
    ([2], 0)
    """

    def __init__(self, groups: Mapping[int, Sequence[DeviceGroup]], most: int = 0) -> None:
        """Find the states of devices by kind, and of more than ``most`` moves only those by policies or in order."""
        self.kinds = tuple(sorted(groups))
        self._reserves, self.complete = _richest(groups, most)
        sizes = [reserve.states for reserve in self._reserves.values()]
        strides = [*accumulate(reversed(sizes), lambda one, other: one * other, initial=1)]
        self._strides = dict(zip(self.kinds, strides[-2::-1], strict=True))
        self.states = strides[-1]
        self.empty = self.states - 1
        """The state in which no device is left."""

    def all_of(self, kind: int) -> tuple[int, ...]:
        """Return all devices of a kind."""
        return self._reserves[kind].remaining(0)

    def without_choice(self) -> bool:
        """Return whether stages take the next ones of a kind's devices, and nothing else."""
        return all(isinstance(each, TakenCounts) for each in self._reserves.values())

    def devices_taken(self, kind: int) -> States:
        """Return how many devices of a kind are taken in every state, where stages take the next ones."""
        return self._own(np.arange(self.states), kind)

    def kind_devices_left(self, state: int, kind: int) -> int:
        """Return how many devices of a kind are left."""
        return len(self._reserves[kind].remaining(self._own(state, kind)))

    def devices_left(self) -> States:
        """Return how many devices are left in every state."""
        found, states = np.zeros(self.states, dtype=np.int64), np.arange(self.states)
        for kind, reserve in self._reserves.items():
            own = np.array([len(reserve.remaining(state)) for state in range(reserve.states)])
            found += own[self._own(states, kind)]
        return found

    def remaining(self, state: int) -> list[int]:
        """Return all devices that are left, ascending."""
        every = (reserve.remaining(self._own(state, kind)) for kind, reserve in self._reserves.items())
        return sorted(chain.from_iterable(every))

    @memoize
    def moves(self, taken: Taken) -> list[States]:
        """Return the states after a stage takes devices, ``[state]``, by variant; -1 where there is none.

        Of several kinds, every variant of each goes with every one of the others.
        """
        states, found = np.arange(self.states), []
        for each in product(*(self._kind_moves(*own) for own in taken)):
            there = np.logical_and.reduce([after >= 0 for after in each])
            found.append(np.where(there, states + sum(after - states for after in each), -1))
        return found

    @memoize
    def _kind_moves(self, kind: int, width: int) -> list[States]:
        """Return :meth:`moves` of one kind, like :meth:`TakenCounts.after`."""
        states, own = np.arange(self.states), self._own(np.arange(self.states), kind)
        every = (each[own] for each in self._reserves[kind].after(width))
        return [np.where(after >= 0, states + (after - own) * self._strides[kind], -1) for after in every]

    def variants(self, state: int, taken: Taken) -> list[tuple[int, int]]:
        """Return the (variant, state after it) that there are of taking devices in a state."""
        after = (int(each[state]) for each in self.moves(taken))
        return [(variant, each) for variant, each in enumerate(after) if each >= 0]

    def take(self, state: int, taken: Taken) -> int:
        """Return the state after taking devices that are there, by the first variant."""
        for own in taken:
            state = int(self._kind_moves(*own)[0][state])
        return state

    def devices(self, state: int, taken: Taken, variant: int = 0) -> tuple[int, ...]:
        """Return the devices that a stage takes by a variant of :meth:`moves`, kind by kind and node by node."""
        numbers = np.unravel_index(variant, [len(self._kind_moves(*own)) for own in taken])
        every = (
            self._reserves[kind].devices(self._own(state, kind), width, int(at))
            for (kind, width), at in zip(taken, numbers, strict=True)
        )
        return tuple(chain.from_iterable(every))

    def _own(self, state: Numbers, kind: int) -> Numbers:
        return state // self._strides[kind] % self._reserves[kind].states


def in_order(kinds: Sequence[int]) -> Pool:
    """Return a pool of devices of some kinds whose stages take the next ones."""
    return Pool({kind: [DeviceGroup(tuple(at for at, other in enumerate(kinds) if other == kind))] for kind in kinds})


def _richest(groups: Mapping[int, Sequence[DeviceGroup]], most: int) -> tuple[dict[int, KindStates], bool]:
    """Return the reserves that offer most among those of few enough moves, and whether they offer everything."""
    chains = {kind: TakenCounts(own) for kind, own in sorted(groups.items())}
    simple = {kind: _is_ordered(own) for kind, own in groups.items()}
    if all(simple.values()):
        return dict(chains), True
    for ways in (every_way, by_policies):
        found = {
            kind: each if simple[kind] else enumerate_states(groups[kind], ways, most) for kind, each in chains.items()
        }
        whole = {kind: each for kind, each in found.items() if each is not None}
        if len(whole) == len(found) and _moves(whole) <= most:
            return whole, ways is every_way
    return dict(chains), False


def _is_ordered(groups: Sequence[DeviceGroup]) -> bool:
    """Whether there is no other way to take devices than in cluster order."""
    return len(groups) == 1 or (
        len({group.alike for group in groups}) == 1 and all(len(group.devices) == 1 for group in groups)
    )


def _moves(reserves: Mapping[int, KindStates]) -> int:
    states = prod(reserve.states for reserve in reserves.values())
    return sum(reserve.moves * states // reserve.states for reserve in reserves.values())


_MOST_WORK = 100_000
"""Moves x layers squared: tables of so many entries take a fraction of a second."""
_MOST_WORK_WHEN_EXACT = 2_000_000
_MOST_MOVES = 50_000
"""Found in a fraction of a second."""


def pool_of(costs: CostModel, *, exact: bool) -> Pool:
    """Return a cost model's devices as a pool; ``exact`` goes through more placements."""
    most = (_MOST_WORK_WHEN_EXACT if exact else _MOST_WORK) // costs.layer_count**2
    return Pool(groups_of(costs), min(most, _MOST_MOVES))


def groups_of(costs: CostModel) -> dict[int, list[DeviceGroup]]:
    """Return the devices of every kind by node and memory, in cluster order.

    Groups next to each other are alike where they are whole nodes of one rack, with as many devices of the same memory,
    that share their ports with the same others.
    """
    topology, ports = costs.sharing.topology, _ports(costs.sharing)
    members: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for device, kind in enumerate(costs.kind_of):
        members[kind, topology.nodes[device], costs.limits_bytes[device]].append(device)
    found: dict[int, list[DeviceGroup]] = defaultdict(list)
    before: dict[int, object] = {}
    for (kind, node, limit), devices in members.items():
        own = found[kind]
        looks = None
        if len(devices) == topology.nodes.count(node):
            looks = limit, len(devices), topology.racks[devices[0]], _looks(devices, ports)
        same = looks is not None and before.get(kind) == looks
        own.append(DeviceGroup(tuple(devices), own[-1].alike if same else len(own)))
        before[kind] = looks
    return dict(found)


def _ports(sharing: Sharing) -> list[tuple[tuple[int, ...], ...]]:
    """Return the devices that every device shares each of its ports with."""
    found: list[list[tuple[int, ...]]] = [[] for _ in sharing.topology.nodes]
    for level, links in sharing.links.items():
        for link in links:
            users: dict[tuple[int, int], list[int]] = defaultdict(list)
            for device, place in enumerate(sharing.places[level]):
                users[sharing.topology.unit(device, level), place // link.shared_by].append(device)
            for sharers in users.values():
                for device in sharers:
                    found[device].append(tuple(sharers))
    return [tuple(each) for each in found]


def _looks(devices: Sequence[int], ports: Sequence[tuple[tuple[int, ...], ...]]) -> tuple[object, ...]:
    """Return who shares a node's ports: its own devices by place, so that nodes with ports of their own look alike."""
    return tuple(
        tuple(devices.index(user) for user in users) if set(users) <= set(devices) else users
        for device in devices
        for users in ports[device]
    )
