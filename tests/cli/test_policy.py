"""``autopar plan --policy``: planned, simulated, rehearsed, verified and run; what does not go with it is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from autopar.formats.plan import Plan
from autopar.formats.report import Report
from calls import Run, ended, well
from profiled import write_profiled

TWO = ("plan", "--gpus", "2", "--stages", "0-2:1,3-4:1")
FOUR = (*TWO, "--micro-batches", "4")


@pytest.fixture
def run(run: Run) -> Run:
    """Run autopar in a folder that holds a model and its profile; return (exit code, stdout, stderr)."""
    write_profiled(Path(), "tanh_chain")
    return run


def with_optimizer(name: str) -> None:
    write_profiled(Path(), "tanh_chain", 'OPTIMIZER = "sgd"', f'OPTIMIZER = "{name}"')


def alike(*folders: str) -> list[bool]:
    """Return, for every tensor that a folder has, whether another has the same."""
    files = (Path(folder).glob("*.safetensors") for folder in folders)
    first, second = ({name: each for file in own for name, each in load_file(file).items()} for own in files)
    assert first.keys() == second.keys() != set()
    return [torch.equal(each, second[name]) for name, each in first.items()]


@pytest.mark.slow
@pytest.mark.core
def test_several_pipelines_are_planned_simulated_rehearsed_verified_and_run(run: Run) -> None:
    asked = ("plan", "--policy", "wsp", "--stages", "0-2,3-4/0-4", "--wave", "2", "--staleness", "1")
    _, err = well(run, *asked)
    assert "3 stages in 2 pipelines on 3 devices, 1f1b without flushes" in " ".join(err.split())
    plan = Plan.load("plan.json")
    assert (plan.pipelines, plan.wave, plan.staleness) == ((2, 1), 2, 1)
    assert json.loads(well(run, "simulate", "--json")[0])["step_s"] == pytest.approx(plan.predicted.step_s)
    out, err = well(run, "rehearse", "--steps", "60", "--json")
    assert (len(json.loads(out)["steps_s"]), "per mini-batch, rehearsed +0.00%" in err) == (60, True)
    assert json.loads(well(run, "verify", "--steps", "11", "--json")[0])["equal"]
    well(run, "run", "--steps", "12", "--save", "one")
    well(run, "run", "--steps", "12", "--save", "other", "--overwrite")
    report = Report.load("report.json")
    assert (len(report.loss), report.loss[-1] < report.loss[0]) == (12, True)
    assert report.samples_per_s == pytest.approx(2 * plan.batch / report.step_s.median)
    assert all(alike("one", "other"))
    assert "pipeline" in well(run, "show", "plan.json")[1]


@pytest.mark.slow
@pytest.mark.core
def test_an_eager_run_is_logged_verified_and_replayed_bit_by_bit(run: Run) -> None:
    asked = ("plan", "--policy", "wsp", "--stages", "0-2,3-4/0-4", "--wave", "2", "--staleness", "1", "--overwrite")
    well(run, *asked)
    for option in ("--replay", "--pulls"):
        ended(run, 2, f"{option} is of a plan whose pulls take what has come", "run", option, "pulls.json")
    _, err = well(run, *asked, "--eager")
    assert "waves of 2, staleness 1, eager" in " ".join(err.split())
    assert json.loads(well(run, "simulate", "--json")[0])["step_s"] == pytest.approx(
        Plan.load("plan.json").predicted.step_s
    )
    assert json.loads(well(run, "verify", "--steps", "13", "--json")[0])["equal"]
    assert not Path("pulls.json").exists()
    well(run, "run", "--steps", "13", "--save", "one", "--seed", "3")
    loss = Report.load("report.json").loss
    _, err = well(run, "run", "--replay", "pulls.json", "--save", "other", "--seed", "3")
    assert "pulls took what pulls.json says" in " ".join(err.split())
    assert Report.load("report.json").loss == loss
    assert all(alike("one", "other"))
    replay = ("run", "--replay", "pulls.json")
    ended(run, 4, "pulls.json: $.plan_sha256: it is the log of another plan, or of another seed", *replay)
    ended(run, 2, "drained behind step 13, and not behind 12; pass --steps 13", *replay, "--seed", "3", "--steps", "12")
    ended(run, 2, "leave out one of them", *replay, "--pulls", "other.json")
    ended(run, 2, "pulls.json is read by this command", "run", "--replay", "pulls.json", "--report", "pulls.json")
    Path("pulls.json").write_text(Path("pulls.json").read_text()[:-9])
    ended(run, 4, "pulls.json:", *replay, "--seed", "3")
    ended(run, 2, "--eager is of --policy wsp; leave it out", "plan", "--eager")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stash", "2bw"])
def test_a_policy_is_planned_simulated_rehearsed_verified_and_run(run: Run, policy: str) -> None:
    assert f"without flushes (weight policy {policy})" in well(run, *FOUR, "--policy", policy)[1]
    plan = Plan.load("plan.json")
    assert plan.weight_policy == policy
    out, err = well(run, "simulate", "--json")
    assert (json.loads(out)["step_s"], "per mini-batch" in err) == (pytest.approx(plan.predicted.step_s), True)
    out, err = well(run, "rehearse", "--steps", "30", "--json")
    assert (len(json.loads(out)["steps_s"]), "per mini-batch, rehearsed" in err) == (30, True)
    assert json.loads(well(run, "verify", "--json")[0])["equal"]
    well(run, "run", "--steps", "12", "--save", "free")
    report = Report.load("report.json")
    assert len(report.loss) == report.steps == 12
    assert report.loss[-1] < report.loss[0]
    assert [times.in_flight for times in report.rank_times] == [(stage.warmup,) for stage in plan.stages]
    if policy == "stash":
        for bound, equal in (("1e9", True), ("0.01", False)):
            clipped = ("--clip-norm", bound, "--clip", "stage", "--save", bound)
            well(run, "run", "--overwrite", "--steps", "12", *clipped)
            assert not Report.load("report.json").gradient_norm
            assert set(alike("free", bound)) == {equal}


@pytest.mark.slow
def test_replicas_in_turn_are_planned_and_rehearsed_and_what_does_not_go_with_a_policy_refused(run: Run) -> None:
    asked = ("--gpus", "4", "--batch", "2", "--stages", "0-2:3,3-4:1", "--micro-batches", "1", "--policy", "stash")
    assert "in turns" in well(run, "plan", *asked, "--division", "round-robin")[1]
    plan = Plan.load("plan.json")
    # Two samples are not for three replicas to split.
    assert [stage.period for stage in plan.stages] == [3, 1]
    # As many as no whole turn ends with.
    steps_s = json.loads(well(run, "rehearse", "--steps", "31", "--json")[0])["steps_s"]
    assert len(steps_s) == 31
    assert sum(steps_s) == pytest.approx(plan.predicted.step_s * 31, rel=0.5)
    well(run, *TWO, "--policy", "stash")
    bound = "--clip-norm takes a flush, which weight policy stash has none of"
    for line, said in {
        "run --clip-norm 1": bound,
        "run --clip-norm 2": "clip each stage by its own norm (--clip stage), or plan with --policy 2bw",
        "run --clip stage": "--clip stage says whose norm is bounded; say by what, too: --clip-norm",
        "run --compile": "--compile takes a flush",
        "run --update-profile": "--update-profile: what a run under weight policy stash measures is not taken over",
        "rehearse": "is never flushed (weight policy stash)",
        "plan --policy stash --ahead xpipe": "--ahead is of --policy predict; leave it out",
        "plan --policy pipemare": "pipemare reduces rates at first; say for how many mini-batches: --anneal-steps",
    }.items():
        ended(run, 2, said, *line.split())


@pytest.mark.slow
def test_predictions_of_known_optimizers_are_run_and_other_repetitions_refused(run: Run) -> None:
    well(run, *TWO, "--micro-batches", "2", "--policy", "stash")
    well(run, "simulate", "--write-program", "own.json")
    Path("other.json").write_text(Path("own.json").read_text().replace(" U@0", "", 1))
    said = "without flushes, only forwards and messages may stand elsewhere"
    ended(run, 4, said, "run", "--program", "other.json", "--overwrite")
    predict = (*FOUR, "--policy", "predict", "--overwrite")
    well(run, *predict)
    ended(run, 2, "predict knows the next steps of Adam, AdamW and SGD with momentum", "run", "--steps", "8")
    with_optimizer("adam")
    files = {}
    for name, options in {"default": (), "counted": ("--ahead", "counted"), "xpipe": ("--ahead", "xpipe")}.items():
        assert ("(weight policy predict, xpipe)" in well(run, *predict, *options)[1]) == (name == "xpipe")
        files[name] = Path("plan.json").read_text()
    assert files["default"] == files["counted"]
    assert "ahead" not in files["counted"]
    assert Plan.load("plan.json").ahead == "xpipe"
    well(run, "simulate", "--write-program", "p.json")
    assert all(f"{kind}@0" in Path("p.json").read_text() for kind in ("P4", "C"))
    assert json.loads(well(run, "verify", "--json")[0])["equal"]
    well(run, "run", "--steps", "8", "--checkpoint", "parts")
    assert "8" in well(run, "checkpoint", "list", "parts", "--json")[0]
