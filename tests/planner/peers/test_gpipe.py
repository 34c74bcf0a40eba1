"""GPipe's cells against every way to cut the sequence; torchgpipe's proposals: what they balance.

Block partitions against the theorem that promises them, and every way to cut the sequence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, pairwise
from statistics import pvariance

import numpy as np
import pytest

from autopar.planner.peers import gpipe
from autopar.planner.peers.gpipe import blocks
from autopar.planner.peers.prices import Prices, Proposal
from priced import prices_of


def _variance(costs: list[float], cuts: tuple[int, ...]) -> float:
    return pvariance([sum(costs[start:stop]) for start, stop in pairwise((0, *cuts))])


def test_cells_vary_as_little_as_any_enumerated_cells() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        count = rng.randint(1, 9)
        costs = [rng.choice([0.0, 1.0, rng.uniform(0, 5), rng.lognormvariate(0, 1)]) for _ in range(count)]
        cells = rng.randint(1, count)
        cuts = gpipe.split(np.array(costs), cells)
        assert len(cuts) == cells
        assert all(stop > start for start, stop in pairwise((0, *cuts)))
        every = [_variance(costs, (*inner, count)) for inner in combinations(range(1, count), cells - 1)]
        assert _variance(costs, cuts) == pytest.approx(min(every), rel=1e-9, abs=1e-12), f"seed {seed}"


def test_a_proposal_has_a_cell_for_each_device_while_layers_last() -> None:
    for seed in range(40):
        prices = prices_of(seed, (3,))
        (proposal,) = gpipe.propose(prices)
        assert len(proposal.cuts) == min(3, prices.layer_count)
        assert proposal.devices == tuple((index,) for index in range(len(proposal.cuts)))


def _times(prices: Prices) -> list[float]:
    return [float(each) for each in prices.layer_s]


def _sizes(prices: Prices) -> Sequence[float]:
    return prices.layer_bytes


@pytest.mark.parametrize(
    ("propose", "values"), [(gpipe.by_time, _times), (gpipe.by_size, _sizes)], ids=["time", "size"]
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


def _drawn(rng: random.Random) -> list[float]:
    count = rng.randint(1, 9)
    draws = [
        lambda: float(rng.randint(0, 3)),
        lambda: rng.uniform(0, 1),
        lambda: rng.lognormvariate(0, 2),
        lambda: rng.choice([0.0, 0.1, 1e-9, 1e9]),
    ]
    draw = rng.choice(draws)
    return [draw() for _ in range(count)]


def _sums(values: list[float], ends: tuple[int, ...]) -> list[Fraction]:
    return [sum(map(Fraction, values[start:stop]), Fraction(0)) for start, stop in pairwise((0, *ends))]


def test_sums_differ_by_no_more_than_the_largest_number() -> None:
    for seed in range(1000):
        rng = random.Random(seed)
        values, count = _drawn(rng), rng.randint(1, 6)
        ends = blocks(values, count)
        assert len(ends) == count
        assert ends[-1] == len(values)
        assert list(ends) == sorted(ends)
        sums = _sums(values, ends)
        assert max(sums) - min(sums) <= Fraction(max(values)), f"seed {seed}"


def test_the_largest_block_exceeds_the_enumerated_least_by_less_than_a_number() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        values, count = _drawn(rng), rng.randint(1, 4)
        largest = max(_sums(values, blocks(values, count)))
        every = combinations_with_replacement(range(len(values) + 1), count - 1)
        least = min(max(_sums(values, (*inner, len(values)))) for inner in every)
        assert least <= largest <= least + Fraction(max(values)), f"seed {seed}"


def test_equal_numbers_make_blocks_of_equal_lengths() -> None:
    assert blocks([0.1] * 12, 4) == (3, 6, 9, 12)


def test_numbers_without_any_size_stay_as_they_were_cut() -> None:
    assert blocks([0.0] * 6, 3) == (2, 4, 6)
