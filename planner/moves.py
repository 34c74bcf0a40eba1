"""Moves: the ways in which stages take devices from every state of a pool, and what of them prices depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from autopar.formats.cluster import Level
from autopar.planner.costs import CostModel
from autopar.planner.pool import Pool

__all__ = ["Moves", "Numbered", "Place", "Taken", "Way"]

_Told = TypeVar("_Told")


class Taken(NamedTuple):
    """How many devices a stage takes, which variant of taking so many, and the state after it."""

    width: int
    variant: int
    after: int


class Place(NamedTuple):
    """What a stage's own seconds depend on of its devices: how many, what connects them, and their memory."""

    width: int
    level: Level
    limit: int


class Way(NamedTuple):
    """What transfers to the next stage depend on: how many devices send, and the levels at which it may stand."""

    width: int
    levels: frozenset[Level]


class Moves:
    """Of one kind of device; of at most ``widest`` devices each."""

    def __init__(self, costs: CostModel, pool: Pool, kind: int, widest: int) -> None:
        topology = costs.links.topology
        self._taken: list[tuple[Taken, ...]] = []
        self.places: Numbered[Place] = Numbered()
        self.ways: Numbered[Way] = Numbered()
        for state in range(pool.states):
            self._taken.append(_taken(pool, state, kind, widest))
            places, ways = [], []
            for width, variant, after in self._taken[state]:
                devices = pool.devices(state, kind, width, variant)
                places.append(Place(width, topology.level(devices), costs.limit_bytes(devices)))
                # Where none is left, no stage follows.
                ways.append(Way(width, topology.between(devices, pool.remaining(after)) or frozenset(("node",))))
            self.places.note(places)
            self.ways.note(ways)

    def of(self, state: int) -> tuple[Taken, ...]:
        """Return the moves from a state, those of the fewest devices first."""
        return self._taken[state]

    def __len__(self) -> int:
        return sum(map(len, self._taken))


def _taken(pool: Pool, state: int, kind: int, widest: int) -> tuple[Taken, ...]:
    widths = range(1, min(pool.left(state, kind), widest) + 1)
    return tuple(Taken(width, *each) for width in widths for each in pool.variants(state, kind, width))


class Numbered(Generic[_Told]):
    """What moves differ in, numbered as it is met: most states have few that no other state has."""

    def __init__(self) -> None:
        self._numbers: dict[_Told, int] = {}
        self._of: list[npt.NDArray[np.int64] | slice] = []

    @property
    def different(self) -> list[_Told]:
        """Return all that was met."""
        return list(self._numbers)

    def note(self, each: Sequence[_Told]) -> None:
        """Note that of all moves from the next state."""
        numbers = [self._numbers.setdefault(one, len(self._numbers)) for one in each]
        first = numbers == list(range(len(numbers)))
        self._of.append(slice(len(numbers)) if first else np.array(numbers, dtype=np.int64))

    def at(self, state: int) -> npt.NDArray[np.int64] | slice:
        """Return the numbers of a state's moves."""
        return self._of[state]
