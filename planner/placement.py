"""Placement: which devices stages may take, and what is near what.

The pool has the devices that are left, of all kinds, while stages take theirs one after the other. A state of it holds,
for each kind, how many devices of how many nodes are left. A stage takes some of one kind in cluster order, or by the
policies of Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", 2021, section 4.2:

- fresh first: of nodes that no stage uses yet, so that the stage stays within a node;
- append first: of nodes that are in use already, so that no rest is left over;
- scatter first: the same number of every node in use, or of all nodes if none is, for stages that reduce little.

Places tell where the devices that a stage takes stand, in every state of the pool, and which of them are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise, product
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from autopar.formats.cluster import LEVELS, Level
from autopar.hardware.topology import ALONE, Place
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
    """States of a cluster while stages take devices, most of one kind each.

    A state is a number, 0 while none is taken; taking devices leads to a larger one. A pool is ``complete`` where there
    is no way to take devices that it does not offer.

    >>> pool = in_order([0, 0, 1])
    >>> state = pool.take(0, 0, 2)
    >>> pool.devices(state, 1, 1), pool.kind_devices_left(state, 0), pool.take(state, 1, 1) == pool.empty
    ((2,), 0, True)
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
    def moves(self, kind: int, width: int) -> list[States]:
        """Return the states after taking so many devices of a kind, like :meth:`TakenCounts.after`."""
        states, own = np.arange(self.states), self._own(np.arange(self.states), kind)
        every = (each[own] for each in self._reserves[kind].after(width))
        return [np.where(after >= 0, states + (after - own) * self._strides[kind], -1) for after in every]

    def variants(self, state: int, kind: int, width: int) -> list[tuple[int, int]]:
        """Return the (variant, state after it) that there are of taking devices in a state."""
        after = (int(each[state]) for each in self.moves(kind, width))
        return [(variant, each) for variant, each in enumerate(after) if each >= 0]

    def take(self, state: int, kind: int, width: int, variant: int = 0) -> int:
        """Return the state after taking devices that are there."""
        return int(self.moves(kind, width)[variant][state])

    def devices(self, state: int, kind: int, width: int, variant: int = 0) -> tuple[int, ...]:
        """Return the devices that a stage takes, node by node."""
        return self._reserves[kind].devices(self._own(state, kind), width, variant)

    @memoize
    def mixed_moves(self, taken: Taken) -> list[States]:
        """Return the states after taking devices of several kinds, like :meth:`moves`: every variant of each kind."""
        states = np.arange(self.states)
        found = []
        for each in product(*(self.moves(*own) for own in taken)):
            there = np.logical_and.reduce([after >= 0 for after in each])
            found.append(np.where(there, states + sum(after - states for after in each), -1))
        return found

    def mixed_devices(self, state: int, taken: Taken, variant: int) -> tuple[int, ...]:
        """Return the devices that a stage takes by a variant of :meth:`mixed_moves`, kind by kind."""
        counts = [len(self.moves(*own)) for own in taken]
        numbers = np.unravel_index(variant, counts)
        every = (self.devices(state, *own, int(at)) for own, at in zip(taken, numbers, strict=True))
        return tuple(chain.from_iterable(every))

    def _own(self, state: Numbers, kind: int) -> Numbers:
        return state // self._strides[kind] % self._reserves[kind].states


def in_order(kinds: Sequence[int]) -> Pool:
    """Return a pool of devices of some kinds whose stages take the next ones."""
    return Pool({kind: [DeviceGroup(tuple(at for at, other in enumerate(kinds) if other == kind))] for kind in kinds})


def _richest(groups: Mapping[int, Sequence[DeviceGroup]], most: int) -> tuple[dict[int, KindStates], bool]:
    """Return the reserves that offer most among those of few enough moves, and whether they offer everything."""
    chains = {kind: TakenCounts(own) for kind, own in sorted(groups.items())}
    simple = {kind: _alone(own) for kind, own in groups.items()}
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


def _alone(groups: Sequence[DeviceGroup]) -> bool:
    """Whether taking devices in cluster order is all that there is."""
    return len(groups) == 1 or (
        len({group.alike for group in groups}) == 1 and all(len(group.devices) == 1 for group in groups)
    )


