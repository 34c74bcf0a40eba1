"""The fuzzer in benchmarks/fuzzing finds nothing in the tree; `benchmarks/differential.py --bugs` has it find bugs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzzing.cases import BOTH, TEAMS, UNFLUSHED, Model, attempt, case_of
from fuzzing.pools import Pools
from fuzzing.record import bad
from paths import BENCHMARKS


@pytest.fixture(scope="module")
def living_ranks() -> Iterator[Pools]:
    with pytest.MonkeyPatch.context() as patch, Pools() as pools:
        patch.setenv("PYTHONPATH", str(BENCHMARKS), prepend=os.pathsep)
        yield pools


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.some(4)
@pytest.mark.parametrize("plans", [0, UNFLUSHED, TEAMS, BOTH])
@pytest.mark.parametrize("number", range(0, 36, 4))
def test_random_models_train_as_the_plain_loop_does_or_are_refused_by_name(
    number: int, plans: int, tmp_path: Path, living_ranks: Pools
) -> None:
    case = case_of(0, plans + number)
    asked, result = attempt(case, Model(case.recipe, tmp_path), tmp_path / "plan", living_ranks)
    assert not bad({"outcome": result.outcome}), f"{result.outcome} ({result.where}): {result.said} {asked}"
