"""Training as a plan says gives what plain training gives: the first of docs/howto/verify.md, in float64."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autopar.ranks.pool import RankPool
from training_cases import OPTIMIZERS, Case, check, dropout, make_case, text_of, train, trains_as_plain

__all__ = ["dropout"]

EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("adamw", {"BLOCKS": 3}),
    "resnet": ("sgd", {}),
    "mlp": ("adamw", {}),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Give the case of an example, captured once."""

    @cache
    def case(example: str) -> Case:
        optimizer, narrow = EXAMPLES[example]
        file = tmp_path_factory.mktemp("models") / f"{example}.py"
        return make_case(file, text_of(example, OPTIMIZERS[optimizer], **narrow))

    return case


@pytest.mark.pairs
@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("widths", [(4,), (1, 2), (2, 3), (1, 2, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.reliability(43)
def test_training_equals_the_plain_loop(
    recompute: bool,
    schedule: str,
    widths: tuple[int, ...],
    example: str,
    cases: Callable[[str], Case],
    pool: RankPool,
    tmp_path: Path,
) -> None:
    # Seven rows divide unevenly among two and among three; at least two rows a share, for batch statistics.
    rows = 7 if max(widths) < 4 else 8
    case = cases(example)
    plan = case.plan(widths, micro_batches=3, rows=rows, schedule=schedule, recompute=recompute)
    trains_as_plain(pool, case, plan, tmp_path)


@pytest.mark.parametrize(
    ("widths", "how"),
    [
        ((1,), {}),
        ((1, 2), {"schedule": "1f1b", "cuts": [3]}),
        ((2, 1, 1), {"cuts": [2, 4]}),
        ((2, 1), {"turns": [0], "recompute": True}),
        ((1, 3), {"turns": [1]}),
        ((2, 3), {"turns": [0, 1], "recompute": True}),
    ],
)
@pytest.mark.reliability(42)
def test_dropout_depends_on_the_division_and_on_nothing_else(
    widths: tuple[int, ...], how: dict[str, Any], dropout: Case, pool: RankPool, tmp_path: Path
) -> None:
    """Also where replicas take turns."""
    assert [layer.name for layer in dropout.graph.layers if layer.random] == ["1", "2", "3", "4"]
    plan = dropout.plan(widths, 5, 3, **{"schedule": "gpipe", "seed": 3, **how})
    losses = train(pool, dropout, plan, tmp_path, 3)
    check(plan, dropout.truth(plan, 3), tmp_path, losses)
