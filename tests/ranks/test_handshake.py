"""Ranks of a host open the channels they ask for; those of several hosts do without."""

from collections.abc import Iterator

import pytest

from autopar.errors import TrainingError
from autopar.ranks.channel import is_supported
from autopar.ranks.pool import RankPool

pytestmark = pytest.mark.skipif(not is_supported(), reason="this system has no memory to share that way")


@pytest.fixture
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def test_pairs_of_one_host_have_a_channel(pool: RankPool) -> None:
    for hosts, pairs, expected in (
        (1, [(0, 1), (1, 0), (1, 2), (3, 0)], [[1, 3], [0, 2], [1], [0]]),
        (2, [(0, 1), (1, 2), (2, 3), (3, 0)], [[1], [0], [3], [2]]),
        (4, [(0, 1), (1, 2)], [[], [], [], []]),
        (1, [], [[], [], [], []]),
    ):
        found = pool.run("jobs_for_ranks:pass_around", {"hosts": hosts, "pairs": pairs})
        assert found == [{str(rank): float(rank) for rank in peers} for peers in expected]


def test_ranks_that_do_not_reach_each_other_have_none(pool: RankPool) -> None:
    try:
        found = pool.run("jobs_for_ranks:pass_around", {"hosts": 1, "pairs": [(0, 1), (1, 2)], "apart": 1})
    except TrainingError as error:
        if "unshare" not in str(error):
            raise
        pytest.skip("this process may not make networks")
    assert found == [{}, {}, {}, {}]


def test_a_rank_that_is_killed_is_missed_at_once(pool: RankPool) -> None:
    with pytest.raises(TrainingError, match=r"rank 1 .*was killed by SIGKILL"):
        pool.run("jobs_for_ranks:lose_while_receiving", ranks=2)
