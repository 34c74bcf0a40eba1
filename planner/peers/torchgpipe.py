"""torchgpipe: as many partitions as devices, balanced by the layers' times or sizes.

Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", 2020: its automatic balancing cuts
the sequence of layers into blocks whose sums differ by no more than one layer (Bárány and Grolmusz, "Block partitions
of sequences", 2013). By time, a layer counts the seconds of its forward and backward; by size, the bytes that it keeps
of a micro-batch, and its parameters with their gradients and optimizer state, for which torchgpipe asks its user for a
factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

from autopar.planner.peers.prices import Prices, Proposal, in_order


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
            if giver < smallest:
                ends[giver] -= 1
                given = ends[giver]
            else:
                given = ends[smallest]
                ends[smallest] += 1
            sums[giver] -= whole[given]
            sums[smallest] += whole[given]


def _whole(values: Sequence[float]) -> list[int]:
    """Return the numbers times a common one, as integers: sums with rounding might never settle."""
    exact = [Fraction(value) for value in values]
    common = lcm(*(each.denominator for each in exact))
    return [int(each * common) for each in exact]


def by_time(prices: Prices) -> list[Proposal]:
    """Return the proposal that balances seconds."""
    return _balance(prices, prices.layer_s.tolist())


def by_size(prices: Prices) -> list[Proposal]:
    """Return the proposal that balances bytes."""
    return _balance(prices, prices.layer_bytes)


def work(prices: Prices) -> int:
    """Return how many steps a proposal takes at most, as its paper bounds them."""
    return min(prices.layer_count, prices.device_count) * prices.layer_count**2


def _balance(prices: Prices, values: Sequence[float]) -> list[Proposal]:
    cuts = blocks(values, min(prices.layer_count, prices.device_count))
    # A block may be empty: a device that torchgpipe would leave without a layer stays idle.
    filled = [cut for before, cut in zip((0, *cuts), cuts, strict=False) if cut > before]
    return [in_order(filled, (1,) * len(filled))]
