"""``autopar plan``: files, exit codes, one line of error; what it predicts is what ``autopar simulate`` does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.formats.document import parse_bandwidth, parse_bytes
from autopar.formats.plan import Plan
from autopar.formats.timeline import Timeline
from random_problems import gpt_profile, local_cluster

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """Run autopar in a folder that holds a profile and a cluster; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    gpt_profile().save("profile.json")
    local_cluster(2).save("cluster.json")
    return command


def test_plan_writes_a_plan_that_simulate_predicts_alike(run: Run) -> None:
    code, out, err = run("plan", "--gpus", "2", "--min-stages", "2", "--schedule", "1f1b", "--json")
    assert code == 0
    plan = Plan.load("plan.json")
    assert out == plan.dumps() == Path("plan.json").read_text()
    for expected in ("Stages", "lower bound", "gap", "bubble", "pure data parallelism", "equal split", "Written"):
        assert expected in err
    code, out, err = run("simulate", "--trace", "trace.json", "--json")
    assert code == 0
    assert json.loads(out)["step_s"] == plan.predicted.step_s
    assert Timeline.load("trace.json").end_s == pytest.approx(plan.predicted.step_s, abs=1e-8)


def test_files_are_recorded_relative_to_the_plan(run: Run) -> None:
    Path("out/deep").mkdir(parents=True)
    assert run("plan", "--gpus", "2", "-o", "out/deep/p.json")[0] == 0
    plan = Plan.load("out/deep/p.json")
    assert plan.profile is not None
    assert plan.cluster is not None
    assert (plan.profile.path, plan.cluster.path) == ("../../profile.json", "../../cluster.json")
    assert plan.model.source == "../../model.py"
    assert run("simulate", "out/deep/p.json")[0] == 0


def test_without_a_cluster_file_links_are_estimated_and_said_so(run: Run) -> None:
    Path("cluster.json").unlink()
    assert run("plan", "--gpus", "4")[0] == 0
    plan = Plan.load("plan.json")
    assert plan.cluster is None
    assert "estimated" in plan.notes[0]
    assert run("simulate", "--json")[1] != ""


def test_constraints_of_stages_are_obeyed(run: Run) -> None:
    whole = ("--schedule", "1f1b")
    assert run("plan", "--gpus", "2", "--min-stages", "2", *whole)[0] == 0
    assert Plan.load("plan.json").stages[0].layers[-1] == "h.6"
    pins = ("--pin", "h.6,head same stage", "--pin", "wte on test")
    assert (
        run("plan", "--gpus", "2", "--min-stages", "2", "--forbid-cut", "h.5", "--forbid-cut", "4", *pins, *whole)[0]
        == 0
    )
    assert Plan.load("plan.json").stages[0].layers[-1] == "h.4"


def test_a_plan_is_made_by_a_mixed_integer_program(run: Run) -> None:
    asked = ("--gpus", "2", "--min-stages", "2", "--max-stages", "2", "--micro-batches", "4")
    assert run("plan", *asked)[0] == 0
    steps = Plan.load("plan.json").predicted
    code, _, err = run("plan", *asked, "--solver", "milp", "--solver-seconds", "600")
    assert code == 0, err
    assert Plan.load("plan.json").predicted.step_s == pytest.approx(steps.step_s, rel=0.05)
    assert not any("--solver milp" in note for note in Plan.load("plan.json").notes)
    assert run("plan", *asked, "--solver-seconds", "0")[0] == 2


