"""``autopar plan``: what it writes and says; what it predicts is what ``autopar simulate`` does."""

import json
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.formats.document import parse_bandwidth, parse_bytes
from autopar.formats.plan import Plan
from autopar.formats.timeline import Timeline
from calls import Run, files, well
from random_problems import local_cluster

TWO = ("plan", "--gpus", "2", "--min-stages", "2")


def test_plan_writes_a_plan_that_simulate_predicts_and_show_says_alike(run: Run) -> None:
    out, err = well(run, *TWO, "--schedule", "1f1b", "--json")
    plan = Plan.load("plan.json")
    assert out == plan.dumps() == Path("plan.json").read_text()
    for expected in ("Stages", "lower bound", "bubble", "pure data parallelism", "equal split", "Written"):
        assert expected in err
    _, shown = well(run, "show", "plan.json")
    for expected in ("bound of any plan", "one stage a device: contiguous", "+ links", "+ memory", "gap", "what binds"):
        assert expected in err
        assert expected in shown
    out, _ = well(run, "simulate", "--trace", "trace.json", "--json")
    assert json.loads(out)["step_s"] == plan.predicted.step_s
    assert Timeline.load("trace.json").end_s == pytest.approx(plan.predicted.step_s, abs=1e-8)


def test_files_are_recorded_relative_to_the_plan(run: Run) -> None:
    Path("out/deep").mkdir(parents=True)
    well(run, "plan", "--gpus", "2", "-o", "out/deep/p.json")
    plan = Plan.load("out/deep/p.json")
    assert plan.profile is not None
    assert plan.cluster is not None
    assert (plan.profile.path, plan.cluster.path) == ("../../profile.json", "../../cluster.json")
    assert plan.model.source == "../../model.py"
    well(run, "simulate", "out/deep/p.json")


def test_without_a_cluster_file_links_are_estimated_and_said_so(run: Run) -> None:
    Path("cluster.json").unlink()
    well(run, "plan", "--gpus", "4")
    plan = Plan.load("plan.json")
    assert plan.cluster is None
    assert "estimated" in plan.notes[0]
    assert well(run, "simulate", "--json")[0] != ""


def test_constraints_of_stages_are_obeyed(run: Run) -> None:
    whole = (*TWO, "--schedule", "1f1b")
    well(run, *whole)
    assert Plan.load("plan.json").stages[0].layers[-1] == "h.6"
    pins = ("--pin", "h.6,head same stage", "--pin", "wte on test")
    well(run, *whole, "--forbid-cut", "h.5", "--forbid-cut", "4", *pins)
    assert Plan.load("plan.json").stages[0].layers[-1] == "h.4"


def test_a_plan_is_made_by_a_mixed_integer_program(run: Run) -> None:
    asked = (*TWO, "--max-stages", "2", "--micro-batches", "4")
    well(run, *asked)
    step_s = Plan.load("plan.json").predicted.step_s
    well(run, *asked, "--solver", "milp", "--solver-seconds", "600")
    plan = Plan.load("plan.json")
    assert plan.predicted.step_s == pytest.approx(step_s, rel=0.05)
    assert not any("--solver milp" in note for note in plan.notes)


@pytest.mark.parametrize("options", [("--bandwidth", "20MB/s"), ("--divisible", "--bandwidth", "1MB/s")])
def test_what_is_assumed_is_recorded_and_simulated(run: Run, options: tuple[str, ...]) -> None:
    well(run, *TWO, *options)
    plan = Plan.load("plan.json")
    assert plan.bytes_per_s == (20e6 if len(options) == 2 else 1e6)
    assert json.loads(well(run, "simulate", "--json")[0])["step_s"] == plan.predicted.step_s


@pytest.mark.reliability(57)
def test_an_existing_file_is_replaced_with_overwrite_and_the_default_one_without(run: Run) -> None:
    well(run, "plan", "--gpus", "2")
    well(run, "plan", "--gpus", "1")
    for words in (("plan", "--gpus", "1", "-o", "other.json"), ("simulate", "--trace", "other.json")):
        Path("other.json").write_text("old")
        before = files()
        assert (run(*words)[0], files()) == (2, before)
        well(run, *words, "--overwrite")
        assert Path("other.json").read_text() != "old"


def test_an_objective_is_planned_shown_and_recorded(run: Run) -> None:
    cluster = local_cluster(2)
    devices = tuple(device.model_copy(update={"price_per_hour": 1.5}) for device in cluster.devices)
    cluster.model_copy(update={"devices": devices}).save("cluster.json")
    for objective, said in (
        ("throughput", ("without flushes (weight policy stash)", "per mini-batch")),
        ("cost", ("cost of a million samples", "least that a step may cost")),
    ):
        out, err = well(run, "plan", "--objective", objective, "--json")
        assert json.loads(out)["objective"] == Plan.load("plan.json").objective == objective
        assert all(each in err for each in (f"(objective {objective})", *said, "carries it out"))
        well(run, "show", "plan.json")
        well(run, "simulate")


def test_a_plan_without_an_objective_is_of_the_least_step(run: Run) -> None:
    well(run, "plan")
    content = json.loads(Path("plan.json").read_text())
    del content["objective"]
    for stage in content["stages"]:
        del stage["tensor_parallel"]
    Path("plan.json").write_text(json.dumps(content))
    assert Plan.load("plan.json").objective == "step"
    well(run, "simulate")


def test_sizes_and_bandwidths_read_as_typed() -> None:
    assert parse_bytes("16GiB", "--memory") == 16 * 2**30
    assert parse_bytes("1.5gb", "--memory") == 1_500_000_000
    assert parse_bandwidth("25GB/s", "--bandwidth") == 25e9
    for text in ("", "GiB", "-1GiB", "1e9", "nan", "inf", "5 parsec", "1__0", "9" * 18 + "TiB"):
        with pytest.raises(UsageError):
            parse_bytes(text, "--memory")
