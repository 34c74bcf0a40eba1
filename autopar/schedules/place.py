"""Place: what a schedule knows of a rank when it orders its computations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from autopar.formats.layout import Layout, group_of
from autopar.schedules.holding import in_flight

Computation = tuple[str, int, int]
"""Kind, stage, micro-batch."""


class Place(NamedTuple):
    """Where a rank stands in the pipeline, and what it has to do there."""

    group: int
    """Of devices, in the order of their first stages."""
    groups: int
    stages: tuple[int, ...]
    """Stages that the group runs, ascending; one, but of schedules with chunks."""
    micro_batches: int
    """That the rank takes part in; a schedule counts them from 0."""
    warmups: tuple[int, ...]
    """Most micro-batches in flight, by stage of ``stages``; empty where they follow from the order."""


def places(
    layout: Layout, groups: int, chunks: int, micro_batches: int, warmups: tuple[int, ...] = ()
) -> Iterator[Place]:
    """Yield the places of all groups, of one rank each; ``warmups`` are by stage."""
    for group in range(groups):
        stages = tuple(stage for stage in range(groups * chunks) if group_of(layout, stage, groups) == group)
        yield Place(group, groups, stages, micro_batches, tuple(warmups[stage] for stage in stages if warmups))


def depths(
    order: Callable[[Place], Iterator[Computation]], layout: Layout, groups: int, chunks: int, micro_batches: int
) -> tuple[int, ...]:
    """Return the most micro-batches in flight on every stage, as an order that needs no depths implies."""
    found = [0] * (groups * chunks)
    for place in places(layout, groups, chunks, micro_batches):
        for stage, depth in in_flight(order(place)).items():
            found[stage] = depth
    return tuple(found)
