"""Random pairs of plans: what one saves, the other goes on with."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from autopar.ranks.pool import RankPool
from checkpoint_pairs import RANKS, STEPS, CheckpointPairs, Training, difference

COUNT = int(os.environ.get("AUTOPAR_PAIRS", "6"))
"""More are drawn where that is asked for; they take about two seconds each."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckpointPairs]:
    with RankPool(RANKS) as pool:
        yield CheckpointPairs(tmp_path_factory.mktemp("pairs"), pool)


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.reliability(23, 25)
def test_a_plan_goes_on_from_what_another_saved(pairs: CheckpointPairs, seed: int) -> None:
    rng = random.Random(seed)
    first, second = pairs.draw(rng), pairs.draw(rng)
    found = pairs.train(first, second, rng.randint(1, STEPS - 1))
    assert difference(found, pairs.truth) < 1e-10


def test_a_wrong_number_is_seen(pairs: CheckpointPairs) -> None:
    name = next(key for key, tensor in pairs.truth.tensors.items() if "exp_avg_sq" in key and tensor.numel() > 1)
    spoiled = pairs.truth.tensors[name].clone()
    spoiled.view(-1)[0] += 1e-9
    other = Training(pairs.truth.losses, {**pairs.truth.tensors, name: spoiled})
    assert difference(other, pairs.truth) > 1e-10
