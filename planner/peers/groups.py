"""Groups: the devices of a stage, as far as prices depend on them, and those that the next stage may take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.planner.peers.policies import choices

__all__ = [
    "NETWORK",
    "NODE",
    "Alike",
    "Free",
    "Group",
    "Option",
    "alike",
    "group_of",
    "level_between",
    "options",
    "reachable",
]

NODE, NETWORK = 0, 1

Free = tuple[int, ...]
"""How many devices of every node."""

Alike = tuple[tuple[int, int], ...]
"""(size, devices left) of every node, ascending."""


class Group(NamedTuple):
    """Devices of a stage."""

    width: int
    level: int
    """``NETWORK`` if they are of several nodes, else ``NODE``."""
    nodes: frozenset[int]


class Option(NamedTuple):
    """Devices that the next stage may take, and those then left."""

    left: Free
    group: Group
    rest: Group


def group_of(counts: Free) -> Group:
    """Return the group of so many devices of every node.

    >>> group_of((2, 0)).level, group_of((2, 1)).level
    (0, 1)
    """
    nodes = frozenset(node for node, count in enumerate(counts) if count)
    return Group(sum(counts), NODE if len(nodes) < 2 else NETWORK, nodes)


def level_between(one: Group, other: Group) -> int:
    """Return the slowest level that connects two groups."""
    return NODE if len(one.nodes | other.nodes) < 2 else NETWORK


def options(free: Free, sizes: Sequence[int], rows: int) -> list[Option]:
    """Return what the policies let the next stage take, with at most ``rows`` replicas, so that a device is left."""
    found = []
    for count in range(1, min(rows, sum(free) - 1) + 1):
        for taken in choices(free, sizes, count):
            left = _less(free, taken)
            found.append(Option(left, group_of(taken), group_of(left)))
    return found


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
        for option in options(free, sizes, sum(free)):
            state = alike(option.left, sizes)
            if state not in seen:
                seen.add(state)
                waiting.append(option.left)
    return len(seen)


def _less(free: Free, taken: Free) -> Free:
    return tuple(one - other for one, other in zip(free, taken, strict=True))
