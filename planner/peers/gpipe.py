"""GPipe: as many cells as devices, of the most even estimated cost.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019, section 2: the
user gives the number K of cells, and "the partitioning algorithm minimizes the variance in the estimated costs of all
cells". Replication is left to the user; here there is none.
"""

from __future__ import annotations

import numpy as np

from autopar.planner.peers.prices import Array, Prices, Proposal, between, in_order


def propose(prices: Prices) -> list[Proposal]:
    """Return K = min(layers, devices) cells on one device each."""
    cells = min(prices.layer_count, prices.device_count)
    return [in_order(split(prices.layer_s, cells), (1,) * cells)]


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
