"""GPipe: as many cells as devices, of the most even estimated cost; and torchgpipe, which balances them otherwise.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019, section 2: the user
gives the number K of cells, and "the partitioning algorithm minimizes the variance in the estimated costs of all
cells". Replication is left to the user; here there is none.

torchgpipe has as many partitions as devices, too, balanced by the layers' times or sizes. Kim et al., "torchgpipe:
On-the-fly Pipeline Parallelism for Training Giant Models", 2020: its automatic balancing cuts the sequence of layers
into blocks whose sums differ by no more than one layer (Bárány and Grolmusz, "Block partitions of sequences", 2013). By
time, a layer counts the seconds of its forward and backward; by size, the bytes that it keeps of a micro-batch, and its
parameters with their gradients and optimizer state, for which torchgpipe asks its user for a factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from autopar.planner.costs.activations import between
from autopar.planner.peers.prices import Array, Prices, Proposal, in_cluster_order


def propose(prices: Prices) -> list[Proposal]:
    """Return K = min(layers, devices) cells on one device each."""
    cells = min(prices.layer_count, prices.device_count)
    return [in_cluster_order(split(prices.layer_s, cells), (1,) * cells)]


def work(prices: Prices) -> int:
    """Return how many array elements a proposal takes."""
    return prices.layer_count**2 * min(prices.layer_count, prices.device_count)


def split(costs: Array, cells: int) -> tuple[int, ...]:
    """Return where to cut a sequence of ``[layers]`` costs into non-empty cells so that their sums vary least.

    The mean of the cells is fixed, so the sum of squares is what varies: V(k, j) = min over i < j of V(k - 1, i) +
    (cost of i..j)^2, where V(k, j) is the least of the first j layers in k cells.

    >>> split(np.array([1.0, 1.0, 1.0, 3.0]), 2)
    (3, 4)
    """
    squares = between(np.concatenate(([0.0], np.cumsum(costs)))) ** 2
    value = squares[0]
    chosen = []
    for _ in range(cells - 1):
        totals = value[:, None] + squares
        chosen.append(totals.argmin(axis=0))
        value = totals.min(axis=0)
    cuts = [len(costs)]
    for before in reversed(chosen):
        cuts.append(int(before[cuts[-1]]))
    return tuple(reversed(cuts))


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


def blocks_work(prices: Prices) -> int:
    """Return how many steps a proposal takes at most, as its paper bounds them."""
    return min(prices.layer_count, prices.device_count) * prices.layer_count**2


def _balance(prices: Prices, values: Sequence[float]) -> list[Proposal]:
    cuts = blocks(values, min(prices.layer_count, prices.device_count))
    # A block may be empty: a device that torchgpipe would leave without a layer stays idle.
    filled = [cut for before, cut in zip((0, *cuts), cuts, strict=False) if cut > before]
    return [in_cluster_order(filled, (1,) * len(filled))]
