"""torchgpipe: as many partitions as devices, balanced by the layers' times or sizes.

Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", 2020: its automatic balancing cuts
the sequence of layers into blocks with the algorithm of Bárány and Grolmusz. By time, a layer counts the seconds of its
forward and backward; by size, the bytes that it keeps of a micro-batch, and its parameters with their gradients and
optimizer state, for which torchgpipe asks its user for a factor.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.planner.peers.blocks import blocks
from autopar.planner.peers.prices import Prices
from autopar.planner.peers.proposal import Proposal, in_order


def by_time(prices: Prices) -> list[Proposal]:
    """Return the proposal that balances seconds."""
    return _balanced(prices, prices.layer_s.tolist())


def by_size(prices: Prices) -> list[Proposal]:
    """Return the proposal that balances bytes."""
    return _balanced(prices, prices.layer_bytes)


def work(prices: Prices) -> int:
    """Return how many steps a proposal takes at most, as its paper bounds them."""
    return min(prices.layer_count, prices.device_count) * prices.layer_count**2


def _balanced(prices: Prices, values: Sequence[float]) -> list[Proposal]:
    cuts = blocks(values, min(prices.layer_count, prices.device_count))
    # A block may be empty: a device that torchgpipe would leave without a layer stays idle.
    filled = [cut for before, cut in zip((0, *cuts), cuts, strict=False) if cut > before]
    return [in_order(filled, (1,) * len(filled))]
