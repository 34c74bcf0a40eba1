"""``autopar rehearse --steps``: a plan in virtual time, its trace over the prediction, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import autopar
from autopar.errors import FileError, UsageError
from autopar.formats.timeline import Timeline
from random_problems import gpt_profile, local_cluster

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """Run autopar in a folder that holds a profile, a cluster and a plan; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    gpt_profile().save("profile.json")
    local_cluster(2).save("cluster.json")
    assert command("plan", "--gpus", "2", "--min-stages", "2")[0] == 0
    return command


@pytest.mark.slow
def test_steps_take_as_long_as_simulated_and_their_trace_lies_over_the_prediction(run: Run) -> None:
    code, out, err = run("rehearse", "--steps", "2", "--trace", "trace.json", "--json")
    assert code == 0, err
    figures = json.loads(out)
    assert figures["steps_s"] == pytest.approx([figures["simulated_s"]] * 2, rel=1e-9)
    assert "Rehearsed step" in err
    timeline = Timeline.load("trace.json")
    assert timeline.origin == "rehearsed"
    peaks = timeline.peaks_bytes()
    assert list(peaks.values()) == figures["peak_bytes"]
    assert set(timeline.limits_bytes) == set(peaks) == {0, 1}
    assert f"most memory: rank {max(peaks, key=peaks.__getitem__)}" in err
    code, out, err = run("show", "trace.json", "--over", "plan.json", "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert shown["error"] == pytest.approx(0.0, abs=1e-6)
    assert set(shown) == {"rehearsed", "predicted", "error"}
    # Nothing is replaced that nobody agreed to lose.
    code, _, err = run("rehearse", "--steps", "1", "--trace", "trace.json")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.slow
def test_a_program_is_read_by_all_that_perform_one(run: Run) -> None:
    assert run("simulate", "--write-program", "program.json")[0] == 0
    for command in (("simulate",), ("rehearse", "--steps", "1")):
        code, out, err = run(*command, "--program", "program.json", "--json")
        assert code == 0, err
    text = Path("program.json").read_text().replace("F1@0 ", "", 1)
    Path("program.json").write_text(text)
    for command in (("simulate",), ("rehearse", "--steps", "1")):
        code, out, err = run(*command, "--program", "program.json", "--json")
        assert (code, out, err.count("\n")) == (4, "", 1)
        assert err.startswith("autopar: program.json")


@pytest.mark.parametrize("flag", [("--real-time",), ("--trace", "t.json"), ("--profile", "profile.json")])
def test_what_goes_with_steps_is_refused_without(run: Run, flag: tuple[str, ...]) -> None:
    code, out, err = run("rehearse", *flag)
    assert (code, out) == (2, "")
    assert err == f"autopar: {flag[0]} is of steps in virtual time; pass --steps, too\n"


def test_python_has_the_same(run: Run) -> None:
    rehearsal = autopar.rehearse("plan.json", steps=1, threads=True)
    assert rehearsal.steps_s == (pytest.approx(autopar.simulate("plan.json").end_s),)
    assert rehearsal.timeline.plot() is not None
    with pytest.raises(UsageError, match="`steps` must be at least 1, found 0"):
        autopar.rehearse("plan.json", steps=0)
    with pytest.raises(UsageError, match="`real_time` is of steps"):
        autopar.rehearse("plan.json", real_time=True)  # type: ignore[call-overload]
    with pytest.raises(FileError, match="no\\.json"):
        autopar.rehearse("plan.json", steps=1, program="no.json")
