"""``autopar run --update-profile``: what a run measured, planned with again."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.capture.source import load
from autopar.cli import main
from autopar.examples import __path__ as examples
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.report import Report
from autopar.profiler import ProfileOptions, profile

Command = Callable[..., str]
WRONG_S = 1.0
"""Far from what a layer takes on any machine, however busy."""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run autopar in this process: starting one takes longer than all the rest."""

    def call(code: int, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["autopar", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        stderr = capsys.readouterr().err
        assert int(ended.value.code or 0) == code, stderr
        return stderr

    return call


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model, and a profile of it whose times are all wrong."""
    (folder,) = examples
    shutil.copy(Path(folder) / "mlp.py", tmp_path / "mlp.py")
    monkeypatch.chdir(tmp_path)
    measured = profile(load("mlp.py"), ProfileOptions(batch=64, device="cpu", budget_s=1.0))
    layers = tuple(
        layer.model_copy(
            update={
                "costs": tuple(
                    cost.model_copy(update={"forward_s": WRONG_S, "backward_s": 2 * WRONG_S}) for cost in layer.costs
                )
            }
        )
        for layer in measured.layers
    )
    measured.model_copy(update={"layers": layers}).save("profile.json")
    return tmp_path


@pytest.mark.slow
def test_a_profile_that_was_wrong_predicts_what_a_run_measured_once_the_run_has_updated_it(
    here: Path, command: Command
) -> None:
    stages = ["--gpus", "2", "--stages", "0-3:1,4-10:1", "--micro-batches", "2", "--schedule", "1f1b"]
    command(0, "plan", "profile.json", *stages)
    before = Profile.load("profile.json")
    assert "--output new.json: names what --update-profile writes" in command(2, "run", "-o", "new.json")
    assert "profile.json exists; pass --overwrite" in command(2, "run", "--update-profile")
    refused = command(2, "run", "--update-profile", "-o", "plan.json", "--overwrite")
    assert "plan.json is read by this command" in refused
    (here / "new").mkdir()
    said = command(0, "run", "--steps", "12", "--update-profile", "-o", "new/profile.json")
    assert "`autopar plan new/profile.json` plans with what was measured" in " ".join(said.split())
    assert before == Profile.load("profile.json")

    report = Report.load("report.json")
    assert {"F", "B", "U"} <= {each.kind for each in report.kinds}
    assert all(each.ratio < 0.5 for each in report.kinds if each.kind in "FB")
    command(0, "plan", "new/profile.json", *stages, "-o", "again.json")
    again, first = Plan.load("again.json"), Plan.load("plan.json")
    assert again.model.source == "mlp.py"
    measured_s = report.step_s.median
    assert abs(again.predicted.step_s - measured_s) < abs(first.predicted.step_s - measured_s) / 4
    if (here / "new" / "cluster.json").exists():
        (link,) = Cluster.load("new/cluster.json").links
        assert link.provenance == "measured"

    with (here / "profile.json").open("a") as file:
        file.write("\n")
    assert "has changed since the plan was made" in command(4, "run", "--update-profile", "-o", "other.json")


@pytest.mark.usefixtures("here")
def test_times_of_parts_of_layers_are_not_taken_over(command: Command) -> None:
    command(0, "plan", "profile.json", "--gpus", "2", "--stages", "0-10:1x2", "--micro-batches", "2")
    refused = command(2, "run", "--update-profile", "--overwrite")
    assert "--update-profile: stage 0 runs each replica on 2 devices, which nothing prices yet" in refused
    assert not Path("report.json").exists()
