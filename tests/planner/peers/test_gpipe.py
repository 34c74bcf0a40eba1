"""GPipe's cells, and torchgpipe's blocks, against the theorem and every way to cut the sequence."""

import random
from collections.abc import Callable
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


def test_cells_and_blocks_are_as_all_cuts_say() -> None:
    """Sums differ by no more than a number, and the largest exceeds the enumerated least by no more either."""
    for seed in range(200):
        rng = random.Random(seed)
        count = rng.randint(1, 9)
        costs = [rng.choice([0.0, 1.0, rng.uniform(0, 5), rng.lognormvariate(0, 1)]) for _ in range(count)]
        cells = rng.randint(1, count)
        cuts = gpipe.split(np.array(costs), cells)
        assert len(cuts) == cells
        assert all(stop > start for start, stop in pairwise((0, *cuts)))
        every = [_variance(costs, (*inner, count)) for inner in combinations(range(1, count), cells - 1)]
        assert _variance(costs, cuts) == pytest.approx(min(every), rel=1e-9, abs=1e-12), f"seed {seed}"
    for seed in range(400):
        rng = random.Random(seed)
        length, draw = rng.randint(1, 9), rng.choice(DRAWS)
        values, count = [draw(rng) for _ in range(length)], rng.randint(1, 5)
        ends = blocks(values, count)
        assert (len(ends), ends[-1]) == (count, len(values))
        assert list(ends) == sorted(ends)
        sums, largest = _sums(values, ends), Fraction(max(values))
        assert max(sums) - min(sums) <= largest, f"seed {seed}"
        if count < 5 and seed % 2:
            every = combinations_with_replacement(range(len(values) + 1), count - 1)
            least = min(max(_sums(values, (*inner, len(values)))) for inner in every)
            assert least <= max(sums) <= least + largest, f"seed {seed}"
    assert blocks([0.1] * 12, 4) == (3, 6, 9, 12)
    # Numbers without any size stay as they were cut.
    assert blocks([0.0] * 6, 3) == (2, 4, 6)


@pytest.mark.parametrize(
    ("propose", "balanced"),
    [(gpipe.by_time, "layer_s"), (gpipe.by_size, "layer_bytes"), (gpipe.propose, None)],
    ids=["time", "size", "variance"],
)
def test_blocks_on_a_device_each_differ_by_no_more_than_a_layer(
    propose: Callable[[Prices], list[Proposal]], balanced: str | None
) -> None:
    """GPipe's own cells are only as many as there are devices, while layers last."""
    idle = 0
    for seed in range(80):
        prices = prices_of(seed, (seed % 4 + 1,), most_layers=7)
        (proposal,) = propose(prices)
        assert proposal.cuts[-1] == prices.layer_count
        assert all(stop > start for start, stop in pairwise((0, *proposal.cuts)))
        assert proposal.devices == tuple((index,) for index in range(len(proposal.cuts)))
        wanted = min(prices.layer_count, prices.device_count)
        if balanced is None:
            assert len(proposal.cuts) == wanted
            continue
        numbers = getattr(prices, balanced)
        sums = [sum(numbers[start:stop]) for start, stop in pairwise((0, *proposal.cuts))]
        if len(sums) < wanted:
            idle += 1
            sums.append(0)
        assert max(sums) - min(sums) <= max(numbers) * (1 + 1e-9), f"seed {seed}"
    assert idle < 40


DRAWS: tuple[Callable[[random.Random], float], ...] = (
    lambda rng: float(rng.randint(0, 3)),
    lambda rng: rng.uniform(0, 1),
    lambda rng: rng.lognormvariate(0, 2),
    lambda rng: rng.choice([0.0, 0.1, 1e-9, 1e9]),
)


def _sums(values: list[float], ends: tuple[int, ...]) -> list[Fraction]:
    return [sum(map(Fraction, values[start:stop]), Fraction(0)) for start, stop in pairwise((0, *ends))]
