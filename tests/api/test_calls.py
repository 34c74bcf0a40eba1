"""The library: a function for every command, from measuring to planning again, and refusals in its words."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

import autopar
from autopar.cli import app
from autopar.errors import AutoparError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from profiled import write_profiled
from random_problems import gpt_profile, local_cluster

COMMANDS = {
    "profile": ("profile", "estimate", "links"),
    "plan": ("plan",),
    "simulate": ("simulate",),
    "compare": ("compare", "compare_runs"),
    "rehearse": ("rehearse",),
    "verify": ("verify",),
    "run": ("train", "recalibrate"),
    "show": ("show",),
    "env": ("environment",),
    "import": ("import_layout", "import_pipedream", "import_profiles", "import_torchtitan"),
    "probe": ("probe",),
    "list": ("checkpoints",),
    "export": ("export", "export_checkpoint"),
}
"""Functions by command; `worker` is a part of `run`, `demo` a sequence of others, `cluster list` lists tables,
`cache` is about a folder of the user's, and `init` writes a file."""


def test_every_command_has_its_function_and_every_function_its_command() -> None:
    group = typer.main.get_command(app)
    several = ("cluster", "checkpoint")
    commands = {*group.commands, *(name for each in several for name in group.commands[each].commands)}  # type: ignore[attr-defined]
    commands -= {*several, "worker", "demo", "cache", "init"}
    assert commands == set(COMMANDS)
    functions = {name for names in COMMANDS.values() for name in names}
    assert functions == {name for name in autopar.__all__ if name.islower()} - {"errors", "materialize"}
    assert all(callable(getattr(autopar, name)) for name in functions)


@pytest.mark.slow
@pytest.mark.core
def test_a_plan_is_predicted_rehearsed_run_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_profiled(tmp_path, "tanh_chain")
    profile = Profile.load("profile.json")
    plan = autopar.plan(profile, Cluster.load("cluster.json"), stages="0-2:1,3-4:1")
    plan.save("plan.json")
    for which in (plan, "plan.json"):
        peaks = autopar.rehearse(which)
        assert len(peaks) == len(plan.stages)
        assert all(peak > 0 for peak in peaks)
    assert autopar.verify(plan, steps=1).equal
    outcome = autopar.train(plan, steps=4, time_layers=True)
    assert outcome.report.steps == 4
    assert outcome.report.kinds
    again, cluster = autopar.recalibrate(plan, outcome)
    assert [layer.name for layer in again.layers] == [layer.name for layer in profile.layers]
    assert autopar.plan(again, cluster, gpus=2).predicted.step_s > 0
    # A plan's file names no profile here: what is predicted of it has to be given.
    with pytest.raises(AutoparError, match=r"\$.profile: the plan records no profile; pass `profile`"):
        autopar.simulate("plan.json")
    assert plan.origin is not None
    timeline = autopar.simulate("plan.json", *plan.origin)
    assert timeline.end_s == plan.timeline().end_s == autopar.simulate(plan).end_s
    with pytest.raises(UsageError, match=r"train\(\) has no option 'stesp'"):
        autopar.train(plan, stesp=4)


def test_files_are_shown_and_imported_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profile, cluster = gpt_profile(blocks=4), local_cluster(2)
    profile.save("profile.json")
    plan = autopar.plan(profile, cluster, gpus=2)
    plan.save("plan.json")
    shown = autopar.show("plan.json")
    assert shown.kind == "plan"
    assert str(shown) == plan.explain()
    assert Plan.parse(shown.json, Path("plan.json")) == Plan.load("plan.json")
    assert list(autopar.show("profile.json").pictures) == ["layers"]
    cluster.save("cluster.json")
    rows = autopar.compare("profile.json", "cluster.json", gpus=2).rows
    assert any(row.step_s == plan.predicted.step_s for row in rows)
    assert autopar.plan("profile.json", "cluster.json", gpus=2) == plan
    other = profile.model_copy(update={"device": profile.device.model_copy(update={"name": "another"})})
    other.save("other.json")
    joined = autopar.import_profiles(["profile.json", "other.json"])
    assert [each.device.name for each in joined.others] == ["another"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: autopar.plan(gpt_profile(blocks=2), gpu=2), "plan() has no option 'gpu'; its options are gpus, batch"),
        (lambda: autopar.profile("mlp.py", {"x": 1}), "takes the samples of a step as batch"),
        (lambda: autopar.profile("mlp.py", 4, loss=max), "takes no loss for mlp.py"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(call: Callable[[], Profile], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        call()
