"""Route: which rows of a micro-batch travel between the replicas of two stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

__all__ = ["Route", "even_shares", "routes"]


class Route(NamedTuple):
    """Rows ``start:stop`` of every micro-batch go from replica ``sender`` to replica ``receiver``."""

    sender: int
    receiver: int
    start: int
    stop: int


def even_shares(rows: int, replicas: int) -> tuple[int, ...]:
    """Divide rows among replicas as evenly as whole rows allow: replica i owns [rows i / r, rows (i + 1) / r).

    >>> even_shares(8, 3)
    (2, 3, 3)
    """
    edges = [rows * index // replicas for index in range(replicas + 1)]
    return tuple(after - before for before, after in pairwise(edges))


def routes(sender_shares: Sequence[int], receiver_shares: Sequence[int]) -> list[Route]:
    """Return the non-empty intersections of two divisions of the same rows.

    >>> for route in routes((2, 2), (1, 3)):
    ...     print(route)
    Route(sender=0, receiver=0, start=0, stop=1)
    Route(sender=0, receiver=1, start=1, stop=2)
    Route(sender=1, receiver=1, start=2, stop=4)
    """
    senders, receivers = [0, *accumulate(sender_shares)], [0, *accumulate(receiver_shares)]
    found = []
    for sender in range(len(sender_shares)):
        for receiver in range(len(receiver_shares)):
            start = max(senders[sender], receivers[receiver])
            stop = min(senders[sender + 1], receivers[receiver + 1])
            if start < stop:
                found.append(Route(sender, receiver, start, stop))
    return found
