"""``autopar compare``: a table for people, rows for programs, one line of error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.formats.plan import Plan
from paths import ROOT
from random_problems import gpt_profile, local_cluster

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """Run autopar in a folder that holds a profile and a cluster; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    gpt_profile().save("profile.json")
    local_cluster(2).save("cluster.json")
    return command


def test_compare_shows_every_planner_and_writes_nothing(run: Run) -> None:
    before = sorted(Path().iterdir())
    code, out, err = run("compare", "--gpus", "4")
    assert (code, out) == (0, "")
    for name in ("autopar", "data parallelism", "equal split", "GPipe", "by time", "by size", "PipeDream", "DAPPLE"):
        assert name in err
    assert "planning for 4 assumes 2 more like them" in err
    assert sorted(Path().iterdir()) == before


def test_rows_on_stdout_hold_what_plan_finds(run: Run) -> None:
    asked = ("--gpus", "4", "--bandwidth", "300MB/s", "--memory", "60MiB", "--batch", "8")
    code, out, _ = run("compare", *asked, "--json")
    assert code == 0
    rows = json.loads(out)
    keys = ["name", "stages", "micro_batches", "schedule", "step_s", "peak_bytes", "infeasible", "virtual_workers"]
    assert all(list(row) == [*keys, "over"] for row in rows)
    assert run("plan", *asked)[0] == 0
    plan = Plan.load("plan.json")
    own = next(row for row in rows if row["name"] == "autopar")
    assert own["step_s"] == plan.predicted.step_s
    assert own["over"] == 0
    assert own["micro_batches"] == plan.micro_batches
    for row in rows:
        assert (row["step_s"] is None) == (row["over"] is None) == (row["infeasible"] is not None)
        assert row["peak_bytes"] is None or (row["peak_bytes"] <= 60 * 2**20) == (row["step_s"] is not None)
    assert any(row["infeasible"] is not None for row in rows)


def test_a_named_cluster_with_several_nodes_and_asked_micro_batches_are_planned_for(run: Run) -> None:
    code, out, err = run(
        "compare", "--cluster", "2x2xA100-80G:100Gbps", "--times-of", "cpu", "--micro-batches", "4", "--json"
    )
    assert code == 0, err
    assert {row["micro_batches"] for row in json.loads(out) if row["micro_batches"]} == {4}
    assert "times of test stand for A100-SXM-80G" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("none.json",), 4, "none.json"),
        (("--gpus", "0"), 2, "--gpus must be at least 1, found 0"),
        (("--gpus", "2", "--memory", "1MiB"), 3, "nothing fits the memory"),
        (("--gpus", "2", "--micro-batches", "5"), 2, "--micro-batches 5 does not divide the batch 16"),
        (("--memory", "much"), 2, "--memory 'much'"),
        (("--bandwidth", "fast"), 2, "--bandwidth 'fast'"),
        (("--cluster", "none.toml"), 4, "none.toml"),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_one_line_with_its_exit_code(
    run: Run, arguments: tuple[str, ...], code: int, said: str
) -> None:
    ended, out, err = run("compare", *arguments)
    assert (ended, out) == (code, "")
    assert said in err
    assert err.count("\n") == 1


def test_comparing_imports_neither_torch_nor_pandas_nor_matplotlib(tmp_path: Path) -> None:
    gpt_profile().save(tmp_path / "profile.json")
    script = (
        "import sys; sys.argv = ['autopar', 'compare', '--gpus', '2']\n"
        "from autopar.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end: assert not end.code\n"
        "print(sorted({'torch', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    root = ROOT
    environment = {"PYTHONPATH": str(root), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
