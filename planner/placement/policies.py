"""Policies: the ways in which DAPPLE's planner takes devices for a stage.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", 2021, section 4.2. The next stage
takes devices

- fresh first: of nodes that no stage uses yet, so that the stage stays within a node;
- append first: of nodes that are in use already, so that no rest is left over;
- scatter first: the same number of every node in use, or of all nodes if none is, for stages that reduce little.
"""

from __future__ import annotations

from collections.abc import Sequence


def choices(free: Sequence[int], sizes: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Return how many devices of each node the three policies take, without repeats.

    ``free`` devices are left of ``sizes`` in every node, together at least ``count``.

    >>> choices([2, 4, 4], [4, 4, 4], 2), choices([4, 4], [4, 4], 2)
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
