"""torchgpipe's proposals: what they balance, and that nothing is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from autopar.planner.peers import torchgpipe
from autopar.planner.peers.prices import Prices, Proposal
from priced import prices_of


def _times(prices: Prices) -> list[float]:
    return [float(each) for each in prices.layer_s]


def _sizes(prices: Prices) -> Sequence[float]:
    return prices.layer_bytes


@pytest.mark.parametrize(
    ("propose", "values"), [(torchgpipe.by_time, _times), (torchgpipe.by_size, _sizes)], ids=["time", "size"]
)
def test_blocks_on_a_device_each_differ_by_no_more_than_a_layer(
    propose: Callable[[Prices], list[Proposal]], values: Callable[[Prices], Sequence[float]]
) -> None:
    idle = 0
    for seed in range(120):
        prices = prices_of(seed, (seed % 4 + 1,), most_layers=7)
        (proposal,) = propose(prices)
        assert proposal.cuts[-1] == prices.layer_count
        assert all(stop > start for start, stop in pairwise((0, *proposal.cuts)))
        assert proposal.devices == tuple((index,) for index in range(len(proposal.cuts)))
        numbers = values(prices)
        sums = [sum(numbers[start:stop]) for start, stop in pairwise((0, *proposal.cuts))]
        wanted = min(prices.layer_count, prices.device_count)
        if len(sums) < wanted:
            idle += 1
            sums.append(0)
        assert max(sums) - min(sums) <= max(numbers) * (1 + 1e-9), f"seed {seed}"
    assert idle < 60
