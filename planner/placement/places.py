"""Places: where the devices that a stage takes stand, in every state of the pool, and which of them are alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.formats.cluster import Level
from autopar.planner.costs import memoize
from autopar.planner.costs.links import Sharing
from autopar.planner.costs.model import CostModel
from autopar.planner.placement.pool import DeviceGroup, Pool, States

FEW_STATES = 300
"""Up to so many, every state is looked at by itself."""


class StagePlace(NamedTuple):
    """What a stage's own seconds depend on of its devices."""

    level: Level
    """That connects them."""
    limit: int
    """The memory of the smallest."""


class StateMove(NamedTuple):
    """One of the variants of taking a number of devices of a kind, in every state of the pool."""

    after: States
    """The state that it leads to; the number of states where there is no such variant."""
    place: States
    """Index into :attr:`Places.stage_places`."""
    near: States
    """Index into :attr:`Places.nears`."""


class Places:
    """What the prices of stages depend on, of the devices that they take."""

    def __init__(self, costs: CostModel, pool: Pool) -> None:
        self._costs, self.pool = costs, pool
        self._topology = costs.links.topology
        self.stage_places: list[StagePlace] = []
        self.nears: list[frozenset[Level]] = []
        """Levels at which a next stage may stand."""

    @memoize
    def moves(self, kind: int, width: int) -> list[StateMove]:
        """Return the variants of taking so many devices."""
        moves = self.pool.moves(kind, width)
        if self.pool.states > FEW_STATES and self.pool.without_choice():
            return [self._along(kind, width, moves[0])]
        return [self._each(kind, width, variant, after) for variant, after in enumerate(moves)]

    def _each(self, kind: int, width: int, variant: int, after: States) -> StateMove:
        pool = self.pool
        place, near = np.zeros((2, pool.states), dtype=np.int64)
        for state in np.flatnonzero(after >= 0).tolist():
            devices, rest = pool.devices(state, kind, width, variant), pool.remaining(int(after[state]))
            known = StagePlace(self._topology.level(devices), self._costs.limit_bytes(devices))
            place[state] = _index(self.stage_places, known)
            # Where none is left, no stage follows.
            levels = self._topology.between(devices, rest) if rest else frozenset(self._topology.levels[-1:])
            near[state] = _index(self.nears, levels)
        return StateMove(np.where(after < 0, pool.states, after), place, near)

    def _along(self, kind: int, width: int, after: States) -> StateMove:
        """Take the next devices in cluster order; of levels behind a node's, any may connect to what is left."""
        pool, levels, slide = self.pool, self._topology.levels, np.lib.stride_tricks.sliding_window_view
        states = np.flatnonzero(after >= 0)
        starts = pool.devices_taken(kind)[states]
        limits, pairs, _ = self._kind_devices(kind)
        widest = slide(pairs, width - 1).max(axis=1) if width > 1 else np.zeros(len(limits), dtype=np.int64)
        found = list(zip(widest.tolist(), slide(limits, width).min(axis=1).tolist(), strict=True))
        number = {
            each: _index(self.stage_places, StagePlace(levels[each[0]], each[1])) for each in dict.fromkeys(found)
        }
        known = np.array([number[each] for each in found])
        place, near = np.zeros((2, pool.states), dtype=np.int64)
        place[states] = known[starts]
        # Where no device of the stage's nodes is left, the next one stands in another.
        beside, beyond = _index(self.nears, frozenset(levels)), _index(self.nears, frozenset(levels[1:] or levels))
        near[states] = np.where(self._beside(kind, width, starts, after[states]), beside, beyond)
        return StateMove(np.where(after < 0, pool.states, after), place, near)

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
        chain = pool.all_of(kind)
        lasts = ({nodes[device]: at for at, device in enumerate(pool.all_of(other))} for other in pool.kinds)
        return (
            np.array([self._costs.limits_bytes[device] for device in chain]),
            np.array([self._topology.levels.index(self._topology.pair(*pair)) for pair in pairwise(chain)]),
            [np.array([last.get(nodes[device], -1) for device in chain]) for last in lasts],
        )


def _index(values: list[StagePlace] | list[frozenset[Level]], one: StagePlace | frozenset[Level]) -> int:
    if one not in values:
        values.append(one)  # type: ignore[arg-type]  # of the list's own kind
    return values.index(one)  # type: ignore[arg-type]


_MOST_WORK = 100_000
"""Moves x layers squared: tables of so many entries take a fraction of a second."""
_MOST_WORK_WHEN_EXACT = 2_000_000
_MOST_MOVES = 50_000
"""Found in a fraction of a second."""


def pool_of(costs: CostModel, *, exact: bool, use_all: bool) -> Pool:
    """Return a cost model's devices as a pool; ``exact`` goes through more placements."""
    most = (_MOST_WORK_WHEN_EXACT if exact else _MOST_WORK) // costs.layer_count**2
    return Pool(groups_of(costs), min(most, _MOST_MOVES), idle=not use_all)


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
