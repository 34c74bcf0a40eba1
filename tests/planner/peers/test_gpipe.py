"""GPipe's cells against every way to cut the sequence."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from statistics import pvariance

import numpy as np
import pytest

from autopar.planner.peers import gpipe
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