def test_an_assumed_bandwidth_is_recorded_and_simulated(run: Run) -> None:
    assert run("plan", "--gpus", "2", "--min-stages", "2", "--bandwidth", "20MB/s")[0] == 0
    plan = Plan.load("plan.json")
    assert plan.bytes_per_s == 20e6
    assert json.loads(run("simulate", "--json")[1])["step_s"] == plan.predicted.step_s


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--gpus", "2", "--memory", "1MiB"), 3, "nothing fits the memory: stage "),
        (("--gpus", "2", "--memory", "lots"), 2, "--memory 'lots': write a number and a unit"),
        (("--gpus", "2", "--memory", "0"), 2, "--memory '0'"),
        (("--gpus", "2", "--bandwidth", "25GB"), 2, "such as 25GB/s"),
        (("--gpus", "0"), 2, "--gpus must be at least 1"),
        (("--gpus", "1", "--stages", "0-6:1,7-13:1"), 2, "--stages needs 2 devices, but --gpus is 1"),
        (("--stages", "0-6:1,8-13:1"), 2, "h.6 is in no stage"),
        (("--stages", "wte-hed:1"), 2, "no layer is called 'hed'"),
        (("--objective", "speed"), 2, "--objective must be one of step, throughput, cost;"),
        (("--objective", "throughput", "--exact"), 2, "--exact does not go with --objective throughput"),
        (("--gpus", "2", "--solver", "magic"), 2, "--solver must be dp or milp"),
        (("--gpus", "2", "--pin", "wte,head same stage", "--min-stages", "2"), 2, "and --min-stages 2 at once"),
        (("--gpus", "2", "--forbid-cut", "h.33"), 2, "no layer is called 'h.33'"),
        (("--gpus", "4", "--min-stages", "3", "--max-stages", "2"), 2, "--min-stages 3 contradicts --max-stages 2"),
        (("missing.json", "--gpus", "2"), 4, "missing.json: no such profile file"),
        (("--gpus", "2", "--cluster", "none.json"), 4, "none.json: no such cluster file"),
        (("--gpus", "2", "-o", "no/plan.json"), 4, "no such folder"),
        (("--gpus", "2", "-o", "other.json"), 2, "other.json exists; pass --overwrite"),
        (("--gpus", "2", "-o", "profile.json", "--overwrite"), 2, "is read by this command"),
        (("cluster.json", "--gpus", "2"), 4, '$.format: expected "autopar.profile"'),
        (("--gpus", "2", "--batch", "7", "--micro-batches", "2"), 2, "does not divide the batch 7"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
@pytest.mark.reliability(49, 50, 54, 57)
def test_bad_input_gets_one_line_and_its_exit_code_and_writes_nothing(
    run: Run, arguments: tuple[str, ...], code: int, message: str
) -> None:
    Path("other.json").write_text("mine")
    before = sorted(os.listdir("."))
    found, out, err = run("plan", *arguments)
    assert (found, out) == (code, "")
    assert err.startswith("autopar: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(os.listdir(".")) == before
    assert Path("other.json").read_text() == "mine"


def test_hand_edited_files_are_refused_with_the_json_path(run: Run) -> None:
    content = json.loads(Path("profile.json").read_text())
    content["layers"][3]["costs"][0]["forward_s"] = -1
    Path("profile.json").write_text(json.dumps(content))
    code, _, err = run("plan", "--gpus", "2")
    assert code == 4
    assert "$.layers[3].costs[0].forward_s" in err
    gpt_profile().save("profile.json")
    assert run("plan", "--gpus", "2", "--min-stages", "2")[0] == 0
    content = json.loads(Path("plan.json").read_text())
    content["stages"][1]["warmup"] = 99
    Path("plan.json").write_text(json.dumps(content))
    code, _, err = run("simulate")
    assert code == 4
    assert "$.stages[1].warmup" in err


def test_a_link_that_leads_to_itself_is_a_bad_file(run: Run) -> None:
    Path("loop.json").symlink_to("loop.json")
    code, _, err = run("plan", "loop.json", "--gpus", "2")
    assert code == 4
    assert err.startswith("autopar: cannot read loop.json: ")


@pytest.mark.reliability(57)
def test_an_existing_file_is_replaced_with_overwrite_and_the_default_one_without(run: Run) -> None:
    assert run("plan", "--gpus", "2")[0] == 0
    assert run("plan", "--gpus", "1")[0] == 0
    Path("other.json").write_text("old")
    assert run("plan", "--gpus", "2", "-o", "other.json", "--overwrite")[0] == 0
    Path("trace.json").write_text("old")
    assert run("simulate", "--trace", "trace.json")[0] == 2
    assert Path("trace.json").read_text() == "old"
    assert run("simulate", "--trace", "trace.json", "--overwrite")[0] == 0


def test_an_objective_is_planned_shown_and_recorded(run: Run) -> None:
    cluster = local_cluster(2)
    code, _, err = run("plan", "--objective", "cost")
    assert (code, err.count("\n")) == (4, 1)
    assert "$.devices[0].price_per_hour: --objective cost needs a price above 0 of every device" in err
    devices = tuple(device.model_copy(update={"price_per_hour": 1.5}) for device in cluster.devices)
    cluster.model_copy(update={"devices": devices}).save("cluster.json")
    for objective, said, then in (
        ("cost", ("cost of a million samples", "least that a step may cost"), "carries it out"),
        ("throughput", ("without flushes (weight policy stash)", "per mini-batch"), "carries it out"),
    ):
        code, out, err = run("plan", "--objective", objective, "--json")
        assert code == 0
        assert (json.loads(out)["objective"], Plan.load("plan.json").objective) == (objective, objective)
        shown = " ".join(err.split())
        assert all(each in shown for each in (f"(objective {objective})", *said, then))
        assert run("show", "plan.json")[0] == 0
    assert run("simulate")[0] == 0
    assert run("plan", "--objective", "cost")[0] == run("simulate")[0] == 0


def test_a_plan_without_an_objective_is_of_the_least_step(run: Run) -> None:
    assert run("plan")[0] == 0
    content = json.loads(Path("plan.json").read_text())
    del content["objective"]
    for stage in content["stages"]:
        del stage["tensor_parallel"]
    Path("plan.json").write_text(json.dumps(content))
    assert Plan.load("plan.json").objective == "step"
    assert run("simulate")[0] == 0


def test_planning_and_simulating_import_neither_torch_nor_pandas_nor_matplotlib(tmp_path: Path) -> None:
    gpt_profile().save(tmp_path / "profile.json")
    script = (
        "import sys\nfrom autopar.cli import main\nsys.argv = sys.argv[1:]\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "assert not {'torch', 'pandas', 'matplotlib', 'networkx', 'pulp', 'highspy'} & set(sys.modules)\n"
    )
    for arguments in (["plan", "--gpus", "2"], ["simulate"], ["--help"], ["plan", "--help"]):
        command = [sys.executable, "-c", script, "autopar", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr


def test_sizes_and_bandwidths_read_as_typed() -> None:
    assert parse_bytes("16GiB", "--memory") == 16 * 2**30
    assert parse_bytes("1.5gb", "--memory") == 1_500_000_000
    assert parse_bandwidth("25GB/s", "--bandwidth") == 25e9
    for text in ("", "GiB", "-1GiB", "1e9", "nan", "inf", "5 parsec", "1__0", "9" * 18 + "TiB"):
        with pytest.raises(UsageError):
            parse_bytes(text, "--memory")


def test_the_configuration_in_a_models_folder_is_not_written_over(run: Run) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    code, _, err = run("profile", "hf:model", "--device", "H100", "-o", "model/config.json", "--overwrite")
    assert (code, Path("model/config.json").read_text()) == (2, "{}")
    assert "cannot be its output" in err