def _moves(reserves: Mapping[int, KindStates]) -> int:
    states = prod(reserve.states for reserve in reserves.values())
    return sum(reserve.moves * states // reserve.states for reserve in reserves.values())


FEW_STATES = 300
"""Up to so many, every state is looked at by itself."""


class StagePlace(NamedTuple):
    """What a stage's own seconds depend on of its devices."""

    place: Place
    """Of those that have the same part of the layers: all, unless teams run replicas."""
    limit: int
    """The memory of the smallest."""
    team: Place = ALONE
    """Of those that run a replica together."""


class StateMove(NamedTuple):
    """One of the variants of taking a number of devices of a kind, in every state of the pool."""

    after: States
    """The state that it leads to; the number of states where there is no such variant."""
    place: States
    """Number in :attr:`Places.stage_places` of so many devices."""
    near: States
    """Number in :attr:`Places.nears`."""


class Places:
    """What the prices of stages depend on, of the devices that they take."""

    def __init__(self, costs: CostModel, pool: Pool) -> None:
        self._costs, self.pool = costs, pool
        self._topology = costs.links.topology
        self.stage_places: dict[tuple[int, int], dict[StagePlace, int]] = {}
        """By how many replicas there are, how many devices run each, and what a stage's seconds depend on, a number."""
        self.nears: dict[frozenset[Level], int] = {}
        """Likewise, by the levels at which a next stage may stand."""

    @memoize
    def moves(self, kind: int, width: int, team: int = 1) -> list[StateMove]:
        """Return the variants of taking so many devices, for teams of so many; none where a team would cross nodes."""
        moves = self.pool.moves(kind, width)
        if self.pool.states > FEW_STATES and self.pool.without_choice():
            along = self._along(kind, width, moves[0]) if team == 1 else self._teams_along(kind, width, team, moves[0])
            return [along]
        taken = partial(self.pool.devices, kind=kind, width=width)
        return [self._told(team, after, partial(taken, variant=variant)) for variant, after in enumerate(moves)]

    @memoize
    def mixed_moves(self, taken: Taken, team: int = 1) -> list[StateMove]:
        """Return the variants of taking devices of several kinds, for teams of so many of one each."""
        moves = self.pool.mixed_moves(taken)
        if self.pool.states > FEW_STATES:
            return [self._anywhere(taken, team, after) for after in moves]
        devices = partial(self.pool.mixed_devices, taken=taken)
        return [self._told(team, after, partial(devices, variant=variant)) for variant, after in enumerate(moves)]

    def _anywhere(self, taken: Taken, team: int, after: States) -> StateMove:
        """Take devices of several kinds that stand, from below, as near as any do, and have any one's memory."""
        width, levels = sum(count for _, count in taken), self._topology.levels
        place = self._costs.links.best_place(width // team, levels[0])
        limit = max(self._costs.limits_bytes)
        number = self._number(StagePlace(place, limit, Place(team) if team > 1 else ALONE))
        near = self.nears.setdefault(frozenset(levels), len(self.nears))
        where = np.where(after < 0, self.pool.states, after)
        return StateMove(where, np.full(self.pool.states, number), np.full(self.pool.states, near))

    def _told(self, team: int, after: States, taken: Callable[[int], tuple[int, ...]]) -> StateMove:
        pool = self.pool
        place, near = np.zeros((2, pool.states), dtype=np.int64)
        after = after.copy()
        for state in np.flatnonzero(after >= 0).tolist():
            devices, rest = taken(state), pool.remaining(int(after[state]))
            own = stage_place(self._costs, devices, team)
            if own is None:
                after[state] = -1
                continue
            place[state] = self._number(own)
            # Where none is left, no stage follows.
            levels = self._topology.between(devices, rest) if rest else frozenset(self._topology.levels[-1:])
            near[state] = self.nears.setdefault(levels, len(self.nears))
        return StateMove(np.where(after < 0, pool.states, after), place, near)

    def _along(self, kind: int, width: int, after: States) -> StateMove:
        """Take the next devices in cluster order; of levels behind a node's, any may connect to what is left."""
        pool, levels, slide = self.pool, self._topology.levels, np.lib.stride_tricks.sliding_window_view
        states = np.flatnonzero(after >= 0)
        starts = pool.devices_taken(kind)[states]
        limits, pairs, _ = self._kind_devices(kind)
        widest = slide(pairs, width - 1).max(axis=1) if width > 1 else np.zeros(len(limits), dtype=np.int64)
        told = np.array([self._costs.links.tells_filling(level) for level in levels])[widest]
        filled = self._filled(kind, width) * told if told.any() else np.zeros((3, len(told)), dtype=np.int64)
        every = np.vstack((widest, slide(limits, width).min(axis=1), filled))
        found, index = np.unique(every, axis=1, return_inverse=True)
        known = (StagePlace(Place(width, levels[at], *filled), limit) for at, limit, *filled in found.T.tolist())
        numbers = np.array([self._number(each) for each in known])[index.ravel()]
        place, near = np.zeros((2, pool.states), dtype=np.int64)
        place[states] = numbers[starts]
        # Where no device of the stage's nodes is left, the next one stands in another.
        sides = (frozenset(levels), frozenset(levels[1:] or levels))
        beside, beyond = (self.nears.setdefault(each, len(self.nears)) for each in sides)
        near[states] = np.where(self._beside(kind, width, starts, after[states]), beside, beyond)
        return StateMove(np.where(after < 0, pool.states, after), place, near)

    def _teams_along(self, kind: int, width: int, team: int, after: States) -> StateMove:
        """Take the next devices for teams, where none of them would cross from a node to another, or may."""
        alone, states = self.moves(kind, width)[0], np.flatnonzero(after >= 0)
        every, starts = self.pool.all_of(kind), self.pool.devices_taken(kind)[states]
        place, ahead = np.zeros(self.pool.states, dtype=np.int64), np.full(self.pool.states, self.pool.states)
        if self._costs.across_nodes:
            found = [stage_place(self._costs, every[at : at + width], team) for at in starts.tolist()]
            place[states] = [0 if each is None else self._number(each) for each in found]
        else:
            states = states[self._within_nodes(kind, width, team)[starts]]
            known = list(self.stage_places[width, 1])
            shared = [self._number(_of_teams(each, team)) for each in known]
            place[states] = np.array(shared, dtype=np.int64)[alone.place[states]]
        ahead[states] = after[states]
        return StateMove(ahead, place, alone.near)

    def _within_nodes(self, kind: int, width: int, team: int) -> npt.NDArray[np.bool_]:
        """Whether teams of the next devices are each in one node, by the first one's position among a kind's."""
        nodes = np.array([self._topology.nodes[device] for device in self.pool.all_of(kind)])
        crosses = (nodes[: len(nodes) - team + 1] != nodes[team - 1 :]).astype(np.int64)
        # Of every team, those that cross among it and those before it, team by team.
        counts = np.zeros(len(nodes) + team, dtype=np.int64)
        for at, each in enumerate(crosses.tolist(), start=team):
            counts[at] = counts[at - team] + each
        firsts = np.arange(len(nodes) - width + 1)
        return np.asarray(counts[firsts + width] == counts[firsts])

    def _number(self, place: StagePlace) -> int:
        known = self.stage_places.setdefault((place.place.ranks, place.team.ranks), {})
        return known.setdefault(place, len(known))

    def _filled(self, kind: int, width: int) -> States:
        """Return nodes, and the fewest and the most devices on one, of so many in cluster order, ``[3, start]``."""
        every = self._taken_by_node(kind)
        counts = every[:, width:] - every[:, :-width]
        return np.stack(((counts > 0).sum(axis=0), np.where(counts > 0, counts, width).min(axis=0), counts.max(axis=0)))

    @memoize
    def _taken_by_node(self, kind: int) -> States:
        """Return how many devices of every node are before a position, ``[node, position]``."""
        nodes = np.array([self._topology.nodes[device] for device in self.pool.all_of(kind)])
        counts = np.cumsum(nodes == np.unique(nodes)[:, None], axis=1)
        return np.pad(counts, ((0, 0), (1, 0)))

    def _beside(self, kind: int, width: int, starts: States, after: States) -> npt.NDArray[np.bool_]:
        """Whether a device that is left stands in a node of those taken."""
        found = np.zeros(len(starts), dtype=bool)
        for other, latest in zip(self.pool.kinds, self._kind_devices(kind)[2], strict=True):
            highest = np.lib.stride_tricks.sliding_window_view(latest, width).max(axis=1)
            found |= highest[starts] >= self.pool.devices_taken(other)[after]
        return found

    @memoize
    def _kind_devices(self, kind: int) -> tuple[States, States, list[States]]:
        """Return of a kind's devices their memory, and the level, as a number, at which each reaches the next one.

        And by kind of device, where among those the last one of each device's node stands; -1 where there is none.
        """
        pool, nodes = self.pool, self._topology.nodes
        own = pool.all_of(kind)
        lasts = ({nodes[device]: at for at, device in enumerate(pool.all_of(other))} for other in pool.kinds)
        return (
            np.array([self._costs.limits_bytes[device] for device in own]),
            np.array([self._topology.levels.index(self._topology.pair(*pair)) for pair in pairwise(own)]),
            [np.array([last.get(nodes[device], -1) for device in own]) for last in lasts],
        )


def stage_place(costs: CostModel, devices: tuple[int, ...], team: int) -> StagePlace | None:
    """Return where a stage of teams stands; None where one would cross from a node to another, and may not."""
    links, limit = costs.links, costs.limit_bytes(devices)
    if team == 1:
        return StagePlace(links.place(devices), limit)
    teams = [devices[at : at + team] for at in range(0, len(devices), team)]
    if not costs.across_nodes and any(links.level(each) != "node" for each in teams):
        return None
    # From below: of teams that stand differently, as the nearest.
    nearest = min((links.place(each) for each in teams), key=lambda each: LEVELS.index(each.level))
    return StagePlace(links.place(devices[::team]), limit, nearest)


def may_stand(costs: CostModel, devices: tuple[int, ...], team: int) -> bool:
    """Whether devices may be a stage's: of one kind, or each team where kinds mix; no team is where it may not be."""
    apart = team if costs.mixes else len(devices)
    every = (devices[at : at + apart] for at in range(0, len(devices), apart))
    alike = all(len({costs.kind_of[each] for each in own}) == 1 for own in every)
    return alike and stage_place(costs, devices, team) is not None


def _of_teams(stage: StagePlace, team: int) -> StagePlace:
    """Return where the ranks with the same part stand, of teams that are each in one node."""
    ranks, level, nodes, *filled = stage.place
    return StagePlace(Place(ranks // team, level, nodes, *(each // team for each in filled)), stage.limit, Place(team))


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
