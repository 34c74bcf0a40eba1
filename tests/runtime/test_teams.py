"""Replicas that several ranks run together train as one process would."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import plain
from autopar.formats.plan import Plan
from autopar.ranks.pool import RankPool
from autopar.schedules.expand import expand
from dictated import dictate
from drawn_models import equals_plain, team_plans
from in_teams import in_teams
from oracles.unflushed import RULES
from paths import HARNESS
from policy_cases import differs, planned
from threads import train_in_threads
from training_cases import STEPS, Case, cases, check, dropout, shares_of, train

__all__ = ["cases", "dropout"]


@pytest.mark.parametrize(
    ("widths", "sizes"),
    [((1,), (2,)), ((2,), (2,)), ((1, 1), (2, 2)), ((1, 1), (1, 2)), ((2, 1), (2, 4)), ((1,), (4,))],
)
def test_training_equals_the_plain_loop(
    widths: Sequence[int], sizes: Sequence[int], cases: dict[tuple[str, str], Case], tmp_path: Path
) -> None:
    case = cases["gpt", "adamw"]
    plan = in_teams(case.graph, dictate(case.graph, case.model, widths, 2, 5), sizes)
    state = {name: each.detach().clone() for name, each in case.model.build(0).named_parameters()}
    losses = train_in_threads(plan, case.graph, case.model, state, tmp_path, STEPS)
    truth = plain.train(case.file, 2, 5, lambda name: shares_of(case.graph, plan, name))
    check(plan, truth, tmp_path, losses)


@pytest.mark.parametrize("name", ["narrow_gpt", "everything", "dropout"])
def test_any_plan_with_teams_trains_as_the_plain_loop(name: str) -> None:
    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(plan=team_plans(name), seed=st.integers(0, 3))
    def trains_alike(plan: Plan, seed: int) -> None:
        equals_plain(name, plan.model_copy(update={"seed": seed}))

    trains_alike()


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize(
    ("depths", "micro_batches", "widths", "sizes"),
    [([3, 2, 1], 2, [1, 1, 1], [2, 2, 2]), ([2, 1], 3, [2, 1], [2, 4]), ([3, 1], 2, [1, 2], [1, 2])],
)
def test_training_without_flushes_equals_its_rule(
    tmp_path: Path, policy: str, depths: list[int], micro_batches: int, widths: list[int], sizes: list[int]
) -> None:
    plan = planned(tmp_path, "adamw", policy, depths, micro_batches, widths=widths, team_sizes=sizes)
    assert any(stage.cuts for stage in plan.stages)
    assert differs(tmp_path, plan) < 1e-12


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HARNESS), prepend=os.pathsep)
        with RankPool(8) as pool:
            yield pool


IN_PROCESSES: list[tuple[list[int], list[int], str, int, dict[str, Any]]] = [
    ([1], [2], "1f1b", 1, {}),
    ([2, 1], [2, 4], "1f1b", 1, {"recompute": True}),
    ([1, 2], [4, 1], "zb-h1", 1, {}),
    ([1, 2], [2, 2], "interleaved", 2, {"shard": "parameters"}),
    ([2], [4], "gpipe", 1, {"shard": "gradients", "recompute": True}),
    ([1, 1, 2], [1, 4, 1], "zb-h2", 1, {"shard": "optimizer"}),
    ([2, 1], [1, 2], "zb-v", 2, {"recompute": True}),
]


@pytest.mark.parametrize(("widths", "sizes", "schedule", "chunks", "more"), IN_PROCESSES)
def test_rank_processes_train_as_the_plain_loop(
    widths: list[int],
    sizes: list[int],
    schedule: str,
    chunks: int,
    more: dict[str, Any],
    cases: dict[tuple[str, str], Case],
    pool: RankPool,
    tmp_path: Path,
) -> None:
    case = cases["gpt", "adamw"]
    alone = dictate(case.graph, case.model, widths, 3, 5, schedule, chunks=chunks, **more)
    groups = [
        next(at for at, chunks in enumerate(alone.groups) if stage in chunks) for stage in range(len(alone.stages))
    ]
    plan = in_teams(case.graph, alone, [sizes[group] for group in groups])
    losses = train(pool, case, plan, tmp_path)
    truth = plain.train(case.file, 3, 5, lambda name: shares_of(case.graph, plan, name))
    check(plan, truth, tmp_path, losses)


def test_one_rank_a_replica_is_the_plan_of_single_ranks_to_the_last_bit(
    cases: dict[tuple[str, str], Case], tmp_path: Path
) -> None:
    case = cases["gpt", "sgd"]
    alone = dictate(case.graph, case.model, [1, 2], 2, 4)
    assert in_teams(case.graph, alone, [1, 1]).stages == alone.stages
    assert expand(in_teams(case.graph, alone, [1, 1])) == expand(alone)
