"""Groups: the devices of a stage, as far as prices depend on them, and those that the next stage may take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.placement.policies import choices

Positions = npt.NDArray[np.int64]

Free = tuple[int, ...]
"""How many devices of every node."""

Alike = tuple[tuple[int, int], ...]
"""(size, devices left) of every node, ascending."""

SEVERAL = -1


class Groups(NamedTuple):
    """Devices of stages, as columns ``[group, 1]``."""

    widths: Positions
    nodes: Positions
    """The node that all devices of a group are in, or ``SEVERAL``."""

    @property
    def levels(self) -> Positions:
        """Return 0 for groups within a node, else 1."""
        return np.where(self.nodes == SEVERAL, 1, 0)

    def levels_to(self, others: Groups) -> Positions:
        """Return the levels of the slowest links to other groups."""
        return np.where((self.nodes == SEVERAL) | (self.nodes != others.nodes), 1, 0)

    def at(self, index: int) -> Groups:
        """Return one of the groups."""
        return Groups(*(each[index : index + 1] for each in self))


class Choice(NamedTuple):
    """What the next stage may take of what is free, and what is then left for the last one."""

    left: list[Free]
    states: list[Alike]
    """What is left, see :func:`alike`."""
    groups: Groups
    rest: Groups


def group_of(counts: Sequence[Free]) -> Groups:
    """Return groups of so many devices of every node.

    >>> groups = group_of([(2, 0), (2, 1), (1, 0)])
    >>> groups.levels.tolist(), groups.levels_to(groups.at(0)).tolist()
    ([[0], [1], [0]], [[0], [1], [0]])
    """
    used = [[node for node, count in enumerate(each) if count] for each in counts]
    widths = np.array([[sum(each)] for each in counts], dtype=np.int64).reshape(-1, 1)
    nodes = [[nodes[0] if len(nodes) == 1 else SEVERAL] for nodes in used]
    return Groups(widths, np.array(nodes, dtype=np.int64).reshape(-1, 1))


def choose(free: Free, sizes: Sequence[int], rows: int) -> Choice:
    """Return what the policies let the next stage take, with at most ``rows`` replicas, so that a device is left."""
    taken = [each for count in range(1, min(rows, sum(free) - 1) + 1) for each in choices(free, sizes, count)]
    left = [tuple(one - other for one, other in zip(free, each, strict=True)) for each in taken]
    return Choice(left, [alike(each, sizes) for each in left], group_of(taken), group_of(left))


def alike(free: Free, sizes: Sequence[int]) -> Alike:
    """Return what is left of nodes without telling nodes of one size apart: their links are the same.

    >>> alike((1, 2, 3), (4, 4, 4)) == alike((3, 2, 1), (4, 4, 4)), alike((1, 2), (2, 4)) == alike((2, 1), (2, 4))
    (True, False)
    """
    return tuple(sorted(zip(sizes, free, strict=True)))


def reachable(sizes: Free, most: int) -> int:
    """Return how many states of the nodes, see :func:`alike`, the policies lead to; counting ends above ``most``.

    >>> reachable((4,), 100), reachable((2, 2), 100)
    (4, 5)
    """
    seen, waiting = {alike(sizes, sizes)}, [sizes]
    while waiting and len(seen) <= most:
        free = waiting.pop()
        for count in range(1, sum(free)):
            for taken in choices(free, sizes, count):
                left = tuple(one - other for one, other in zip(free, taken, strict=True))
                state = alike(left, sizes)
                if state not in seen:
                    seen.add(state)
                    waiting.append(left)
    return len(seen)
