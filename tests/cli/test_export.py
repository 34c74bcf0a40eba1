"""``autopar export``: files, exit codes, one line of error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from equal_plans import equal_plan, llama_profile

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """Run autopar in a folder with a plan of two stages; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    profile = llama_profile()
    plan, cluster = equal_plan(profile, "1f1b", 2)
    plan.save("plan.json")
    profile.save("measured.json")
    cluster.save("machines.json")
    return command


INPUTS = ("--profile", "measured.json", "--cluster", "machines.json")


def test_files_are_written_beside_each_other_and_not_over_others(run: Run) -> None:
    Path("out").mkdir()
    code, _, err = run("export", "torch", *INPUTS, "-o", "out/order.csv")
    assert (code, "Written: out/order.csv, out/stages.py" in err) == (0, True)
    assert 'FOLDER / "order.csv"' in Path("out/stages.py").read_text()
    code, _, err = run("export", "torch", *INPUTS, "-o", "out/other.csv")
    assert (code, "out/stages.py exists; pass --overwrite" in err) == (2, True)
    assert not Path("out/other.csv").exists()
    assert run("export", "torch", *INPUTS, "-o", "out/other.csv", "--overwrite")[0] == 0


def test_an_unknown_format_and_a_plan_without_its_profile_are_one_line(run: Run) -> None:
    code, _, err = run("export", "word", *INPUTS)
    assert (code, "FORMAT must be one of torch" in err, err.count("\n")) == (2, True, 1)
    code, _, err = run("export", "torch")
    assert (code, "the plan records no profile" in err, err.count("\n")) == (4, True, 1)
    code, _, err = run("export", "torch", *INPUTS, "-o", "nowhere/a.csv")
    assert (code, "no such folder" in err) == (4, True)
