"""Random pairs of plans: what one saves, the other goes on with."""

import random
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from autopar.ranks.pool import RankPool
from checkpoint_pairs import RANKS, STEPS, CheckpointPairs, difference

# What stages share, each updates at another time, and a checkpoint holds the first one's.
UNTIED = """
def model():
    found = base.model()
    found.head.weight = nn.Parameter(found.head.weight.detach().clone())
    return found.to(DTYPE)
"""


@pytest.fixture(scope="module")
def pairs_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., CheckpointPairs]]:
    with RankPool(RANKS) as pool:
        yield cache(lambda *model: CheckpointPairs(tmp_path_factory.mktemp("pairs"), pool, *model))


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.reliability(23, 25)
def test_a_plan_goes_on_from_what_another_saved(pairs_of: Callable[..., CheckpointPairs], seed: int) -> None:
    pairs, rng = pairs_of(), random.Random(seed)
    first, second = pairs.draw(rng), pairs.draw(rng)
    assert difference(pairs.train(first, second, rng.randint(1, STEPS - 1)), pairs.truth) < 1e-10


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("policy", ["stash", "2bw", "pipemare"])
def test_without_flushes_a_team_goes_on_from_what_another_saved(
    pairs_of: Callable[..., CheckpointPairs], policy: str
) -> None:
    untied_pairs = pairs_of("narrow_gpt", UNTIED)
    alone, teams, last = (untied_pairs.unflushed(policy, sizes) for sizes in ((1, 1), (2, 2), (1, 2)))
    truth = untied_pairs.train_drained(alone)
    assert any(key.startswith("difference") for key in truth.tensors) == (policy == "pipemare")
    for first, second in ((alone, teams), (teams, alone), (teams, last)):
        assert difference(untied_pairs.train_drained(first, second), truth) < 1e-10
    whole = untied_pairs.train_drained(teams)
    assert difference(untied_pairs.train_drained(teams, teams), whole) == 0.0
