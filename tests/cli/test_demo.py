"""``autopar demo``, the whole journey on the bundled GPT, and the journey by commands, each a process of its own."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.report import Report
from autopar.formats.timeline import Timeline
from autopar.options.profile import ProfileOptions
from calls import Run, well
from suite import warm


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_pipelines_a_gpt_and_ends_with_what_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr("autopar.cli.demo.ProfileOptions", partial(ProfileOptions, budget_s=1.0))
    out, err = well(run, "demo", "--steps", "5", "--json")
    folder = tmp_path / "autopar-demo"
    report = Report.parse(out, folder / "report.json")
    assert report == Report.load(folder / "report.json")
    assert report.steps == 5
    assert report.loss[-1] < report.loss[0]
    assert len(Plan.load(folder / "plan.json").stages) >= 2
    origins = {Timeline.load(folder / f"{name}.trace.json").origin for name in ("measured", "predicted")}
    assert origins == {"measured", "simulated"}
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    ending = err.rpartition("What happened")[2]
    for word in ("loss", "step, predicted", "step, measured", "error", "report.json", "timeline.png"):
        assert word in ending


MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

def dataset():
    return torch.utils.data.TensorDataset(torch.randn(64, 6), torch.ones(64, 3))

def loss(output, batch):
    return (output - batch[1]).square().mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""
JOURNEY = """\
profile model.py --batch 8 --budget 1 --tensor 1
plan --gpus 2 --stages 0-1:1,2-4:1 --micro-batches 2 --schedule 1f1b
simulate --trace predicted.json
run --steps 12 --trace measured.json --checkpoint kept --every 8
run --steps 16 --checkpoint kept --resume --save trained
show measured.json --over predicted.json --png step.png
verify --steps 2 --json
checkpoint export kept -o whole.safetensors
export torch -o order.csv
"""


@pytest.mark.slow
@pytest.mark.core
def test_a_model_is_profiled_planned_run_resumed_verified_and_exported(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    losses, out = list[float](), ""
    for line in JOURNEY.splitlines():
        command = [sys.executable, "-m", "autopar", *line.split()]
        done = warm.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert done.stderr, line
        if line.startswith("run"):
            losses.extend(Report.load(tmp_path / "report.json").loss)
        if line.startswith("verify"):
            out = done.stdout
    assert len(Profile.load(tmp_path / "profile.json").layers) == 5
    assert [len(stage.layers) for stage in Plan.load(tmp_path / "plan.json").stages] == [2, 3]
    assert len(losses) == 16
    assert losses[-1] < losses[0] / 2
    assert json.loads(out)["equal"]
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    weights = load_file(tmp_path / "whole.safetensors")
    assert len(weights) == 6
    trained = [load_file(each) for each in (tmp_path / "trained").glob("*.safetensors")]
    assert {name for each in trained for name in each} == weights.keys()
    assert (tmp_path / "order.csv").read_text().startswith("0F0,0SEND_F0,")
    assert (tmp_path / "stages.py").is_file()
