"""Replicas that several ranks run together train as one process would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import plain
from autopar.formats.plan import Plan
from dictated import dictate
from drawn_models import equals_plain, team_plans
from in_teams import in_teams
from oracles.unflushed import RULES
from policy_cases import differs, planned
from threads import train_in_threads
from training_cases import STEPS, Case, cases, check, dropout, shares_of

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
