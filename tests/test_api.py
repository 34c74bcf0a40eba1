"""The library: a function for every command, errors in its words, and flags on the command line only."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import typer

import autopar
from autopar.cli import app
from autopar.cli.arguments import ARGUMENTS, as_flags
from autopar.errors import AutoparError, InfeasibleError, UsageError
from autopar.examples import __path__ as examples
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions
from paths import ROOT
from random_problems import gpt_profile, local_cluster

Command: TypeAlias = Any  # typer's own, whose classes it does not export
Run = Callable[..., tuple[int, str, str]]

COMMANDS = {
    "profile": ("profile", "estimate", "links"),
    "plan": ("plan",),
    "simulate": ("simulate",),
    "compare": ("compare",),
    "rehearse": ("rehearse",),
    "verify": ("verify",),
    "run": ("train", "recalibrate"),
    "show": ("show",),
    "import": ("import_pipedream", "import_piper", "import_profiles"),
    "probe": ("probe",),
}
"""Functions by command; `worker` is a part of `run`, `demo` a sequence of others, and `cluster list` lists tables."""


def _options(command: Command) -> Iterator[str]:
    for each in getattr(command, "commands", {}).values():
        yield from _options(each)
    for parameter in command.params:
        yield from parameter.opts


def test_every_command_has_its_function_and_every_function_its_command() -> None:
    group = typer.main.get_command(app)
    commands = {*group.commands, *group.commands["cluster"].commands} - {"cluster", "worker", "demo", "list"}  # type: ignore[attr-defined]
    assert commands == set(COMMANDS)
    functions = {name for names in COMMANDS.values() for name in names}
    assert functions == {name for name in autopar.__all__ if name.islower()} - {"materialize"}
    assert all(callable(getattr(autopar, name)) for name in functions)


def test_every_argument_that_errors_name_is_an_option_and_every_option_of_plans_such_an_argument() -> None:
    flags = set(_options(typer.main.get_command(app)))
    assert {as_flags(f"`{name}`") for name in ARGUMENTS} <= flags
    # Of the search's own, nothing can be typed.
    assert {field.name for field in fields(PlanOptions)} - ARGUMENTS == {"max_candidates"}


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file, without docstrings."""
    tree = ast.parse(path.read_text())
    told = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for each in ast.walk(tree):
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and id(each) not in told:
            yield each.lineno, each.value


OTHERS = ("--nproc-per-node", "--master-port", "--distribution", "--query-gpu", "--id", "--format", "--trust-paths")
"""Flags of launchers, of nvidia-smi, and of the tool as a whole."""
TYPED = re.compile(r"`autopar [^`]*`|\(--sequence\)")
"""Commands as they are typed, and a note of the tables of `autopar profile`."""


def test_no_text_of_the_library_names_a_flag() -> None:
    flags = set(_options(typer.main.get_command(app)))
    folders = (ROOT / "autopar", *(ROOT / each for each in ("planner", "profiler", "runtime")))
    files = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    files = {path for path in files if not {"cli", "examples"} & set(path.relative_to(ROOT).parts)}
    assert len(files) > 200
    named = [
        f"{path.relative_to(ROOT)}:{line} {flag}"
        for path in sorted(files)
        for line, text in _texts(path)
        for flag in re.findall(r"--[a-z][a-z-]*", TYPED.sub("", text))
        if flag in flags and flag not in OTHERS
    ]
    assert named == []


@pytest.mark.parametrize(
    ("options", "said", "typed"),
    [
        ({"gpus": 0}, "`gpus` must be at least 1, found 0", "--gpus must be at least 1, found 0"),
        ({"gpus": 2, "micro_batches": 5}, "`micro_batches=5` does not divide", "--micro-batches 5 does not divide"),
        ({"gpus": 2, "forbid_cut": ("h 9",)}, "`forbid_cut='h 9'`: no layer", "--forbid-cut 'h 9': no layer"),
        ({"gpus": 2, "pin": ("0",)}, "`pin='0'`", "--pin 0"),
    ],
)
def test_errors_name_arguments_in_python_and_flags_on_the_command_line(
    options: dict[str, Any], said: str, typed: str, tmp_path: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = gpt_profile(blocks=4)
    with pytest.raises(UsageError, match=re.escape(said)):
        autopar.plan(profile, local_cluster(2), **options)
    monkeypatch.chdir(tmp_path)
    profile.save("profile.json")
    words = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value[0] if isinstance(value, tuple) else value)]
    code, _, err = command("plan", *words)
    assert code == 2
    assert typed in err


def test_a_remedy_is_typed_as_it_is_said_in_python_and_on_the_command_line(
    tmp_path: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profile, cluster = gpt_profile(blocks=4), local_cluster(2)
    with pytest.raises(InfeasibleError) as caught:
        autopar.plan(profile, cluster, gpus=2, memory_bytes="1MiB")
    (remedy,) = re.findall(r"with `(memory_bytes='\w+')`", str(caught.value))
    text = ast.literal_eval(remedy.partition("=")[2])
    autopar.plan(profile, cluster, gpus=2, memory_bytes=text)
    profile.save("profile.json")
    cluster.save("cluster.json")
    code, _, err = command("plan", "--gpus", "2", "--memory", "1MiB")
    assert (code, f"with --memory {text}" in err) == (3, True)


def test_a_run_from_python_is_measured_predicted_rehearsed_verified_and_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = examples
    shutil.copy(Path(folder) / "mlp.py", tmp_path / "mlp.py")
    monkeypatch.chdir(tmp_path)
    profile = autopar.profile("mlp.py", 64, budget_s=0.5)
    assert profile.model.source == "mlp.py"
    plan = autopar.plan(profile, autopar.links(ranks=2), stages=f"0-2:1,3-{len(profile.layers) - 1}:1")
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
    assert autopar.show("profile.json").draw is not None
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
        (lambda: autopar.profile("mlp.py", {"x": 1}), "takes the samples of a step as batch"),
        (lambda: autopar.profile("mlp.py", 4, loss=max), "takes no loss for mlp.py"),
        (lambda: autopar.estimate("mlp.py", 4, device="cpu"), "`device='cpu'`: is measured, not estimated"),
        (lambda: autopar.profile("mlp.py", 4, device="H100", threads=2), "`threads=2`: says how to measure"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(call: Callable[[], Profile], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        call()
