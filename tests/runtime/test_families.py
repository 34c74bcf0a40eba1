"""Whole models of the Transformers library, trained by teams, with dropout, as one rank trains them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from autopar.ranks.pool import RankPool
from family_cases import Variant, differences, family_case, pairwise_cover, thread_variants, train_processes
from paths import HARNESS

pytest.importorskip("transformers")
BY_MODEL = {key: list(found) for key, found in groupby(thread_variants(), key=lambda each: each[:2])}
COVER = pairwise_cover()


@pytest.mark.parametrize("model", BY_MODEL, ids="-".join)
def test_teams_train_a_model_as_one_rank_does(model: tuple[str, str], tmp_path: Path) -> None:
    case = family_case(*model, tmp_path)
    assert len(case.graph.layers) > 2
    for at, variant in enumerate(BY_MODEL[model]):
        folder = tmp_path / str(at)
        folder.mkdir()
        found = differences(case, variant, folder)
        assert found.within(variant), (variant, found)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HARNESS), prepend=os.pathsep)
        with RankPool(8) as pool:
            yield pool


@pytest.mark.parametrize("variant", COVER[:: len(COVER) // 4], ids=lambda each: each.name)
def test_rank_processes_do(variant: Variant, pool: RankPool, tmp_path: Path) -> None:
    """Some of the cover; ``benchmarks/family_ranks.py`` runs all of it."""
    case = family_case(variant.name, variant.attention, tmp_path)
    found = differences(case, variant, tmp_path, train_processes(pool))
    assert found.within(variant), (variant, found)
