"""Ranks of a host open the channels they ask for; those of several hosts do without."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from autopar.errors import TrainingError
from autopar.ranks.channel import is_supported
from autopar.ranks.pool import RankPool
from paths import HARNESS

pytestmark = pytest.mark.skipif(not is_supported(), reason="this system has no memory to share that way")


def start() -> RankPool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HARNESS), prepend=os.pathsep)
        return RankPool(4)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with start() as pool:
        yield pool


@pytest.fixture
def pool_to_harm() -> Iterator[RankPool]:
    with start() as pool:
        yield pool


@pytest.mark.parametrize(
    ("hosts", "pairs", "expected"),
    [
        (1, [(0, 1), (1, 0), (1, 2), (3, 0)], [[1, 3], [0, 2], [1], [0]]),
        (2, [(0, 1), (1, 2), (2, 3), (3, 0)], [[1], [0], [3], [2]]),
        (4, [(0, 1), (1, 2)], [[], [], [], []]),
        (1, [], [[], [], [], []]),
    ],
)
def test_pairs_of_one_host_have_a_channel(
    pool: RankPool, hosts: int, pairs: list[tuple[int, int]], expected: list[list[int]]
) -> None:
    found = pool.run("jobs_for_ranks:pass_around", {"hosts": hosts, "pairs": pairs})
    assert found == [{str(rank): float(rank) for rank in peers} for peers in expected]


def test_ranks_that_do_not_reach_each_other_have_none(pool_to_harm: RankPool) -> None:
    try:
        found = pool_to_harm.run("jobs_for_ranks:pass_around", {"hosts": 1, "pairs": [(0, 1), (1, 2)], "apart": 1})
    except TrainingError as error:
        if "unshare" not in str(error):
            raise
        pytest.skip("this process may not make networks")
    assert found == [{}, {}, {}, {}]


def test_a_rank_that_is_killed_is_missed_at_once(pool_to_harm: RankPool) -> None:
    with pytest.raises(TrainingError, match=r"rank 1 .*was killed by SIGKILL"):
        pool_to_harm.run("jobs_for_ranks:lose_while_receiving", ranks=2)
