"""Route: which rows of which micro-batches travel between the replicas of two stages.

Buckets: which layers' gradients are reduced together, so that small ones do not each pay a latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import gcd, lcm
from typing import NamedTuple, Protocol

from autopar.formats.plan import Division, turn_count

_SLIVER = 1e-9
"""Fractions of a row that are rounding, of shares that divide freely."""


class _StageShares(Protocol):
    """A stage, as far as messages go."""

    @property
    def shares(self) -> Sequence[float]:
        """Rows of a micro-batch that each replica takes."""

    @property
    def division(self) -> Division:
        """Whether the replicas split every micro-batch, or take whole ones in turn."""


class Route(NamedTuple):
    """Rows ``start:stop`` of every ``period``-th micro-batch from ``first`` on go from ``sender`` to ``receiver``."""

    sender: int
    receiver: int
    start: float
    stop: float
    first: int = 0
    period: int = 1

    def count(self, micro_batches: int) -> int:
        """Return how many of a step's micro-batches take this route.

        >>> Route(0, 0, 0, 8, first=1, period=3).count(5)
        2
        """
        return max(0, -(-(micro_batches - self.first) // self.period))


def even_shares(rows: int, replicas: int) -> tuple[int, ...]:
    """Divide rows among replicas as evenly as whole rows allow: replica i owns [rows i / r, rows (i + 1) / r).

    >>> even_shares(8, 3)
    (2, 3, 3)
    """
    edges = [rows * index // replicas for index in range(replicas + 1)]
    return tuple(after - before for before, after in pairwise(edges))


def shares_of(rows: int, replicas: int, division: Division, *, divisible: bool) -> tuple[float, ...]:
    """Return the rows of a micro-batch that each replica takes.

    >>> shares_of(8, 3, "split", divisible=False), shares_of(8, 3, "round-robin", divisible=False)
    ((2, 3, 3), (8, 8, 8))
    """
    if division == "round-robin":
        return (rows,) * replicas
    return (rows / replicas,) * replicas if divisible else even_shares(rows, replicas)


def routes(sending: _StageShares, receiving: _StageShares) -> Sequence[Route]:
    """Return what travels between the replicas of two stages.

    >>> from types import SimpleNamespace as Shares
    >>> for route in routes(Shares(shares=(2, 2), division="split"), Shares(shares=(1, 3), division="split")):
    ...     print(*route[:4])
    0 0 0 1
    0 1 1 2
    1 1 2 4
    >>> for route in routes(Shares(shares=(4, 4), division="round-robin"), Shares(shares=(2, 2), division="split")):
    ...     print(*route)
    0 0 0 2 0 2
    0 1 2 4 0 2
    1 0 0 2 1 2
    1 1 2 4 1 2
    """
    return _routes(tuple(sending.shares), sending.division, tuple(receiving.shares), receiving.division)


@lru_cache(maxsize=32)
def _routes(
    shares: tuple[float, ...], division: Division, other_shares: tuple[float, ...], other_division: Division
) -> Sequence[Route]:
    """Return :func:`routes`, found once for all stages that divide alike."""
    found = []
    there, here = turn_count(division, len(shares)), turn_count(other_division, len(other_shares))
    receiving_spans = _spans(other_shares, other_division)
    split = other_division == "split"
    reached = 0
    for sender, (begin, end) in enumerate(_spans(shares, division)):
        if division == "round-robin":
            reached = 0
        # Spans of shares ascend: who ends before this sender begins has nothing of it, nor of those behind.
        while split and reached < len(receiving_spans) and receiving_spans[reached][1] <= begin:
            reached += 1
        for receiver in range(reached, len(receiving_spans)):
            other_begin, other_end = receiving_spans[receiver]
            if split and other_begin >= end:
                break
            start, stop = max(begin, other_begin), min(end, other_end)
            turn = _common(sender % there, there, receiver % here, here)
            if stop - start > _SLIVER and turn is not None:
                found.append(Route(sender, receiver, start, stop, *turn))
    return found


def _spans(shares: tuple[float, ...], division: Division) -> list[tuple[float, float]]:
    if division == "round-robin":
        return [(0, rows) for rows in shares]
    return list(pairwise((0, *accumulate(shares))))


@lru_cache(maxsize=2**16)
def _common(sender: int, there: int, receiver: int, here: int) -> tuple[int, int] | None:
    """(first, period) of the numbers that leave two remainders; None where there are none.

    >>> _common(1, 2, 2, 3), _common(0, 2, 1, 4)
    ((5, 6), None)
    """
    divisor = gcd(there, here)
    if (receiver - sender) % divisor:
        return None
    # The Chinese remainder theorem.
    turns = (receiver - sender) // divisor * pow(there // divisor, -1, here // divisor) % (here // divisor)
    return sender + there * turns, lcm(there, here)


LARGEST_BYTES = 25 * 2**20
"""PyTorch DistributedDataParallel's default bucket."""
_SMALLEST_BYTES = 2**20
"""Its first bucket: below this, latency outweighs what an earlier start gains."""
_SHARES = 8
"""Into how many buckets a small stage is divided: only the last one's reduction cannot overlap the backward."""


def bucket_limit_bytes(total_bytes: int) -> int:
    """Return the most bytes that a bucket of a stage with so many bytes of gradients holds."""
    return min(LARGEST_BYTES, max(_SMALLEST_BYTES, total_bytes // _SHARES))


def buckets(sizes_bytes: Sequence[int]) -> list[list[int]]:
    """Group a stage's layers, given their gradients' bytes, in the order in which a backward finishes them.

    Indices run from the last layer to the first; a bucket closes before it would exceed the limit, and a larger layer
    has one of its own. Layers without gradients are in none. The planner prices what the runtime reduces.

    >>> buckets([30 * 2**20, 2**20, 0, 2**20])
    [[3, 1], [0]]
    """
    limit_bytes = bucket_limit_bytes(sum(sizes_bytes))
    found: list[list[int]] = []
    filled = 0
    for index in range(len(sizes_bytes) - 1, -1, -1):
        size = sizes_bytes[index]
        if size == 0:
            continue
        if not found or filled + size > limit_bytes:
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += size
    return found
