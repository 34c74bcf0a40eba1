"""``autopar plan``, what it writes and says, also of named clusters; ``compare``, a table and rows for programs."""

import json
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.formats.document import parse_bandwidth, parse_bytes
from autopar.formats.plan import Plan
from autopar.formats.timeline import Timeline
from calls import Run, files, refused, well
from random_problems import gpt_profile, local_cluster

TWO = ("plan", "--gpus", "2", "--min-stages", "2")
TOML = '[[nodes]]\ncount = 2\ngpus = 2\ngpu = "A100"\n[network]\nbandwidth = "10Gbps"\n'


def _simulated(run: Run, *words: str) -> float:
    return float(json.loads(well(run, "simulate", *words, "--json")[0])["step_s"])


def test_plans_are_predicted_shown_and_constrained_alike(run: Run) -> None:
    out, err = well(run, *TWO, "--schedule", "1f1b", "--json")
    plan = Plan.load("plan.json")
    assert out == plan.dumps() == Path("plan.json").read_text()
    for expected in ("Stages", "lower bound", "bubble", "pure data parallelism", "equal split", "Written"):
        assert expected in err
    _, shown = well(run, "show", "plan.json")
    for expected in ("bound of any plan", "one stage a device: contiguous", "+ links", "+ memory", "gap", "what binds"):
        assert all(expected in text for text in (err, shown))
    out, _ = well(run, "simulate", "--trace", "trace.json", "--json")
    assert json.loads(out)["step_s"] == plan.predicted.step_s
    assert Timeline.load("trace.json").end_s == pytest.approx(plan.predicted.step_s, abs=1e-8)
    whole = (*TWO, "--schedule", "1f1b")
    well(run, *whole)
    assert Plan.load("plan.json").stages[0].layers[-1] == "h.6"
    pins = ("--pin", "h.6,head same stage", "--pin", "wte on test")
    well(run, *whole, "--forbid-cut", "h.5", "--forbid-cut", "4", *pins)
    assert Plan.load("plan.json").stages[0].layers[-1] == "h.4"
    asked = (*TWO, "--max-stages", "2", "--micro-batches", "4")
    well(run, *asked)
    step_s = Plan.load("plan.json").predicted.step_s
    well(run, *asked, "--solver", "milp", "--solver-seconds", "600")
    plan = Plan.load("plan.json")
    assert plan.predicted.step_s == pytest.approx(step_s, rel=0.05)
    assert not any("--solver milp" in note for note in plan.notes)


@pytest.mark.reliability(57)
def test_files_are_recorded_relative_and_replaced_where_asked(run: Run) -> None:
    Path("out/deep").mkdir(parents=True)
    well(run, "plan", "--gpus", "2", "-o", "out/deep/p.json")
    plan = Plan.load("out/deep/p.json")
    paths = [each and each.path for each in (plan.profile, plan.cluster)]
    assert paths == ["../../profile.json", "../../cluster.json"]
    assert plan.model.source == "../../model.py"
    well(run, "simulate", "out/deep/p.json")
    well(run, "plan")
    younger = {"objective": True, "stages": {"__all__": {"tensor_parallel"}}}
    Path("plan.json").write_text(Plan.load("plan.json").model_dump_json(exclude=younger))
    assert Plan.load("plan.json").objective == "step"
    well(run, "simulate")
    well(run, "plan", "--gpus", "2")
    well(run, "plan", "--gpus", "1")
    for words in (("plan", "--gpus", "1", "-o", "other.json"), ("simulate", "--trace", "other.json")):
        Path("other.json").write_text("old")
        before = files()
        assert (run(*words)[0], files()) == (2, before)
        well(run, *words, "--overwrite")
        assert Path("other.json").read_text() != "old"


def test_what_is_assumed_or_an_objective_is_recorded_and_simulated(run: Run) -> None:
    for bytes_per_s, options in ((20e6, ("--bandwidth", "20MB/s")), (1e6, ("--divisible", "--bandwidth", "1MB/s"))):
        well(run, *TWO, *options)
        plan = Plan.load("plan.json")
        assert plan.bytes_per_s == bytes_per_s
        assert _simulated(run) == plan.predicted.step_s
    Path("cluster.json").unlink()
    well(run, "plan", "--gpus", "4")
    plan = Plan.load("plan.json")
    assert plan.cluster is None
    assert "estimated" in plan.notes[0]
    assert _simulated(run) == plan.predicted.step_s
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


