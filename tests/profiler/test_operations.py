"""What two real ranks are timed at, between CPUs, is a layer that they divide as training does it."""

from __future__ import annotations

import os

import pytest

from autopar.ranks.pool import RankPool
from paths import HARNESS


@pytest.fixture(autouse=True)
def _jobs_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HARNESS), prepend=os.pathsep)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "numbers"), [(64, 16), (100_000, 25_000), (100_004, 25_008)])
def test_a_layer_is_gathered_and_scattered_once_in_every_call(size: int, numbers: int) -> None:
    with RankPool(2) as pool:
        ranks = pool.run("divided_jobs:moved", {"bytes": size})
    for found in ranks:
        # Parts of four parameters are rounded up; a layer that is scattered again and again is gathered no more.
        assert [count for _, count in found["gather"]["seen"]] == [numbers] * 2
        assert [count for _, count in found["scatter"]["seen"]] == [numbers] * 2
        assert {name.split("_")[0] for name, _ in found["gather"]["seen"]} == {"all"}
        assert {name.split("_")[0] for name, _ in found["scatter"]["seen"]} == {"reduce"}
        assert all(seconds > 0 for name in ("gather", "scatter") for seconds in found[name]["seconds"])
    # Every rank is told the same mean of all.
    for kind in ("all_gather", "reduce_scatter"):
        assert ranks[0][kind] == ranks[1][kind]
        assert len(ranks[0][kind]) == 2
        assert min(ranks[0][kind]) > 0
