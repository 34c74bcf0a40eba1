"""What two real ranks are timed at, between CPUs, is a layer that they divide as training does it."""

import os

import pytest

from autopar.ranks.pool import RankPool
from paths import HARNESS


@pytest.mark.slow
def test_a_layer_is_gathered_and_scattered_once_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HARNESS), prepend=os.pathsep)
    # Parts of four parameters are rounded up; a layer that is scattered again and again is gathered no more.
    sizes = {64: 16, 100_000: 25_000, 100_004: 25_008}
    with RankPool(2) as pool:
        found = {size: pool.run("jobs_for_ranks:moved", {"bytes": size}) for size in sizes}
    for size, ranks in found.items():
        for name, word in (("gather", "all"), ("scatter", "reduce")):
            for rank in ranks:
                seen = rank[name]["seen"]
                assert [count for _, count in seen] == [sizes[size]] * 2
                assert {each.split("_")[0] for each, _ in seen} == {word}
                assert min(rank[name]["seconds"]) > 0
        # Every rank is told the same mean of all.
        for kind in ("all_gather", "reduce_scatter"):
            assert ranks[0][kind] == ranks[1][kind]
            assert (len(ranks[0][kind]), min(ranks[0][kind]) > 0) == (2, True)
