"""Queues: how many messages of how many rows pass behind a stage, whatever the next one is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import lcm
from typing import NamedTuple

from autopar.formats.plan import Division
from autopar.planner.candidate import Family


class Queues(NamedTuple):
    """What of the messages of a micro-batch's last rows is so for every next stage."""

    least_rows: float
    """No message has fewer."""
    fullest: tuple[tuple[int, float], ...]
    """(messages, rows): no next stage has a queue emptier than all of these."""


def queues(family: Family, width: int, division: Division, most: int) -> Queues:
    """Return the queues behind a stage of ``width`` replicas; the next one has at most ``most``.

    >>> queues(Family(4, 6, "1f1b"), 2, "split", 3)
    Queues(least_rows=2, fullest=((2, 3), (4, 2)))
    """
    found = _least(_queues(family, width, division, most))
    return Queues(min(rows for _, rows in found), tuple(found))


def _queues(family: Family, width: int, division: Division, most: int) -> Iterator[tuple[int, float]]:
    rows, count = family.micro_batch_size, family.micro_batches
    share, turning = (-(-rows // width), 1) if division == "split" else (rows, width)
    yield -(-count // turning), min(share, -(-rows // min(most, rows)))
    for next_width in range(2, min(most, count) + 1):
        yield -(-count // lcm(turning, next_width)), share


def _least(pairs: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the pairs that no other one is below in both."""
    kept: list[tuple[int, float]] = []
    for count, rows in sorted(set(pairs)):
        if not kept or rows < kept[-1][1]:
            kept.append((count, rows))
    return kept
