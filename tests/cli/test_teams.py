"""Stages whose replicas several ranks run: planned, rehearsed, verified, run, gone on with, exported; or refused."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from autopar.formats.plan import Plan
from autopar.formats.report import Report
from calls import Run, ended, refused, well
from profiled import write_profiled

LAST = 10
"""The last layer's number."""


@pytest.fixture
def run(run: Run) -> Run:
    """Run autopar in a folder that holds a model and its profile; return (exit code, stdout, stderr)."""
    write_profiled(Path(), "narrow_gpt")
    return run


@pytest.mark.slow
def test_teams_are_planned_verified_run_and_gone_on_with_by_others(run: Run) -> None:
    stages = f"0-4:1x2,5-{LAST}:1x2"
    _, err = well(run, "plan", "--stages", stages, "--sequence-parallel", "--micro-batches", "2")
    assert "2 devices each" in err
    assert "which nothing prices" in err
    assert all(stage.cuts and stage.sequence for stage in Plan.load("plan.json").stages)
    out, _ = well(run, "verify", "--steps", "1", "--json")
    assert all(each["equal"] for each in json.loads(out)["differences"])
    well(run, "run", "--steps", "3", "--checkpoint", "kept", "--clip-norm", "1", "--save", "trained")
    assert len(Report.load("report.json").loss) == 3
    well(run, "plan", "--stages", f"0-{LAST}:1", "-o", "alone.json", "--micro-batches", "2")
    common = ("run", "alone.json", "--steps", "5", "--clip-norm", "1", "--save", "trained")
    refused(run, 2, "trained is not empty; pass --overwrite", *common)
    # A run that goes on replaces the weights that it has saved before.
    _, err = well(run, *common, "--checkpoint", "kept", "--resume")
    assert "went on from the checkpoint of step 3" in err
    assert "initial weights: the checkpoint of step 3" in err
    well(run, "checkpoint", "export", "kept", "-o", "whole.safetensors")
    assert load_file("whole.safetensors")


@pytest.mark.slow
def test_a_dry_run_holds_less_of_a_team_than_of_one_rank(run: Run) -> None:
    held = []
    for size in (1, 2):
        well(run, "plan", "--stages", f"0-{LAST}:1x{size}", "-o", "p.json", "--overwrite")
        held.append(json.loads(well(run, "rehearse", "p.json", "--json")[0])["peak_bytes"][0])
    assert held[0] > held[1]


@pytest.mark.slow
def test_what_teams_cannot_is_refused_in_one_line(run: Run) -> None:
    well(run, "plan", "--stages", f"0-{LAST}:1x2")
    for line, said in {
        f"plan --stages 0-{LAST}:1x3": "--stages: nothing in stage 0",
        f"plan --stages 0-{LAST}:2x3": "splits in 3 parts; the profile has splits in 2, 4, 8",
        f"plan --stages 0-{LAST}:1 --sequence-parallel": "--sequence-parallel is of --stages",
        f"plan --stages 0-{LAST}:1x2 --cluster 4x1xH100 --times-of cpu": "pass --across-nodes",
        f"compare --stages 0-{LAST}:1x2": "give them one device each",
        "simulate": "stage 0 runs each replica on 2 devices, which nothing prices yet",
        "run --compile": "--compile",
        "run --update-profile": "--update-profile: stage 0 runs each replica on 2 devices, which nothing prices yet",
        "export megatron": "2 devices run each replica of stage 0",
    }.items():
        ended(run, 2, said, *line.split())
