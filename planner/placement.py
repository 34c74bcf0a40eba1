"""Placement: where the devices that a stage takes stand, in every state of the pool, and what is near what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.formats.cluster import LEVELS, Level
from autopar.hardware.topology import ALONE, Place
from autopar.planner.costs import memoize
from autopar.planner.costs.model import CostModel
from autopar.planner.pool import Pool, States, Taken

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
    """One of the variants of taking devices, in every state of the pool."""

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
    def moves(self, taken: Taken, team: int = 1) -> list[StateMove]:
        """Return the variants of taking devices, for teams of so many of one kind; none where no team may stand."""
        moves = self.pool.moves(taken)
        if self.pool.states > FEW_STATES and len(taken) > 1:
            return [self._anywhere(taken, team, after) for after in moves]
        if self.pool.states > FEW_STATES and self.pool.without_choice():
            along = self._along if team == 1 else partial(self._teams_along, team)
            return [along(*taken[0], moves[0])]
        devices = partial(self.pool.devices, taken=taken)
        return [
            self._state_by_state(team, after, partial(devices, variant=variant)) for variant, after in enumerate(moves)
        ]

    def _anywhere(self, taken: Taken, team: int, after: States) -> StateMove:
        """Take devices of several kinds that stand, from below, as near as any do, and have any one's memory."""
        width, levels = sum(count for _, count in taken), self._topology.levels
        place = self._costs.links.best_place(width // team, levels[0])
        limit = max(self._costs.limits_bytes)
        number = self._number(StagePlace(place, limit, Place(team) if team > 1 else ALONE))
        near = self.nears.setdefault(frozenset(levels), len(self.nears))
        where = np.where(after < 0, self.pool.states, after)
        return StateMove(where, np.full(self.pool.states, number), np.full(self.pool.states, near))

    def _state_by_state(self, team: int, after: States, taken: Callable[[int], tuple[int, ...]]) -> StateMove:
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
        tells = np.array([self._costs.links.tells_filling(level) for level in levels])[widest]
        filled = self._node_counts(kind, width) * tells if tells.any() else np.zeros((3, len(tells)), dtype=np.int64)
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

    def _teams_along(self, team: int, kind: int, width: int, after: States) -> StateMove:
        """Take the next devices for teams, where none of them would cross from a node to another, or may."""
        single, states = self.moves(((kind, width),))[0], np.flatnonzero(after >= 0)
        every, starts = self.pool.all_of(kind), self.pool.devices_taken(kind)[states]
        place, ahead = np.zeros(self.pool.states, dtype=np.int64), np.full(self.pool.states, self.pool.states)
        if self._costs.across_nodes:
            found = [stage_place(self._costs, every[at : at + width], team) for at in starts.tolist()]
            place[states] = [0 if each is None else self._number(each) for each in found]
        else:
            states = states[self._within_nodes(kind, width, team)[starts]]
            known = list(self.stage_places[width, 1])
            shared = [self._number(_of_teams(each, team)) for each in known]
            place[states] = np.array(shared, dtype=np.int64)[single.place[states]]
        ahead[states] = after[states]
        return StateMove(ahead, place, single.near)

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

    def _node_counts(self, kind: int, width: int) -> States:
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
