"""A loss that does not add up is refused, or accepted and stated; a plan that does not divide it says nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.formats.plan import Plan
from autopar.formats.profile import Profile

Run = Callable[..., tuple[int, str, str]]

MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

def dataset():
    return torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 4))

def loss(output, batch):
    return nn.functional.cross_entropy(output @ output.T, torch.arange(output.shape[0]))
"""
STATED = "loss and gradients of a mini-batch differ by"


@pytest.mark.slow
def test_an_accepted_loss_is_stated_by_profile_plan_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    code, _, err = command("profile", "model.py", "--batch", "8")
    assert code == 4
    assert "pass --accept-loss, then plan with --micro-batches 1" in err.splitlines()[-1]
    code, _, err = command("profile", "model.py", "--batch", "8", "--accept-loss")
    assert code == 0, err
    difference = Profile.load("profile.json").loss_difference
    assert difference is not None
    assert f"{difference:.2g}, as accepted" in err
    code, _, err = command("plan", "--gpus", "1", "--micro-batches", "2")
    assert code == 0, err
    assert STATED in err
    plan = Plan.load("plan.json")
    assert plan.loss_difference == difference
    code, _, err = command("run", "--steps", "1")
    assert code == 0, err
    notes = json.loads(Path("report.json").read_text())["notes"]
    assert any(STATED in note for note in notes)


@pytest.mark.slow
def test_plans_that_do_not_divide_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    assert command("profile", "model.py", "--batch", "8", "--accept-loss")[0] == 0
    for stages, gpus, said in (("0-2:1", "1", False), ("0-1:1,2:1", "2", False), ("0-2:2", "2", True)):
        code, _, err = command(
            "plan", "--micro-batches", "1", "--gpus", gpus, "--stages", stages, "--overwrite", "-o", f"{gpus}.json"
        )
        assert code == 0, err
        assert (STATED in err) == said, stages
