"""``autopar run --update-profile``: what a run measured, planned with again; what a profile, plan and report state.

Of stages whose replicas several ranks run: planned, rehearsed, verified, run, gone on with, exported; or refused.
"""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.report import Report
from calls import Run, ended, refused, well
from profiled import times_as_long, write_profiled


@pytest.mark.slow
def test_a_profile_that_was_wrong_predicts_what_a_run_measured_once_the_run_has_updated_it(run: Run) -> None:
    write_profiled(Path(), "mlp-64")
    # Far from what a layer takes on any machine, however busy.
    before = times_as_long(Profile.load("profile.json"), 3000)
    before.save("profile.json")
    stages = ("--gpus", "2", "--stages", "0-3:1,4-10:1", "--micro-batches", "2", "--schedule", "1f1b")
    well(run, "plan", *stages)
    refused(run, 2, "--output new.json: names what --update-profile writes", "run", "-o", "new.json")
    refused(run, 2, "profile.json exists; pass --overwrite", "run", "--update-profile")
    replaced = ("run", "--update-profile", "-o", "plan.json", "--overwrite")
    refused(run, 2, "plan.json is read by this command", *replaced)
    Path("new").mkdir()
    _, said = well(run, "run", "--steps", "12", "--update-profile", "-o", "new/profile.json")
    assert "`autopar plan new/profile.json` plans with what was measured" in said
    assert before == Profile.load("profile.json")

    report = Report.load("report.json")
    assert {"F", "B", "U"} <= {each.kind for each in report.kinds}
    assert all(each.ratio < 0.5 for each in report.kinds if each.kind in "FB")
    well(run, "plan", "new/profile.json", *stages, "-o", "again.json")
    again, first = Plan.load("again.json"), Plan.load("plan.json")
    assert again.model.source == "mlp.py"
    measured_s = report.step_s.median
    assert abs(again.predicted.step_s - measured_s) < abs(first.predicted.step_s - measured_s) / 4
    if Path("new/cluster.json").exists():
        (link,) = Cluster.load("new/cluster.json").links
        assert link.provenance == "measured"

    with Path("profile.json").open("a") as file:
        file.write("\n")
    refused(run, 4, "has changed since the plan was made", "run", "--update-profile", "-o", "other.json")


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
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(4, 4) for _ in range(3)))
        self.state = {{"n": 0}}
    def forward(self, x):
        self.state["n"] += 1
        return super().forward(x)

def model(): return Net()
def loss(output, batch): return (output - batch[1]).square().mean()
"""
PROFILE = ("profile", "model.py", "--batch", "8")
DIFFER = "loss and gradients of a mini-batch differ by"


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_accepted_losses_and_ignored_state_are_stated_by_plans_and_reports(run: Run) -> None:
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
    well(run, "run", "--steps", "1")
    assert DIFFER in " ".join(Report.load("report.json").notes)
    Path("model.py").write_text(COUNTING)
    ended(run, 4, "Net.state['n'] changes from 1 to 2 with every forward", *PROFILE)
    Path("model.py").write_text(COUNTING + 'ignored_state = ["Net.state"]\n')
    assert "ignored state: Net.state" in well(run, *PROFILE)[1]
    said = "Python state is ignored, which forwards change and only log: Net.state"
    assert said in well(run, "plan", "--gpus", "1")[1]
    assert Profile.load("profile.json").ignored_state == Plan.load("plan.json").ignored_state == ("Net.state",)
    well(run, "run", "--steps", "1")
    assert Plan.load("plan.json").caveats[0] in Report.load("report.json").notes
    for name, kind in (("profile.json", Profile), ("plan.json", Plan)):
        older = kind.load(name).model_dump_json(exclude={"ignored_state"})
        assert kind.parse(older, Path(name)).ignored_state == ()


@pytest.mark.slow
def test_teams_are_planned_verified_run_and_gone_on_with_by_others(run: Run) -> None:
    write_profiled(Path(), "narrow_gpt")
    stages = "0-4:1x2,5-10:1x2"
    _, err = well(run, "plan", "--stages", stages, "--sequence-parallel", "--micro-batches", "2")
    assert "2 devices each" in err
    assert all(stage.cuts and stage.sequence for stage in Plan.load("plan.json").stages)
    out, _ = well(run, "verify", "--steps", "1", "--json")
    assert all(each["equal"] for each in json.loads(out)["differences"])
    well(run, "run", "--steps", "3", "--checkpoint", "kept", "--clip-norm", "1", "--save", "trained")
    assert len(Report.load("report.json").loss) == 3
    well(run, "plan", "--stages", "0-10:1", "-o", "alone.json", "--micro-batches", "2")
    common = ("run", "alone.json", "--steps", "5", "--clip-norm", "1", "--save", "trained")
    refused(run, 2, "trained is not empty; pass --overwrite", *common)
    # A run that goes on replaces the weights that it has saved before.
    _, err = well(run, *common, "--checkpoint", "kept", "--resume")
    assert "went on from the checkpoint of step 3" in err
    assert "initial weights: the checkpoint of step 3" in err
    well(run, "checkpoint", "export", "kept", "-o", "whole.safetensors")
    assert load_file("whole.safetensors")


@pytest.mark.slow
def test_what_teams_cannot_is_refused_in_one_line(run: Run) -> None:
    write_profiled(Path(), "narrow_gpt")
    well(run, "plan", "--stages", "0-10:1x2")
    for line, said in {
        "plan --stages 0-10:1x3": "--stages: nothing in stage 0",
        "plan --stages 0-10:2x3": "splits in 3 parts; the profile has splits in 2, 4, 8",
        "plan --stages 0-10:1 --sequence-parallel": "--sequence-parallel is of --stages",
        "plan --stages 0-10:1x2 --cluster 4x1xH100 --times-of cpu": "pass --across-nodes",
        "plan --stages 0-10:1x4": "what a part of layer wte costs on one of 4 devices; profile again, with --tensor 4",
        "plan --stages 0-10:1x2 --objective cost": "--stages does not go with --objective cost",
        "run --compile": "--compile",
        "run --update-profile": "--update-profile: a run measures stages, and in stage 0 parts of layers",
        "export torch": "2 devices run each replica together",
    }.items():
        ended(run, 2, said, *line.split())
