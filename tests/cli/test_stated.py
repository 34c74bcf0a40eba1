"""What has to be accepted is refused first, then stated by profile, plan and report: a loss, state that is logged."""

import json
from pathlib import Path

import pytest

from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from calls import Run, ended, well

SAMPLES = """
import torch
from torch import nn

def dataset():
    return torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 4))
"""
UNDIVIDED = f"""{SAMPLES}
def model():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

def loss(output, batch):
    return nn.functional.cross_entropy(output @ output.T, torch.arange(output.shape[0]))
"""
COUNTING = f"""{SAMPLES}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.state = {{"n": 0}}
    def forward(self, x):
        self.state["n"] += 1
        for step in self.steps:
            x = step(x)
        return x

def model(): return Net()
def loss(output, batch): return (output - batch[1]).square().mean()
"""
PROFILE = ("profile", "model.py", "--batch", "8")
DIFFER = "loss and gradients of a mini-batch differ by"


def notes_of_a_run(run: Run) -> str:
    well(run, "run", "--steps", "1")
    return " ".join(json.loads(Path("report.json").read_text())["notes"])


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_an_accepted_loss_is_stated_by_plans_that_divide_it(run: Run) -> None:
    Path("model.py").write_text(UNDIVIDED)
    ended(run, 4, "pass --accept-loss, then plan with --micro-batches 1", *PROFILE)
    _, err = well(run, *PROFILE, "--accept-loss")
    difference = Profile.load("profile.json").loss_difference
    assert difference is not None
    assert f"{difference:.2g}, as accepted" in err
    for stages, gpus, said in (("0-2:1", "1", False), ("0-1:1,2:1", "2", False), ("0-2:2", "2", True)):
        asked = ("--micro-batches", "1", "--gpus", gpus, "--stages", stages)
        assert (DIFFER in well(run, "plan", *asked)[1]) == said, stages
    assert DIFFER in well(run, "plan", "--gpus", "1", "--micro-batches", "2")[1]
    assert Plan.load("plan.json").loss_difference == difference
    assert DIFFER in notes_of_a_run(run)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_ignored_state_is_in_profile_plan_and_report_and_in_no_older_file(run: Run) -> None:
    Path("model.py").write_text(COUNTING)
    ended(run, 4, "Net.state['n'] changes from 1 to 2 with every forward", *PROFILE)
    Path("model.py").write_text(COUNTING + 'ignored_state = ["Net.state"]\n')
    assert "ignored state: Net.state" in well(run, *PROFILE)[1]
    said = "Python state is ignored, which forwards change and only log: Net.state"
    assert said in well(run, "plan", "--gpus", "1")[1]
    assert Profile.load("profile.json").ignored_state == Plan.load("plan.json").ignored_state == ("Net.state",)
    assert Plan.load("plan.json").caveats[0] in notes_of_a_run(run)
    for name, kind in (("profile.json", Profile), ("plan.json", Plan)):
        content = json.loads(Path(name).read_text())
        del content["ignored_state"]
        Path(name).write_text(json.dumps(content))
        assert kind.load(name).ignored_state == ()
