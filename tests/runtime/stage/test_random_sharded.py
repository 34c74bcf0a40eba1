"""Any plan of rank processes, whose replicas may divide what they hold, gives what plain training gives."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from any_plan import plans_of
from autopar.formats.plan import SHARDS, Plan
from autopar.ranks.pool import RankPool
from paths import MODELS
from sharded_cases import Case, make_case, trains_as_plain

BATCH_STATISTICS = {"least_share": 2, "most_rows": 7}
LIMITS = {"everything": {}, "narrow_gpt": {}, "narrow_resnet": BATCH_STATISTICS}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_case(folder / f"{name}.py", (MODELS / f"{name}.py").read_text()) for name in LIMITS}


def plans(name: str, case: Case) -> st.SearchStrategy[Plan]:
    return plans_of(case.graph, case.model, most_ranks=6, shards=SHARDS, **LIMITS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_any_plan_with_sharding_trains_as_the_plain_loop(
    name: str, cases: dict[str, Case], living_pool: Callable[[], RankPool]
) -> None:
    @settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
    @given(plan=plans(name, cases[name]))
    def trains_alike(plan: Plan) -> None:
        with tempfile.TemporaryDirectory() as folder:
            trains_as_plain(living_pool(), cases[name], plan, Path(folder))

    trains_alike()
