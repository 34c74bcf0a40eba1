"""Training as a plan says gives what plain training gives: the first of docs/howto/verify.md, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

import plain
from autopar.ranks.pool import RankPool
from dictated import dictate
from training_cases import NARROW, OPTIMIZERS, Case, cases, check, check_buffers, dropout, shares_of, train

__all__ = ["cases", "dropout"]

PLANS = [
    ((1,), "gpipe"),
    ((2,), "1f1b"),
    ((4,), "1f1b"),
    ((1, 1), "gpipe"),
    ((1, 1), "1f1b"),
    ((1, 2), "gpipe"),
    ((1, 2), "1f1b"),
    ((2, 1), "gpipe"),
    ((2, 1), "1f1b"),
    ((1, 1, 1), "1f1b"),
    ((1, 2, 1), "1f1b"),
    ((1, 1, 1, 1), "gpipe"),
    ((1, 1, 1, 1), "1f1b"),
    ((2, 3), "gpipe"),
    ((2, 3), "1f1b"),
    ((3, 2), "1f1b"),
]


@pytest.mark.parametrize(("widths", "schedule"), PLANS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("example", NARROW)
def test_training_equals_the_plain_loop(
    example: str,
    optimizer: str,
    widths: tuple[int, ...],
    schedule: str,
    cases: dict[tuple[str, str], Case],
    pool: RankPool,
    tmp_path: Path,
) -> None:
    case = cases[example, optimizer]
    # Seven rows divide unevenly among two and among three; at least two rows a share, for batch statistics.
    rows = 7 if max(widths) < 4 else 8
    plan = dictate(case.graph, case.model, widths, micro_batches=3, rows=rows, schedule=schedule)
    losses = train(pool, case, plan, tmp_path)
    truth = plain.train(case.file, 3, rows, lambda name: shares_of(case.graph, plan, name))
    check(plan, truth, tmp_path, losses)
    check_buffers(plan, truth, tmp_path)


@pytest.mark.parametrize(
    ("widths", "schedule", "cuts"), [((1,), "gpipe", []), ((1, 2), "1f1b", [3]), ((2, 1, 1), "gpipe", [2, 4])]
)
@pytest.mark.reliability(42)
def test_dropout_depends_on_the_division_and_on_nothing_else(
    widths: tuple[int, ...], schedule: str, cuts: list[int], dropout: Case, pool: RankPool, tmp_path: Path
) -> None:
    random = [layer.name for layer in dropout.graph.layers if layer.random]
    assert random == ["1", "2", "3", "4"]
    plan = dictate(dropout.graph, dropout.model, widths, 3, 5, schedule, cuts=cuts, seed=3)
    losses = train(pool, dropout, plan, tmp_path)
    truth = plain.train(
        dropout.file, 3, 5, lambda name: shares_of(dropout.graph, plan, name), random, seed=3, model_seed=0
    )
    check(plan, truth, tmp_path, losses)


@pytest.mark.parametrize("example", NARROW)
@pytest.mark.parametrize(("widths", "schedule"), [((1, 1, 1), "1f1b"), ((1, 2), "gpipe"), ((2,), "1f1b")])
@pytest.mark.reliability(43)
def test_recomputation_changes_nothing(
    example: str,
    widths: tuple[int, ...],
    schedule: str,
    cases: dict[tuple[str, str], Case],
    pool: RankPool,
    tmp_path: Path,
) -> None:
    case = cases[example, "adamw"]
    plan = dictate(case.graph, case.model, widths, 3, 7, schedule, recompute=True)
    losses = train(pool, case, plan, tmp_path)
    truth = plain.train(case.file, 3, 7, lambda name: shares_of(case.graph, plan, name))
    check(plan, truth, tmp_path, losses)
    check_buffers(plan, truth, tmp_path)


@pytest.mark.parametrize(
    ("widths", "turns", "recompute"),
    [((2,), [0], False), ((2, 1), [0], True), ((1, 3), [1], False), ((2, 2), [0, 1], False), ((2, 3), [0, 1], True)],
)
def test_replicas_that_take_turns_train_as_the_plain_loop(
    widths: tuple[int, ...], turns: list[int], recompute: bool, dropout: Case, pool: RankPool, tmp_path: Path
) -> None:
    random = [layer.name for layer in dropout.graph.layers if layer.random]
    plan = dictate(dropout.graph, dropout.model, widths, 5, 3, "gpipe", seed=3, turns=turns, recompute=recompute)
    losses = train(pool, dropout, plan, tmp_path)
    truth = plain.train(
        dropout.file, 5, 3, lambda name: shares_of(dropout.graph, plan, name), random, seed=3, model_seed=0
    )
    check(plan, truth, tmp_path, losses)
