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


@pytest.fixture(scope="module")
def team_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckpointPairs]:
    with RankPool(RANKS) as pool:
        yield CheckpointPairs(tmp_path_factory.mktemp("pairs"), pool, "narrow_gpt")


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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(COUNT))
def test_any_team_goes_on_from_what_another_saved(team_pairs: CheckpointPairs, seed: int) -> None:
    rng = random.Random(f"teams {seed}")
    first, second = team_pairs.draw_teams(rng), team_pairs.draw_teams(rng)
    found = team_pairs.train(first, second, rng.randint(1, STEPS - 1))
    assert difference(found, team_pairs.truth) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(COUNT // 2))
def test_a_plan_of_teams_goes_on_bit_for_bit(team_pairs: CheckpointPairs, seed: int) -> None:
    rng = random.Random(f"same {seed}")
    plan = team_pairs.draw_teams(rng)
    assert difference(team_pairs.train(plan, plan, 2), team_pairs.train(plan, plan, 4)) == 0.0


# What stages share, each updates at another time, and a checkpoint holds the first one's.
UNTIED = """

def model():
    found = base.model()
    found.head.weight = nn.Parameter(found.head.weight.detach().clone())
    return found.to(DTYPE)
"""


@pytest.fixture(scope="module")
def untied_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckpointPairs]:
    with RankPool(RANKS) as pool:
        yield CheckpointPairs(tmp_path_factory.mktemp("pairs"), pool, "narrow_gpt", UNTIED)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stash", "2bw", "pipemare"])
def test_without_flushes_a_team_goes_on_from_what_another_saved(untied_pairs: CheckpointPairs, policy: str) -> None:
    alone, teams, last = (untied_pairs.unflushed(policy, sizes) for sizes in ((1, 1), (2, 2), (1, 2)))
    truth = untied_pairs.train_drained(alone)
    assert any(key.startswith("difference") for key in truth.tensors) == (policy == "pipemare")
    for first, second in ((alone, teams), (teams, alone), (teams, last)):
        assert difference(untied_pairs.train_drained(first, second), truth) < 1e-10
    whole = untied_pairs.train_drained(teams)
    assert difference(untied_pairs.train_drained(teams, teams), whole) == 0.0