def test_clusters_by_name_or_file_are_recorded_and_sizes_read_as_typed(run: Run) -> None:
    well(run, "plan", "--cluster", "2x2xV100:1Gbps", "--times-of", "cpu", "--stages", "0-6:2,7-13:2")
    plan = Plan.load("plan.json")
    assert (plan.cluster, plan.cluster_name) == (None, "2x2xV100:1Gbps")
    assert any("estimated from what is published of V100-SXM2-32G" in note for note in plan.notes)
    assert plan.predicted.limit_bytes == (32 * 10**9,) * 2
    assert _simulated(run) == plan.predicted.step_s
    assert _simulated(run, "--cluster", "2x2xV100:400Gbps") < plan.predicted.step_s
    well(run, "show", "plan.json", "--png", "step.png")
    Path("lab.toml").write_text(TOML)
    well(run, "plan", "--cluster", "lab.toml", "--times-of", "cpu", "--stages", "0-6:2,7-13:2")
    plan = Plan.load("plan.json")
    assert (plan.cluster and plan.cluster.path, plan.cluster_name) == ("lab.toml", None)
    assert _simulated(run) == plan.predicted.step_s
    refused(run, 2, "is read by this command", "simulate", "--trace", "lab.toml", "--overwrite")
    Path("lab.toml").write_text(TOML.replace("10Gbps", "20Gbps"))
    refused(run, 4, "lab.toml has changed since the plan was made", "simulate")
    asked = ("--cluster", "2x2xA100-80G:100Gbps", "--times-of", "cpu", "--micro-batches", "4", "--json")
    out, err = well(run, "compare", *asked)
    assert {row["micro_batches"] for row in json.loads(out) if row["micro_batches"]} == {4}
    assert "times of test stand for A100-SXM-80G" in err
    assert parse_bytes("16GiB", "--memory") == 16 * 2**30
    assert parse_bytes("1.5gb", "--memory") == 1_500_000_000
    assert parse_bandwidth("25GB/s", "--bandwidth") == 25e9
    for text in ("", "GiB", "-1GiB", "1e9", "nan", "inf", "5 parsec", "1__0", "9" * 18 + "TiB"):
        with pytest.raises(UsageError):
            parse_bytes(text, "--memory")


V100S = "4 devices (V100-SXM2-32G) in 2 nodes of 2; within a node 22.3 GB/s per device; between nodes 400 Gbit/s per "


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("2x2xV100:400Gbps", f"{V100S}node, shared by 2 devices (200 Gbit/s each), of which 80% are counted on"),
        ("2x2xV100:400Gbps/gpu", f"{V100S}device (800 Gbit/s per node), of which 80% are counted on"),
        ("2xH100:400Gbps/gpu", "2 devices (H100-SXM) in 1 node; within a node 370 GB/s per device"),
        ("lab.toml", "4 devices (A100-SXM-80G) in 2 nodes of 2; within a node 229 GB/s per device; between nodes 10 G"),
    ],
)
def test_what_was_understood_of_a_cluster_is_echoed_in_a_line(run: Run, cluster: str, said: str) -> None:
    Path("lab.toml").write_text(TOML)
    gpt_profile(blocks=2).save("profile.json")
    assert "cluster estimated: " not in run("plan", "--gpus", "1")[2]
    for command in ("compare", "simulate", "plan"):
        code, _, err = run(command, "--cluster", cluster, "--times-of", "cpu")
        assert code == 0, err
        (line,) = (line for line in err.splitlines() if line.startswith(f"cluster {cluster}: "))
        assert line.startswith(f"cluster {cluster}: {said}")


def test_compare_shows_every_planner_writes_nothing_and_rows_on_stdout_hold_what_plan_finds(run: Run) -> None:
    gpt_profile(blocks=8).save("profile.json")
    before = files()
    asked = ("--gpus", "4", "--bandwidth", "300MB/s", "--memory", "45MiB", "--batch", "8")
    out, err = well(run, "compare", *asked, "--json")
    assert files() == before
    for name in ("autopar", "data parallelism", "equal split", "GPipe", "by time", "by size", "PipeDream", "DAPPLE"):
        assert name in err
    for name in ("torch.nn.DataParallel", "parameter server, central", "parameter server, sharded"):
        assert name in err
    assert "planning for 4 assumes 2 more like them" in err
    rows = json.loads(out)
    keys = [
        "name",
        "stages",
        "micro_batches",
        "schedule",
        "step_s",
        "peak_bytes",
        "infeasible",
        "division",
    ]
    assert all([key for key in row if key not in ("priced", "waves")] == [*keys, "over"] for row in rows)
    well(run, "plan", *asked)
    plan = Plan.load("plan.json")
    own = next(row for row in rows if row["name"] == "autopar")
    assert (own["step_s"], own["over"], own["micro_batches"]) == (plan.predicted.step_s, 0, plan.micro_batches)
    for row in rows:
        assert (row["step_s"] is None) == (row["over"] is None) == (row["infeasible"] is not None)
        assert row["peak_bytes"] is None or (row["peak_bytes"] <= 45 * 2**20) == (row["step_s"] is not None)
    assert any(row["infeasible"] is not None for row in rows)


def _throughput(content: dict[str, object]) -> dict[str, object]:
    found = content["predicted"]["throughput"]  # type: ignore[index]
    assert isinstance(found, dict)
    return found


