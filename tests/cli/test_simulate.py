"""``autopar simulate``: the timeline and the program of a plan, whose files are as they were, and none is replaced."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.formats.plan import Plan
from autopar.formats.timeline import Timeline
from autopar.schedules.check import read_program
from autopar.schedules.expand import expand
from random_problems import gpt_profile, local_cluster

Run = Callable[..., tuple[int, str, str]]
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """Run autopar in a folder that holds a profile and a cluster; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    gpt_profile().save("profile.json")
    local_cluster(2).save("cluster.json")
    return command


def test_simulate_writes_the_program_that_is_run(run: Run) -> None:
    assert run("plan", "--gpus", "2", "--min-stages", "2")[0] == 0
    code, _, err = run("simulate", "--write-program", "program.json")
    assert code == 0
    assert "Written: program.json" in err
    plan = Plan.load("plan.json")
    assert read_program(Path("program.json"), plan) == expand(plan)
    code, _, err = run("simulate", "--write-program", "program.json")
    assert (code, err.count("\n")) == (2, 1)
    assert "program.json exists" in err
    code, _, err = run("simulate", "--write-program", "p.json", "--trace", "p.json", "--overwrite")
    assert (code, err.count("\n")) == (2, 1)


def test_a_plan_of_freely_divided_micro_batches_is_simulated_as_it_was_priced(run: Run) -> None:
    assert run("plan", "--gpus", "2", "--divisible", "--bandwidth", "1MB/s", "--min-stages", "2")[0] == 0
    code, out, _ = run("simulate", "--json")
    assert code == 0
    assert json.loads(out)["step_s"] == Plan.load("plan.json").predicted.step_s


@pytest.mark.reliability(55)
def test_a_plan_whose_profile_has_changed_is_refused(run: Run) -> None:
    assert run("plan", "--gpus", "2")[0] == 0
    gpt_profile(blocks=3).save("profile.json")
    code, _, err = run("simulate")
    assert code == 4
    assert err.startswith("autopar: plan.json: $.profile.sha256: profile.json has changed")
    assert err.count("\n") == 1
    code, _, err = run("simulate", "--profile", "profile.json")
    assert code == 4
    assert "not of this profile" in err


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda plan: plan["tensors"].clear(), "$.tensors is not what the profile's layers exchange"),
        (lambda plan: plan["tensors"][0].update(bytes_per_sample=1), "$.tensors[0] is not what"),
        (lambda plan: plan["tied"].clear(), "$.tied is not what"),
        (lambda plan: plan["tied"][0].update(bytes=1), "$.tied[0] is not what"),
        (
            lambda plan: plan["tied"].append(plan["tied"][0]),
            "$.tied[1].parameter: parameter 'wte.weight' is given twice",
        ),
        (lambda plan: plan["stages"][1].update(devices=[2**31 - 1]), "$.stages[1].devices[0]: "),
        (lambda plan: plan.update(schedule="gpipe"), "$.stages[0].warmup: gpipe keeps all"),
        (lambda plan: plan.update(device_type="tpu"), "$.device_type: "),
        (lambda plan: plan.update(threads=2**30), "$.threads: "),
        (lambda plan: plan.update(bytes_per_s=1e-300), "$.bytes_per_s: "),
        (lambda plan: plan["stages"][1]["layers"].reverse(), "layer 8 is 'head' in the plan"),
    ],
)
def test_an_edited_plan_is_refused_where_it_cannot_be_of_its_profile(run: Run, edit: Edit, message: str) -> None:
    assert run("plan", "--stages", "0-7:1,8-13:1", "--schedule", "1f1b", "--micro-batches", "4")[0] == 0
    content = json.loads(Path("plan.json").read_text())
    edit(content)
    Path("plan.json").write_text(json.dumps(content))
    code, _, err = run("simulate", "--trace", "trace.json")
    assert code == 4
    assert message in err
    assert err.count("\n") == 1
    assert not Path("trace.json").exists()


def test_no_output_replaces_what_a_plan_leans_on_or_what_is_no_file(run: Run) -> None:
    assert run("plan", "--gpus", "2")[0] == 0
    os.mkfifo("pipe")
    before = {name: Path(name).read_bytes() for name in ("plan.json", "profile.json", "cluster.json")}
    for name in before:
        code, _, err = run("simulate", "--trace", name, "--overwrite")
        assert (code, err.count("\n")) == (2, 1)
        assert "is read by this command" in err
    for command in (("plan", "--gpus", "2", "-o", "pipe"), ("simulate", "--trace", "pipe")):
        code, _, err = run(*command, "--overwrite")
        assert code == 2
        assert "pipe is not a regular file" in err
    assert {name: Path(name).read_bytes() for name in before} == before
    assert Path("pipe").is_fifo()


def test_another_profile_or_cluster_takes_the_place_of_the_recorded_one(run: Run) -> None:
    assert run("plan", "--stages", "0-7:1,8-13:1", "--schedule", "1f1b", "--micro-batches", "4")[0] == 0
    usual, slow = gpt_profile(), gpt_profile()
    layers = [
        layer.model_copy(
            update={
                "update_s": 3 * layer.update_s,
                "costs": tuple(
                    cost.model_copy(update={"forward_s": 3 * cost.forward_s, "backward_s": 3 * cost.backward_s})
                    for cost in layer.costs
                ),
            }
        )
        for layer in usual.layers
    ]
    changes = {"layers": tuple(layers), "step_overhead_s": 3 * usual.step_overhead_s}
    slow.model_copy(update=changes).save("slow.json")
    cluster = local_cluster(2)
    link = cluster.links[0].model_copy(update={"latency_s": 0.0, "bytes_per_s": 1e15})
    cluster.model_copy(update={"links": (link,), "curves": ()}).save("free.json")
    figures = []
    for profile in ("profile.json", "slow.json"):
        options = ("--profile", profile, "--cluster", "free.json", "--trace", f"{profile}.trace", "--json")
        code, out, err = run("simulate", *options)
        assert code == 0, err
        figures.append(json.loads(out))
    # Where links take no time, all takes three times as long.
    assert figures[1]["step_s"] == pytest.approx(3 * figures[0]["step_s"], rel=1e-3)
    assert figures[1]["bubble"] == pytest.approx(figures[0]["bubble"], abs=1e-3)
    assert Timeline.load("slow.json.trace").end_s == pytest.approx(figures[1]["step_s"], abs=1e-8)
