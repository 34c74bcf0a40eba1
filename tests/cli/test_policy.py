"""``autopar plan --policy``: planned, simulated and run; what does not go with it is refused in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from autopar.formats.plan import Plan
from autopar.formats.report import Report
from profiled import write_profiled

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """Run autopar in a folder that holds a model and its profile; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    write_profiled(tmp_path, "tanh_chain.py", command)
    return command


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stash", "2bw"])
def test_a_policy_is_planned_simulated_and_run(run: Run, policy: str) -> None:
    dictated = ("--gpus", "2", "--stages", "0-2:1,3-4:1", "--micro-batches", "4")
    code, _, err = run("plan", *dictated, "--policy", policy)
    assert code == 0, err
    assert f"without flushes (weight policy {policy})" in err.replace("\n", " ")
    plan = Plan.load("plan.json")
    assert plan.weight_policy == policy
    code, out, err = run("simulate", "--json")
    assert code == 0, err
    assert json.loads(out)["step_s"] == pytest.approx(plan.predicted.step_s)
    assert "per mini-batch" in err
    code, _, err = run("run", "--steps", "12")
    assert code == 0, err
    report = Report.load("report.json")
    assert len(report.loss) == report.steps == 12
    assert report.loss[-1] < report.loss[0]
    assert [times.in_flight for times in report.rank_times] == [(stage.warmup,) for stage in plan.stages]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--clip-norm", "1"), "--clip-norm takes a flush, which weight policy stash has none of"),
        (("--clip-norm", "1"), "clip each stage by its own norm (--clip stage), or plan with --policy 2bw"),
        (("--clip", "stage"), "--clip stage says whose norm is bounded; say by what, too: --clip-norm"),
        (("--compile",), "--compile takes a flush"),
        (("--update-profile",), "--update-profile: what a run under weight policy stash measures is not taken over"),
    ],
)
def test_what_does_not_go_with_a_policy_is_refused_in_one_line(run: Run, options: tuple[str, ...], said: str) -> None:
    assert run("plan", "--gpus", "2", "--stages", "0-2:1,3-4:1", "--policy", "stash")[0] == 0
    code, _, err = run("run", *options)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_the_rehearsal_of_memory_needs_a_flush_and_steps_are_rehearsed_and_verified(run: Run) -> None:
    assert run("plan", "--gpus", "2", "--stages", "0-2:1,3-4:1", "--policy", "stash")[0] == 0
    code, _, err = run("rehearse")
    assert code == 2
    assert "is never flushed (weight policy stash)" in err
    code, out, err = run("verify", "--json")
    assert code == 0, err
    assert json.loads(out)["equal"]
    code, out, err = run("rehearse", "--steps", "30", "--json")
    assert code == 0, err
    assert len(json.loads(out)["steps_s"]) == 30
    assert "per mini-batch, rehearsed" in err


RESUMED = [("stash", False), ("stash", True), ("2bw", False), ("pipemare", True), ("predict", True)]
MORE = {"pipemare": ("--anneal-steps", "5", "--synchronous-steps", "1"), "predict": ("--ahead", "xpipe")}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "deep"), RESUMED)
def test_what_is_resumed_equals_a_run_that_was_drained_at_the_same_steps(run: Run, policy: str, deep: bool) -> None:
    if policy == "predict":
        change_optimizer(run, "momentum")
    dictated = ("--gpus", "2", "--stages", "0-2:1,3-4:1", "--micro-batches", "4")
    assert run("plan", *dictated, "--policy", policy, *MORE.get(policy, ()))[0] == 0
    # In one of them, the first stage is further ahead than checkpoints are apart.
    plan = Plan.load("plan.json")
    depths = (9, 1) if deep else (2, 1)
    stages = (stage.model_copy(update={"warmup": depth}) for stage, depth in zip(plan.stages, depths, strict=True))
    plan.model_copy(update={"stages": tuple(stages)}).save("plan.json")
    common = ("run", "--overwrite", "--every", "2" if deep else "4", "--checkpoint")
    assert run(*common, "whole", "--steps", "10", "--save", "one")[0] == 0
    assert run(*common, "parts", "--steps", "4")[0] == 0
    code, _, err = run(*common, "parts", "--steps", "10", "--resume", "--save", "two")
    assert code == 0, err
    assert Report.load("report.json").first_step == 4
    one, two = saved("one"), saved("two")
    assert one.keys() == two.keys()
    assert all(torch.equal(each, two[name]) for name, each in one.items())
    # And a drain changes numbers.
    assert run("run", "--overwrite", "--steps", "10", "--save", "three")[0] == 0
    assert not all(torch.equal(each, saved("three")[name]) for name, each in one.items())


