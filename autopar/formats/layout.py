"""Layout: which stages share devices.

A group of devices holds one stage, or several that a schedule runs in turn: its chunks. Groups are numbered in the
order of their first stages.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

Layout = Literal["line", "loop", "vee"]
LAYOUTS: dict[str, Layout] = {"interleaved": "loop", "zb-v": "vee", "dualpipe-v": "vee"}
"""By schedule; others have a group for every stage (``line``)."""


def layout_of(schedule: str) -> Layout:
    """Return how a schedule lays its stages out."""
    return LAYOUTS.get(schedule, "line")


def chunks_of(layout: Layout) -> int | None:
    """Return how many stages a group holds; None where it is as many as one likes.

    >>> chunks_of("line"), chunks_of("loop"), chunks_of("vee")
    (1, None, 2)
    """
    return {"line": 1, "loop": None, "vee": 2}[layout]


def group_of(layout: Layout, stage: int, groups: int) -> int:
    """Return the group of devices that holds a stage.

    Stages go round the groups (``loop``), or to and fro (``vee``).

    >>> [group_of("loop", stage, 3) for stage in range(6)], [group_of("vee", stage, 3) for stage in range(6)]
    ([0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0])
    """
    turn, at = divmod(stage, groups)
    return groups - 1 - at if layout == "vee" and turn % 2 else at


def groups_of(devices: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Return the stages of every group, given the devices of every stage.

    >>> groups_of([(0, 1), (2,), (2,), (0, 1)])
    ((0, 3), (1, 2))
    """
    found: dict[Hashable, list[int]] = {}
    for stage, each in enumerate(devices):
        found.setdefault(each, []).append(stage)
    return tuple(map(tuple, found.values()))
