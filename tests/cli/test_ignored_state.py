"""State that is only logged is named once, and repeated by profile, plan and report."""

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

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.state = {"n": 0}
    def forward(self, x):
        self.state["n"] += 1
        for step in self.steps:
            x = step(x)
        return x

def model(): return Net()
def dataset(): return torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 4))
def loss(output, batch): return (output - batch[1]).square().mean()
"""


@pytest.mark.slow
def test_ignored_state_is_in_profile_plan_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    code, _, err = command("profile", "model.py", "--batch", "8")
    assert code == 4
    assert "Net.state['n'] changes from 1 to 2 with every forward" in err.splitlines()[-1]
    Path("model.py").write_text(MODEL + 'ignored_state = ["Net.state"]\n')
    code, _, err = command("profile", "model.py", "--batch", "8")
    assert code == 0, err
    assert "ignored state: Net.state" in err
    assert Profile.load("profile.json").ignored_state == ("Net.state",)
    code, _, err = command("plan", "--gpus", "1")
    assert code == 0, err
    assert "Python state is ignored, which forwards change and only log: Net.state" in " ".join(err.split())
    plan = Plan.load("plan.json")
    assert plan.ignored_state == ("Net.state",)
    code, _, err = command("run", "--steps", "1")
    assert code == 0, err
    assert plan.caveats[0] in json.loads(Path("report.json").read_text())["notes"]


@pytest.mark.slow
def test_files_without_the_key_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL + 'ignored_state = ["Net.state"]\n')
    assert command("profile", "model.py", "--batch", "8")[0] == 0
    assert command("plan", "--gpus", "1")[0] == 0
    for name, kind in (("profile.json", Profile), ("plan.json", Plan)):
        content = json.loads(Path(name).read_text())
        del content["ignored_state"]
        Path(name).write_text(json.dumps(content))
        assert kind.load(name).ignored_state == ()
