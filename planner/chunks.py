"""Chunks: how a schedule lays stages on devices, and whether it halves backwards, as the planner asks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from autopar.formats.layout import groups_of, layout_of
from autopar.formats.program import INPUT_BACKWARD
from autopar.planner.candidate import Placed
from autopar.schedules import SCHEDULES
from autopar.schedules.place import places


def chunked(schedule: str) -> bool:
    """Whether a rank of a schedule runs several stages."""
    return layout_of(schedule) != "line"


@lru_cache(maxsize=64)
def halves(schedule: str) -> bool:
    """Whether a schedule has backwards in two halves.

    >>> halves("1f1b")
    False
    """
    chunks = 2 if chunked(schedule) else 1
    depths = next(iter(SCHEDULES[schedule].warmups(2, chunks, 4).values()))
    every = places(layout_of(schedule), 2, chunks, 4, depths)
    return any(kind == INPUT_BACKWARD for place in every for kind, _, _ in SCHEDULES[schedule].order(place))


def plain(schedule: str) -> bool:
    """Whether every rank of a schedule runs one stage, and backwards are whole."""
    return not chunked(schedule) and not halves(schedule)


def groups(stages: Sequence[Placed]) -> tuple[tuple[int, ...], ...]:
    """Return the stages of every group of devices."""
    return groups_of([stage.devices for stage in stages])


def chunk_counts(schedule: str) -> tuple[int, ...]:
    """Return how many stages a rank is tried to run by a schedule.

    >>> chunk_counts("1f1b"), chunk_counts("interleaved")
    ((1,), (2, 3, 4))
    """
    return {"line": (1,), "vee": (2,), "loop": (2, 3, 4)}[layout_of(schedule)]
