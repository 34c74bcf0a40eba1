"""Stages whose replicas several ranks run: planned, rehearsed, verified, run, gone on with, exported; or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from autopar.formats.plan import Plan
from autopar.formats.report import Report
from profiled import write_profiled

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """Run autopar in a folder that holds a model and its profile; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    write_profiled(tmp_path, "narrow_gpt.py", command)
    return command


@pytest.fixture
def layers(run: Run) -> int:
    return len(json.loads(Path("profile.json").read_text())["layers"])


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.slow
def test_teams_are_planned_verified_run_and_gone_on_with_by_others(run: Run, layers: int) -> None:
    stages = f"0-4:1x2,5-{layers - 1}:1x2"
    code, _, err = run("plan", "--stages", stages, "--sequence-parallel", "--micro-batches", "2")
    assert code == 0, err
    assert "2 devices each" in err
    assert "which nothing prices" in words(err)
    plan = Plan.load("plan.json")
    assert all(stage.cuts and stage.sequence for stage in plan.stages)
    code, out, err = run("verify", "--steps", "2", "--json")
    assert code == 0, err
    assert all(each["equal"] for each in json.loads(out)["differences"])
    code, _, err = run("run", "--steps", "3", "--checkpoint", "kept", "--clip-norm", "1", "--save", "trained")
    assert code == 0, err
    losses = Report.load("report.json").loss
    assert len(losses) == 3
    assert run("plan", "--stages", f"0-{layers - 1}:1", "-o", "alone.json", "--micro-batches", "2")[0] == 0
    common = ("run", "alone.json", "--steps", "5", "--clip-norm", "1", "--save", "trained")
    code, _, err = run(*common)
    assert (code, "trained is not empty; pass --overwrite" in words(err)) == (2, True)
    # A run that goes on replaces the weights that it has saved before.
    code, _, err = run(*common, "--checkpoint", "kept", "--resume")
    assert code == 0, err
    assert "went on from the checkpoint of step 3" in words(err)
    assert "initial weights: the checkpoint of step 3" in words(err)
    assert run("checkpoint", "export", "kept", "-o", "whole.safetensors")[0] == 0
    assert load_file("whole.safetensors")


@pytest.mark.slow
def test_a_dry_run_holds_less_of_a_team_than_of_one_rank(run: Run, layers: int) -> None:
    held = []
    for size in (1, 2):
        assert run("plan", "--stages", f"0-{layers - 1}:1x{size}", "-o", "p.json", "--overwrite")[0] == 0
        code, out, err = run("rehearse", "p.json", "--json")
        assert code == 0, err
        held.append(json.loads(out)["peak_bytes"][0])
    assert held[0] > held[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("plan", "--stages", "0-{last}:1x3"), 2, "--stages: nothing in stage 0"),
        (("plan", "--stages", "0-{last}:1x3"), 2, "splits in 3 parts; the profile has splits in 2, 4, 8"),
        (("plan", "--stages", "0-{last}:1", "--sequence-parallel"), 2, "--sequence-parallel is of --stages"),
        (("plan", "--stages", "0-{last}:1x2", "--cluster", "4x1xH100", "--times-of", "cpu"), 2, "pass --across-nodes"),
        (("compare", "--stages", "0-{last}:1x2"), 2, "give them one device each"),
        (("simulate", "plan.json"), 2, "stage 0 runs each replica on 2 devices, which nothing prices yet"),
        (("run", "plan.json", "--compile"), 2, "--compile"),
        (("run", "plan.json", "--update-profile"), 2, "--update-profile"),
        (("export", "megatron", "plan.json"), 2, "2 devices run each replica of stage 0"),
    ],
)
def test_what_teams_cannot_is_refused_in_one_line(
    run: Run, layers: int, arguments: tuple[str, ...], code: int, said: str
) -> None:
    last = layers - 1
    assert run("plan", "--stages", f"0-{last}:1x2")[0] == 0
    found, _, err = run(*(each.format(last=last) for each in arguments))
    assert found == code, err
    assert said in words(err)
    assert "Traceback" not in err