@pytest.mark.slow
def test_replicas_in_turn_are_planned_rehearsed_run_resumed_and_verified(run: Run) -> None:
    dictated = ("--gpus", "4", "--batch", "2", "--stages", "0-2:3,3-4:1", "--micro-batches", "1")
    code, _, err = run("plan", *dictated, "--policy", "stash")
    assert code == 0, err
    plan = Plan.load("plan.json")
    # Two samples are not for three replicas to split.
    assert [stage.turning for stage in plan.stages] == [3, 1]
    assert "in turns" in err
    # As many as no whole turn ends with.
    code, out, err = run("rehearse", "--steps", "31", "--json")
    assert code == 0, err
    assert len(json.loads(out)["steps_s"]) == 31
    assert sum(json.loads(out)["steps_s"]) == pytest.approx(plan.predicted.step_s * 31, rel=0.5)
    assert json.loads(run("verify", "--json", "--steps", "5")[1])["equal"]
    common = ("run", "--overwrite", "--every", "4", "--checkpoint")
    code, _, err = run(*common, "whole", "--steps", "13", "--save", "one")
    assert code == 0, err
    report = Report.load("report.json")
    assert len(report.loss) == report.steps == 13
    assert [times.in_flight for times in report.rank_times] == [(2,), (2,), (2,), (1,)]
    assert run(*common, "parts", "--steps", "4")[0] == 0
    code, _, err = run(*common, "parts", "--steps", "13", "--resume", "--save", "two")
    assert code == 0, err
    one, two = saved("one"), saved("two")
    assert all(torch.equal(each, two[name]) for name, each in one.items())


@pytest.mark.slow
def test_stages_are_clipped_by_norms_of_their_own(run: Run) -> None:
    assert run("plan", "--gpus", "2", "--stages", "0-2:1,3-4:1", "--micro-batches", "4", "--policy", "stash")[0] == 0
    common = ("run", "--overwrite", "--steps", "6", "--save")
    for name, options in {"none": (), "huge": ("--clip-norm", "1e9"), "tight": ("--clip-norm", "0.01")}.items():
        code, _, err = run(*common, name, *options, *(("--clip", "stage") if options else ()))
        assert code == 0, err
        assert not Report.load("report.json").gradient_norm
    none, huge, tight = saved("none"), saved("huge"), saved("tight")
    assert all(torch.equal(each, huge[name]) for name, each in none.items())
    assert not any(torch.equal(each, tight[name]) for name, each in none.items())


@pytest.mark.slow
@pytest.mark.parametrize("turns", [False, True])
def test_a_first_stage_that_no_gradient_comes_back_to_is_trained(run: Run, turns: bool) -> None:
    """Nobody answers what it sends, and nothing holds it back."""
    text = Path("tanh_chain.py").read_text().replace("FROZEN = ()", "FROZEN = (0, 1)")
    Path("tanh_chain.py").write_text(text)
    assert run("profile", "tanh_chain.py", "--batch", "8", "--overwrite")[0] == 0
    wide = (
        ("--gpus", "3", "--batch", "1", "--stages", "0-1:2,2-4:1")
        if turns
        else ("--gpus", "2", "--stages", "0-1:1,2-4:1")
    )
    code, _, err = run("plan", *wide, "--micro-batches", "1", "--policy", "stash")
    assert code == 0, err
    plan = Plan.load("plan.json")
    assert not any(tensor.gradient for tensor in plan.tensors)
    assert plan.span == (2 if turns else 1)
    assert json.loads(run("verify", "--json", "--steps", "5")[1])["equal"]
    code, _, err = run("run", "--steps", "25", "--checkpoint", "parts", "--every", "7")
    assert code == 0, err
    assert len(Report.load("report.json").loss) == 25


@pytest.mark.slow
def test_an_edited_repetition_is_simulated_rehearsed_and_run(run: Run) -> None:
    dictated = ("--gpus", "2", "--stages", "0-2:1,3-4:1", "--micro-batches", "2")
    assert run("plan", *dictated, "--policy", "stash")[0] == 0
    plan = Plan.load("plan.json")
    stages = (stage.model_copy(update={"warmup": depth}) for stage, depth in zip(plan.stages, (3, 3), strict=True))
    plan.model_copy(update={"stages": tuple(stages)}).save("plan.json")
    assert run("simulate", "--write-program", "own.json")[0] == 0
    # The second of two micro-batches before the first, on both ranks.
    other = re.sub(r"\b([FSR])(\d+)@", lambda each: f"{each[1]}{int(each[2]) ^ 1}@", Path("own.json").read_text())
    Path("other.json").write_text(other)
    for command in (("simulate",), ("rehearse", "--steps", "20"), ("run", "--steps", "12", "--save", "two")):
        code, _, err = run(*command, "--program", "other.json")
        assert code == 0, err
    assert run("run", "--steps", "12", "--save", "one", "--overwrite")[0] == 0
    one, two = saved("one"), saved("two")
    assert all(torch.equal(each, two[name]) for name, each in one.items())
    Path("other.json").write_text(other.replace(" U@0", "", 1))
    code, _, err = run("run", "--program", "other.json", "--overwrite")
    assert code == 4
    assert "without flushes, only forwards and messages may stand elsewhere" in err.splitlines()[-1]