def test_what_a_step_is_in_tokens_hours_and_cost_is_told_and_recorded_where_it_is_asked_for(run: Run) -> None:
    gpt_profile(blocks=2).save("profile.json")
    Path("lab.toml").write_text(TOML.replace('gpu = "A100"', 'gpu = "A100"\nprice_per_hour = 2.0'))
    asked = ("--cluster", "lab.toml", "--times-of", "cpu")
    out, err = well(run, "plan", *asked, "--json")
    plain = Path("plan.json").read_text()
    assert "throughput" not in plain
    # Known without being asked for: hours, and the prices and power of the devices.
    found = _throughput(json.loads(out))
    devices = len(Plan.load("plan.json").devices)
    assert (found["price_per_hour"], found["power_w"], found["devices"]) == (2.0 * devices, 400 * devices, devices)
    assert "1M samples take" in err
    assert "device hours" in well(run, "show", "plan.json")[1]
    assert _throughput(json.loads(well(run, "show", "plan.json", "--json")[0])) == found
    out, err = well(run, "plan", *asked, "--tokens", "15T", "--tokens-per-sample", "128", "--json")
    assert out == Path("plan.json").read_text()
    whole = _throughput(json.loads(out))["whole"]
    assert isinstance(whole, dict)
    assert (whole["tokens"], whole["samples"]) == (15e12, 15e12 / 128)
    assert all(
        each in err for each in ("tokens per second (128 a sample)", "1B tokens take", "15T tokens take", " days")
    )
    Path("profile.json").rename("elsewhere.json")
    assert "15T tokens take" in well(run, "show", "plan.json")[1]
    Path("plan.json").write_text(plain)
    assert "samples per second" in well(run, "show", "plan.json")[1]
    Path("elsewhere.json").rename("profile.json")
    words = ("compare", *asked, "--samples", "90M", "--json")
    out, err = well(run, *words)
    assert all(each in err for each in ("samples/s", "90M samples take", "90M samples cost"))
    rows = [row for row in json.loads(out) if row["step_s"] is not None]
    assert all(row["throughput"]["whole"]["samples"] == 9e7 for row in rows if row["stages"])
    for value, said in (
        ("0", "--tokens must be positive, found 0"),
        ("-3", "positive, found -3"),
        ("2 days", "write a"),
    ):
        refused(run, 2, said, "plan", *asked, "--tokens", value)
    refused(
        run, 2, "pass --tokens-per-sample, too, or --samples in place of --tokens", "plan", *asked, "--tokens", "1B"
    )


def test_plans_for_several_clusters_stand_beside_each_other_each_in_its_file(run: Run) -> None:
    gpt_profile(blocks=2).save("profile.json")
    Path("lab.toml").write_text(TOML)
    names = ("--cluster", "2x2xV100:1Gbps/gpu", "--cluster", "lab.toml")
    asked = ("--times-of", "cpu", "--micro-batches", "4")
    out, err = well(run, "plan", *names, *asked, "--json")
    paths = ["plan-2x2xV100-1Gbps-gpu.json", "plan-lab.json"]
    rows = json.loads(out)
    assert [(row["cluster"], row["output"]) for row in rows] == [*zip(names[1::2], paths, strict=True)]
    assert not Path("plan.json").exists()
    for name, path, row in zip(names[1::2], paths, rows, strict=True):
        assert all(each in err for each in (f"cluster {name}: ", f"{name} ", path))
        well(run, "plan", "--cluster", name, *asked)
        assert Path(path).read_text() == Path("plan.json").read_text()
        assert _throughput(row["plan"])["devices"] == len(Plan.load(path).devices)
    well(run, "plan", *names, *asked)
    Path("out").mkdir()
    well(run, "plan", *names, *asked, "-o", "out/best.json")
    assert sorted(path.name for path in Path("out").iterdir()) == ["best-2x2xV100-1Gbps-gpu.json", "best-lab.json"]
    assert Plan.load("out/best-lab.json").cluster.path == "../lab.toml"
    refused(run, 2, "out/best-2x2xV100-1Gbps-gpu.json exists", "plan", *names, *asked, "-o", "out/best.json")
    twice = ("--cluster", "4xV100", "--cluster", "4xV100")
    refused(run, 2, "4xV100, named twice, would both be plan-4xV100.json", "plan", *twice, *asked)
    # Where nothing fits one of them, the other is planned; where nothing fits any, that is the error.
    Path("small.toml").write_text(TOML.replace('gpu = "A100"', 'gpu = "A100"\nmemory = "6MB"'))
    out, err = well(run, "plan", "--cluster", "small.toml", *names[2:], *asked, "--json")
    small, lab = json.loads(out)
    assert "nothing fits the memory" in small["infeasible"]
    assert "plan" not in small
    assert lab["output"] == "plan-lab.json"
    assert not Path("plan-small.json").exists()
    Path("tiny.toml").write_text(Path("small.toml").read_text())
    refused(run, 3, "nothing fits the memory", "plan", "--cluster", "small.toml", "--cluster", "tiny.toml", *asked)
