"""Training as a plan says gives what plain training gives: the first of docs/howto/verify.md, in float64."""

from pathlib import Path
from typing import Any

import pytest

from autopar.ranks.pool import RankPool
from training_cases import OPTIMIZERS, text_case, text_of, trains_as_plain

EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("adamw", {"BLOCKS": 3}),
    "resnet": ("sgd", {}),
    "mlp": ("adamw", {}),
}


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
    pool: RankPool,
    tmp_path: Path,
) -> None:
    # Seven rows divide unevenly among two and among three; at least two rows a share, for batch statistics.
    rows = 7 if max(widths) < 4 else 8
    optimizer, narrow = EXAMPLES[example]
    case = text_case(example, text_of(example, OPTIMIZERS[optimizer], **narrow))
    plan = case.plan(widths, micro_batches=3, rows=rows, schedule=schedule, recompute=recompute)
    trains_as_plain(pool, case, plan, tmp_path)