def saved(folder: str) -> dict[str, torch.Tensor]:
    return {name: each for file in Path(folder).glob("*.safetensors") for name, each in load_file(file).items()}


@pytest.mark.slow
def test_pipemare_is_planned_with_its_steps_and_run(run: Run) -> None:
    dictated = ("--gpus", "2", "--stages", "0-2:1,3-4:1", "--micro-batches", "4", "--policy", "pipemare")
    code, _, err = run("plan", *dictated)
    assert code == 2
    assert "--policy pipemare reduces rates at first; say for how many mini-batches: --anneal-steps" in err
    assert run("plan", *dictated, "--anneal-steps", "10", "--synchronous-steps", "2")[0] == 0
    assert "C@0" in run("simulate", "--write-program", "p.json")[1] + Path("p.json").read_text()
    code, _, err = run("run", "--steps", "8")
    assert code == 0, err
    assert len(Report.load("report.json").loss) == 8


@pytest.mark.slow
def test_prediction_refuses_an_optimizer_that_it_does_not_know(run: Run) -> None:
    assert run("plan", "--gpus", "2", "--stages", "0-2:1,3-4:1", "--policy", "predict")[0] == 0
    code, _, err = run("run", "--steps", "8")
    assert code == 2
    assert "predict knows the next steps of Adam, AdamW and SGD with momentum" in err
    assert "Traceback" not in err
    change_optimizer(run, "adam")
    assert run("plan", "--gpus", "2", "--stages", "0-2:1,3-4:1", "--policy", "predict", "--overwrite")[0] == 0
    code, _, err = run("run", "--steps", "8")
    assert code == 0, err


def change_optimizer(run: Run, name: str) -> None:
    text = Path("tanh_chain.py").read_text().replace('OPTIMIZER = "sgd"', f'OPTIMIZER = "{name}"')
    Path("tanh_chain.py").write_text(text)
    assert run("profile", "tanh_chain.py", "--batch", "8", "--overwrite")[0] == 0


@pytest.mark.slow
def test_xpipes_constants_are_planned_recorded_and_run(run: Run) -> None:
    change_optimizer(run, "adam")
    dictated = ("--gpus", "2", "--stages", "0-2:1,3-4:1", "--micro-batches", "4", "--overwrite")
    files = {}
    for name, options in {"default": (), "counted": ("--ahead", "counted"), "xpipe": ("--ahead", "xpipe")}.items():
        code, _, err = run("plan", *dictated, "--policy", "predict", *options)
        assert code == 0, err
        assert ("(weight policy predict, xpipe)" in err.replace("\n", " ")) == (name == "xpipe")
        files[name] = Path("plan.json").read_text()
    assert files["default"] == files["counted"]
    assert "ahead" not in files["counted"]
    assert Plan.load("plan.json").ahead == "xpipe"
    assert run("simulate", "--write-program", "p.json")[0] == 0
    assert all(f"{kind}@0" in Path("p.json").read_text() for kind in ("P4", "C"))
    code, out, err = run("verify", "--json")
    assert code == 0, err
    assert json.loads(out)["equal"]
    code, _, err = run("run", "--steps", "8")
    assert code == 0, err
    code, _, err = run("plan", *dictated, "--policy", "stash", "--ahead", "xpipe")
    assert code == 2
    assert "--ahead is of --policy predict; leave it out" in err


@pytest.mark.slow
def test_checkpoints_are_as_many_as_cost_a_share_of_the_time(run: Run) -> None:
    assert run("plan", "--gpus", "2", "--stages", "0-2:1,3-4:1", "--micro-batches", "4", "--policy", "stash")[0] == 0
    code, _, err = run("run", "--checkpoint", "parts", "--steps", "40")
    assert code == 0, err
    assert len(Report.load("report.json").loss) == 40
    code, out, err = run("checkpoint", "list", "parts", "--json")
    assert code == 0, err
    assert "40" in out
