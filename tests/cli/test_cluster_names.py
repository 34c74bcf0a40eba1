"""``--cluster`` with a built-in name or a description: planned for, recorded, simulated alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.formats.plan import Plan
from random_problems import gpt_profile

Run = Callable[..., tuple[int, str, str]]

TOML = '[[nodes]]\ncount = 2\ngpus = 2\ngpu = "A100"\n[network]\nbandwidth = "10Gbps"\n'


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """Run autopar in a folder that holds a profile; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    gpt_profile().save("profile.json")
    return command


def _simulated(run: Run, *arguments: str) -> float:
    code, out, err = run("simulate", *arguments, "--json")
    assert code == 0, err
    return float(json.loads(out)["step_s"])


def test_a_plan_for_a_named_cluster_records_the_name_and_is_simulated_with_it(run: Run) -> None:
    code, _, err = run("plan", "--cluster", "2x2xV100:1Gbps", "--times-of", "cpu", "--stages", "0-6:2,7-13:2")
    assert code == 0, err
    plan = Plan.load("plan.json")
    assert (plan.cluster, plan.cluster_name) == (None, "2x2xV100:1Gbps")
    assert any("estimated from what is published of V100-SXM2-32G" in note for note in plan.notes)
    assert plan.predicted.limit_bytes == (32 * 10**9,) * 2
    assert _simulated(run) == plan.predicted.step_s
    assert _simulated(run, "--cluster", "2x2xV100:400Gbps") < plan.predicted.step_s
    assert run("show", "plan.json", "--png", "step.png")[0] == 0


def test_a_plan_for_a_described_cluster_records_the_file(run: Run) -> None:
    Path("lab.toml").write_text(TOML)
    code, _, err = run("plan", "--cluster", "lab.toml", "--times-of", "cpu", "--min-stages", "2")
    assert code == 0, err
    plan = Plan.load("plan.json")
    assert plan.cluster is not None
    assert (plan.cluster.path, plan.cluster_name) == ("lab.toml", None)
    assert _simulated(run) == plan.predicted.step_s
    code, _, err = run("simulate", "--trace", "lab.toml", "--overwrite")
    assert code == 2
    assert "is read by this command" in err
    Path("lab.toml").write_text(TOML.replace("10Gbps", "20Gbps"))
    code, _, err = run("simulate")
    assert code == 4
    assert "lab.toml has changed since the plan was made" in err


@pytest.mark.parametrize(
    ("cluster", "code", "message"),
    [
        ("8xH1000", 2, "no GPU called 'H1000' is known; the nearest are H100-SXM"),
        ("castle", 2, "no cluster is called 'castle', and no such file exists"),
        ("0xH100", 2, "has no devices"),
        ("none.toml", 4, "none.toml: no such cluster file"),
        ("profile.json", 4, '$.format: expected "autopar.cluster"'),
    ],
)
def test_what_is_no_cluster_gets_one_line_and_its_exit_code(run: Run, cluster: str, code: int, message: str) -> None:
    for command in (("plan",), ("simulate",)):
        if command == ("simulate",):
            assert run("plan", "--gpus", "1")[0] == 0
        found, out, err = run(*command, "--cluster", cluster)
        assert (found, out) == (code, "")
        assert err.startswith("autopar: ")
        assert err.count("\n") == 1
        assert message in err


def test_a_plan_names_a_cluster_or_a_file_but_not_both(run: Run) -> None:
    assert run("plan", "--cluster", "2xH100", "--times-of", "cpu")[0] == 0
    content = json.loads(Path("plan.json").read_text())
    content["cluster"] = {"path": "cluster.json", "sha256": "0" * 64}
    Path("plan.json").write_text(json.dumps(content))
    code, _, err = run("simulate")
    assert code == 4
    assert "$.cluster_name: the plan records a cluster's file" in err


def test_a_plan_that_names_no_cluster_is_a_bad_file(run: Run) -> None:
    assert run("plan", "--cluster", "2xH100", "--times-of", "cpu")[0] == 0
    content = json.loads(Path("plan.json").read_text())
    content["cluster_name"] = "castle"
    Path("plan.json").write_text(json.dumps(content))
    code, _, err = run("simulate")
    assert code == 4
    assert err.startswith("autopar: plan.json: $.cluster_name: no cluster is called 'castle'")


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (
            "2x2xV100:400Gbps",
            "4 devices (V100-SXM2-32G) in 2 nodes of 2; within a node 22.3 GB/s per device; between nodes 400 Gbit/s "
            "per node, shared by 2 devices (200 Gbit/s each), of which 80% are counted on",
        ),
        (
            "2x2xV100:400Gbps/gpu",
            "4 devices (V100-SXM2-32G) in 2 nodes of 2; within a node 22.3 GB/s per device; between nodes 400 Gbit/s "
            "per device (800 Gbit/s per node), of which 80% are counted on",
        ),
        ("2xH100:400Gbps/gpu", "2 devices (H100-SXM) in 1 node; within a node 38.2 GB/s per device"),
        (
            "lab.toml",
            "4 devices (A100-SXM-80G) in 2 nodes of 2; within a node 229 GB/s per device; between nodes 10 Gb",
        ),
    ],
)
def test_what_was_understood_of_a_cluster_is_echoed_in_a_line(run: Run, cluster: str, said: str) -> None:
    Path("lab.toml").write_text(TOML)
    assert run("plan", "--gpus", "1")[0] == 0
    for command in ("plan", "compare", "simulate"):
        code, _, err = run(command, "--cluster", cluster, "--times-of", "cpu")
        assert code == 0, err
        lines = [line for line in err.splitlines() if line.startswith(f"cluster {cluster}: ")]
        assert len(lines) == 1
        assert lines[0].startswith(f"cluster {cluster}: {said}")
    assert "cluster estimated: " not in run("plan", "--gpus", "1")[2]
