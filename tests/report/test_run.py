"""A run's report, a verification and a program as tables: every figure in its row, and what is left out is said."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from autopar.formats.checkpoint import Checkpoint, CheckpointView
from autopar.formats.program import Action, Program, RankProgram
from autopar.formats.report import Difference, KindTimes, RankTimes, Report, StepTimes, Verification
from autopar.report.run import render, render_checkpoints, render_program, render_verification

KEPT = Path(__file__).parents[1] / "formats" / "kept" / "report.json"


def _rows(show: Callable[[Console], None], width: int = 200) -> list[str]:
    """Return every line that is printed, single spaces between its words."""
    stream = io.StringIO()
    show(Console(file=stream, width=width))
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]


def _report() -> Report:
    ranks = tuple(
        RankTimes(
            rank=rank,
            stages=(rank, 3 - rank),
            replica=0,
            compute_s=0.1 * (rank + 1),
            update_s=0.02,
            reduce_s=0.03,
            waiting_s=0.04,
            transfer_s=0.05,
            idle_s=0.06,
            in_flight=(4, 5),
            predicted_in_flight=(6, 7),
        )
        for rank in range(2)
    )
    kinds = (KindTimes(kind="SG", actions=12, measured_s=0.003, predicted_s=0.002, ratio=1.5),)
    changes = {
        "ranks": 2,
        "steps": 21,
        "loss": tuple(float(step + 1) for step in range(21)),
        "gradient_norm": (None, *(0.5,) * 20),
        "step_s": StepTimes(median=0.25, p10=0.2, p90=0.3, longest=0.7, first=0.9),
        "predicted_step_s": 0.2,
        "error": -0.2,
        "predicted_compute": "estimated",
        "predicted_communication": "measured",
        "peak_bytes": (2**20, 2**21),
        "predicted_peak_bytes": (3 * 2**20, 2**22),
        "rank_times": ranks,
        "kinds": kinds,
        "notes": ("a [note]",),
    }
    return Report.load(KEPT).model_copy(update=changes)


def test_where_time_and_memory_went_is_told_rank_by_rank() -> None:
    rows = _rows(lambda console: render(_report(), console))
    spent = "20 ms 30 ms 40 ms 50 ms 60 ms"
    assert f"0 0, 3 0 100 ms {spent}" in rows
    assert f"1 1, 2 0 200 ms {spent}" in rows
    assert "0 1 MiB 3 MiB 4, 5 6, 7" in rows
    assert "1 2 MiB 4 MiB 4, 5 6, 7" in rows
    assert "SG message back 12 3 ms 2 ms 1.5 x" in rows
    assert "note: a [note]" in rows


def test_the_prediction_stands_beside_the_measurement_with_where_it_is_from() -> None:
    rows = _rows(lambda console: render(_report(), console))
    assert "measured step (median) 250 ms (p10 200 ms, p90 300 ms)" in rows
    assert "first step (left out), longest of the others 900 ms, 700 ms" in rows
    assert "predicted step 200 ms (computing estimated, communication measured)" in rows
    assert "error -20.0 %" in rows
    # Eight of 21 steps, first and last among them, as far apart as can be.
    assert "step 1 4 7 10 12 15 18 21" in rows
    assert "loss 1 4 7 10 12 15 18 21" in rows
    assert "gradient norm overflow 0.5 0.5 0.5 0.5 0.5 0.5 0.5" in rows


@pytest.mark.parametrize("count", [1, 200, 201, 250])
def test_a_long_program_says_how_many_actions_it_leaves_out(count: int) -> None:
    actions = [Action("F", 0, index) for index in range(count)]
    program = Program((RankProgram.of(actions), RankProgram.of([Action("U", 0)])))
    words = " ".join(_rows(lambda console: render_program(program, console), 4000)).split()
    shown = [str(action) for action in actions[:200]]
    at = words.index(shown[0])
    assert words[at - 2 : at + len(shown)] == ["0", str(count), *shown]
    left = ["and", str(count - 200), "more"] if count > 200 else []
    assert words[at + len(shown) :][: len(left) + 3] == [*left, "1", "1", "U@0"]


def test_a_verification_shows_what_differs_beside_what_may() -> None:
    differences = (
        Difference("losses", 3, 1e-12, "step 1", 1e-9, "the largest loss"),
        Difference("gradients", 40, None, "w on rank 1", 1e-9, "the norm"),
    )
    found = Verification(1, 4, "float64", "rounding of sums", differences, ("shares differ",), ("a note",))
    rows = _rows(lambda console: render_verification(found, console))
    assert "1 step of 4 ranks and of the plain loop, in float64" in rows
    assert "losses 3 1e-12 1e-09 step 1" in rows
    assert "gradients 40 no number 1e-09 w on rank 1" in rows
    assert "differences are divided: losses by the largest loss; gradients by the norm" in rows
    assert rows[-2:] == ["by choice: shares differ", "note: a note"]


def test_checkpoints_are_rows_of_what_saved_them_and_whether_they_are_sound() -> None:
    manifest = Checkpoint.load(KEPT.with_name("checkpoint.json"))
    found = [
        CheckpointView(3, Path("saved/step-3"), manifest, None, verified=True),
        CheckpointView(6, Path("saved/step-6"), manifest, None),
        CheckpointView(9, Path("saved/step-9"), manifest, "w.safetensors has other bytes"),
        CheckpointView(12, Path("saved/step-12"), None, "no manifest.json"),
    ]
    rows = _rows(lambda console: render_checkpoints(found, console))
    assert rows[0] == "Checkpoints in saved"
    ends = [(row.split()[0], row.split()[-1]) for row in rows if row[:1].isdigit()]
    assert ends == [("3", "verified"), ("6", "verified"), ("9", "damaged"), ("12", "damaged")]
    assert sum("not verified" in row for row in rows) == 1
    assert rows[-2:] == ["step 9: w.safetensors has other bytes", "step 12: no manifest.json"]
