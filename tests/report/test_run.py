"""A run's report, a verification and a program as tables: every figure in its row, and what is left out is said."""

from pathlib import Path
from typing import Any

import pytest

from autopar.formats import report as reports
from autopar.formats.checkpoint import Checkpoint, CheckpointView
from autopar.formats.program import Action, Program, RankProgram
from autopar.report import run
from shown import shown

KEPT = Path(__file__).parents[1] / "formats" / "kept" / "report.json"


def _report() -> reports.Report:
    same: dict[str, Any] = {"update_s": 0.02, "reduce_s": 0.03, "waiting_s": 0.04, "transfer_s": 0.05, "idle_s": 0.06}
    same |= {"loading_s": 0.01, "replica": 0, "in_flight": (4, 5), "predicted_in_flight": (6, 7)}
    ranks = tuple(reports.RankTimes(rank=at, stages=(at, 3 - at), compute_s=0.1 * (at + 1), **same) for at in range(2))
    kinds = (reports.KindTimes(kind="SG", actions=12, measured_s=0.003, predicted_s=0.002, ratio=1.5),)
    changes = {
        "ranks": 2,
        "steps": 21,
        "first_step": 100,
        "loss": tuple(float(step + 1) for step in range(21)),
        "gradient_norm": (None, *(0.5,) * 20),
        "step_s": reports.StepTimes(median=0.25, p10=0.2, p90=0.3, longest=0.7, first=0.9),
        "predicted_step_s": 0.2,
        "error": -0.2,
        "predicted_compute": "estimated",
        "predicted_communication": "measured",
        "peak_bytes": (2**20, 2**21),
        "predicted_peak_bytes": (3 * 2**20, 2**22),
        "rank_times": ranks,
        "kinds": kinds,
        "causes": (reports.CauseTimes(cause="between actions", measured_s=-0.05, predicted_s=0.05),),
        "checkpoints": reports.CheckpointTimes(steps=(5, 10), pause_s=0.01, busy_s=0.02, buffers_bytes=(2, 4096, 4096)),
        "loading": reports.LoadingTimes(loaders=0, waiting_s=0.05, work_s=0.06, loaders_needed=2),
        "samples_per_s": 32.0,
        "flops_utilisation": 0.375,
        "model_flops": 1e12,
        "initial_weights": "model() with seed 0",
        "notes": ("a [note]",),
    }
    return reports.Report.load(KEPT).model_copy(update=changes)


def test_every_figure_of_a_report_stands_in_its_row() -> None:
    spent = "10 ms 20 ms 30 ms 40 ms 50 ms 60 ms"
    expected = {
        f"0 0, 3 0 100 ms {spent}",
        f"1 1, 2 0 200 ms {spent}",
        "0 1 MiB 3 MiB 4, 5 6, 7",
        "1 2 MiB 4 MiB 4, 5 6, 7",
        "SG message back 12 3 ms 2 ms 1.5 x",
        "measured step (median) 250 ms (p10 200 ms, p90 300 ms)",
        "first step (left out), longest of the others 900 ms, 700 ms",
        "predicted step 200 ms (computing estimated, communication measured)",
        "error -20.0 %",
        "samples per second 32",
        "model FLOPs utilisation 37.5 %",
        # Eight of 21 steps, first and last among them, as far apart as can be.
        "step 101 104 107 110 112 115 118 121",
        "loss 1 4 7 10 12 15 18 21",
        "gradient norm overflow 0.5 0.5 0.5 0.5 0.5 0.5 0.5",
        "between actions -50 ms 50 ms -40.0 %",
        "loaders of a host none: ranks read for themselves",
        "reading and collating took, of a step 60 ms",
        "waited for it, with nothing to compute 50 ms (20.0 % of a step)",
        "loaders that would keep up 2",
        "saved 2, the newest after step 10",
        "training waited for one (median) 10 ms",
        "writing one took of a processor 20 ms",
        "copies in memory (most of a rank) 4 KiB",
        "initial weights: model() with seed 0",
        "note: a [note]",
    }
    assert expected <= set(shown(run.render(_report())))


@pytest.mark.parametrize("count", [1, 200, 201, 250])
def test_a_long_program_says_how_many_actions_it_leaves_out(count: int) -> None:
    actions = [Action("F", 0, index) for index in range(count)]
    program = Program((RankProgram.of(actions), RankProgram.of([Action("U", 0)])))
    words = " ".join(shown(run.render_program(program), 4000)).split()
    first = [str(action) for action in actions[:200]]
    at = words.index(first[0])
    assert words[at - 2 : at + len(first)] == ["0", str(count), *first]
    left = ["and", str(count - 200), "more"] if count > 200 else []
    assert words[at + len(first) :][: len(left) + 3] == [*left, "1", "1", "U@0"]


def test_verifications_show_what_differs_and_checkpoints_are_rows() -> None:
    differences = (
        reports.Difference("losses", 3, 1e-12, "step 1", 1e-9, "the largest loss"),
        reports.Difference("gradients", 40, None, "w on rank 1", 1e-9, "the norm"),
    )
    found = reports.Verification(1, 4, "float64", "rounding of sums", differences, ("shares differ",), ("a note",))
    rows = shown(run.render_verification(found))
    assert "1 step of 4 ranks and of the plain loop, in float64" in rows
    assert "losses 3 1e-12 1e-09 step 1" in rows
    assert "gradients 40 no number 1e-09 w on rank 1" in rows
    assert "differences are divided: losses by the largest loss; gradients by the norm" in rows
    assert rows[-2:] == ["by choice: shares differ", "note: a note"]
    manifest = Checkpoint.load(KEPT.with_name("checkpoint.json"))
    read = ((manifest, None), (manifest, None), (manifest, "w.safetensors has other bytes"), (None, "no manifest.json"))
    found = [CheckpointView(3 * at, Path(f"saved/step-{3 * at}"), *each, at == 1) for at, each in enumerate(read, 1)]
    rows = shown(run.render_checkpoints(found))
    assert rows[0] == "Checkpoints in saved"
    ends = [(row.split()[0], row.split()[-1]) for row in rows if row[:1].isdigit()]
    assert ends == [("3", "verified"), ("6", "verified"), ("9", "damaged"), ("12", "damaged")]
    assert sum("not verified" in row for row in rows) == 1
    assert rows[-2:] == ["step 9: w.safetensors has other bytes", "step 12: no manifest.json"]
    rows = shown(run.render_manifest(manifest, "It"))
    assert "parameter 1 2" in rows
    began = [reports.BeganAction(step=step, action=f"F0@{step}", before_s=9.0 - step) for step in range(3)]
    box = reports.BlackBox(
        message="lost", date="now", ranks=(reports.RankActions(rank=4, doing="waiting", actions=tuple(began)),)
    )
    rows = shown(run.render_black_box(box))
    assert "4 waiting 7 s" in rows
    assert [row for row in rows if "F0@" in row] == ["2 F0@2", "1 F0@1", "0 F0@0"]
