"""What loaders give ranks is what ranks read by themselves, bit for bit; so is what is said of what cannot be read."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.ranks.pool import RankPool
from autopar.runtime.loaders.server import serve
from loaded import alone, differences, draw, in_loaders


@pytest.fixture(scope="module")
def spare() -> Iterator[RankPool]:
    with RankPool(0, imports=[serve.__module__], spare=True) as pool:
        yield pool


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.some(12)
def test_loaders_give_every_rank_what_it_would_read_and_say_what_it_would(
    seed: int, spare: RankPool, tmp_path: Path
) -> None:
    case = draw(seed, tmp_path)
    before, given = case.reads, in_loaders(case, spare, tmp_path)
    read, expected = case.reads - before, alone(case)
    assert differences(given, expected) == []
    if not any(isinstance(each, str) for rank in expected for each in rank):
        # Once a host, whoever needs it.
        assert read == case.needed
    assert not list(tmp_path.glob("loaders*"))
