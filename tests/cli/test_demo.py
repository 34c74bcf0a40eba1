"""``autopar demo``: the whole journey on the bundled GPT."""

import sys
from pathlib import Path

import pytest

from autopar.formats.plan import Plan
from autopar.formats.report import Report
from autopar.formats.timeline import Timeline
from suite import warm


@pytest.mark.slow
def test_the_demo_pipelines_a_gpt_and_ends_with_what_happened(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autopar", "demo", "--steps", "5", "--json"]
    done = warm.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "autopar-demo"
    report = Report.parse(done.stdout, folder / "report.json")
    assert report == Report.load(folder / "report.json")
    assert report.steps == 5
    assert report.loss[-1] < report.loss[0]
    assert len(Plan.load(folder / "plan.json").stages) >= 2
    origins = {Timeline.load(folder / f"{name}.trace.json").origin for name in ("measured", "predicted")}
    assert origins == {"measured", "simulated"}
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    ending = done.stderr.rpartition("What happened")[2]
    for word in ("loss", "step, predicted", "step, measured", "error", "report.json", "timeline.png"):
        assert word in ending
