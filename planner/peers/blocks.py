"""Blocks: a sequence of numbers cut into consecutive blocks whose sums differ by no more than one number.

Bárány and Grolmusz, "Block partitions of sequences", 2013.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm


def blocks(values: Sequence[float], count: int) -> tuple[int, ...]:
    """Return the ends of ``count`` blocks, some of which may be empty, of numbers that are 0 or more.

    From any blocks, here of about equal lengths: while the largest sum exceeds the smallest by more than the largest
    number, the smallest block nearest to the largest takes a number from its neighbour on that side. Once the largest
    has given one, the largest is chosen anew. This ends, with sums that differ by at most the largest number (the
    paper's theorem 1, and its proof).

    >>> blocks([1, 1, 4, 4, 4, 4], 2)
    (4, 6)
    """
    whole = _whole(values)
    ends = [len(whole) * (index + 1) // count for index in range(count)]
    sums = [sum(whole[start:stop]) for start, stop in zip([0, *ends[:-1]], ends, strict=True)]
    while True:
        largest = max(range(count), key=lambda index: (sums[index], -index))
        giver = -1
        while giver != largest:
            smallest = min(range(count), key=lambda index: (sums[index], abs(index - largest), index))
            if sums[largest] <= sums[smallest] + max(whole):
                return tuple(ends)
            giver = smallest - 1 if largest < smallest else smallest + 1
            given = _give(ends, giver, smallest)
            sums[giver] -= whole[given]
            sums[smallest] += whole[given]


def _give(ends: list[int], giver: int, taker: int) -> int:
    """Move a number between neighbouring blocks; return its position."""
    if giver < taker:
        ends[giver] -= 1
        return ends[giver]
    ends[taker] += 1
    return ends[taker] - 1


def _whole(values: Sequence[float]) -> list[int]:
    """Return the numbers times a common one, as integers: sums with rounding might never settle."""
    exact = [Fraction(value) for value in values]
    common = lcm(*(each.denominator for each in exact))
    return [int(each * common) for each in exact]
