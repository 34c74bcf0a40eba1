"""Bad files and contradictory flags: one line that says where, the right exit code, no file made or changed."""

import importlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.formats.plan import Plan
from calls import Run, refused, well
from random_problems import gpt_profile, local_cluster
from suite import warm

Content = dict[str, Any]
Edit = Callable[[Content], object]

LINE = "forward_compute_time=1, backward_compute_time=2, activation_size=64, parameter_size=8"
DICTATED = ("plan", "--stages", "0-3:1,4-7:1", "--schedule", "1f1b", "--micro-batches", "4")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile, a cluster, a plan of two stages, and files of other systems and of the user."""
    folder = tmp_path_factory.mktemp("files")
    gpt_profile(blocks=6).save(folder / "profile.json")
    local_cluster(2).save(folder / "cluster.json")
    warm.run([sys.executable, "-m", "autopar", "--quiet", *DICTATED], cwd=folder, check=True)
    (folder / "theirs").mkdir()
    graph = f"node1 -- Linear -- {LINE}\nnode2 -- Linear -- {LINE}\n\tnode1 -- node2\n"
    (folder / "theirs/graph.txt").write_text(graph)
    (folder / "theirs/bert.json").write_text('{"nodes": []}')
    (folder / "loop.json").symlink_to("loop.json")
    (folder / "model").mkdir()
    for mine in ("other.json", "old.html", "model/config.json"):
        (folder / mine).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("plan --gpus x", 2, "Invalid value for '--gpus'"),
        ("plan --gpus 1e9", 2, "found '1e9' (try: autopar plan --help)"),
        ("plan --batch 8 --gpus", 2, "requires an argument. (try: autopar plan --help)"),
        ("plan --gpus 99999999", 2, "--gpus must be at most 65536"),
        (
            "plan --gpus 2 --memory 16",
            2,
            "--memory '16': write a number and a unit (B, KB, MB, GB, TB, KiB, MiB, GiB, ",
        ),
        ("plan --gpus 2 --memory 24", 2, "TiB), such as 24GiB"),
        ("plan --gpus 2 --bandwidth 25/s", 2, "TiB), such as 25GB"),
        ("cluster probe --largest 1000", 2, "such as 1000GiB"),
        ("plan --gpus 2 --memory 1MiB", 3, "nothing fits the memory: stage "),
        ("plan --gpus 2 --bandwidth 25GB", 2, "such as 25GB/s"),
        ("plan --gpus 2 --batch 2147483648", 2, "--batch must be below 2147483648"),
        ("plan --objective cost", 4, "$.devices[0].price_per_hour: --objective cost needs a price above 0 of every"),
        ("plan missing.json --gpus 2", 4, "missing.json: no such profile file"),
        ("plan loop.json --gpus 2", 4, "autopar: cannot read loop.json: "),
        ("plan cluster.json --gpus 2", 4, '$.format: expected "autopar.profile"'),
        ("plan --gpus 2 -o no/plan.json", 4, "no such folder"),
        ("plan --gpus 2 -o other.json", 2, "other.json exists; pass --overwrite"),
        ("plan --cluster none.json", 4, "none.json: no such cluster file"),
        ("plan --cluster profile.json", 4, '$.format: expected "autopar.cluster"'),
        ("simulate --trace plan.json --overwrite", 2, "is read by this command"),
        ("simulate --write-program other.json", 2, "other.json exists"),
        ("simulate --write-program p.json --trace p.json --overwrite", 2, "p.json"),
        ("compare --gpus 2 --memory 1MiB", 3, "nothing fits the memory"),
        ("compare --schedule gpipe", 2, "--schedule is that of --stages"),
        ("compare --run --png losses.txt", 2, "--png losses.txt: the picture is a PNG; give a name that ends in .png"),
        ("compare --run --results profile.json", 4, "--results: profile.json is not a folder; name another"),
        ("rehearse --real-time", 2, "autopar: --real-time is of steps in virtual time; pass --steps, too\n"),
        ("rehearse --steps 1 --trace other.json", 2, "other.json exists"),
        ("show nowhere.json", 4, "nowhere.json"),
        ("show cluster.json --over cluster.json", 2, "cluster.json is a cluster, which has no timeline to draw"),
        ("show profile.json --html page.txt", 2, "--html page.txt: the page is HTML; give a name that ends in .html"),
        ("show profile.json --png picture.svg", 2, "--png picture.svg: the picture is a PNG"),
        ("export word", 2, "FORMAT must be one of torch"),
        ("export torch -o nowhere/a.csv", 4, "no such folder"),
        ("import onnx theirs/graph.txt", 2, "FORMAT must be one of pipedream, profiles, layout, torchtitan; f"),
        ("import layout EttL --profiled-batch 4", 2, "--profiled-batch is of pipedream; leave it out for layout"),
        ("import pipedream theirs/graph.txt -o theirs/graph.txt --overwrite", 2, "is read by this command"),
        (
            "import pipedream theirs/graph.txt --replicas 2",
            2,
            "--replicas is of layout and torchtitan; leave it out for pipedream",
        ),
        ("import layout EttL --profile theirs/bert.json", 4, "theirs/bert.json: $."),
        ("import pipedream nowhere.txt", 4, "nowhere.txt: no such"),
        ("import pipedream theirs/bert.json", 4, "theirs/bert.json:1: expected a node"),
        ("cluster probe --device tpu", 2, "--device must be auto, cpu or cuda, found 'tpu'"),
        ("cluster probe -o other.json", 2, "other.json exists; pass --overwrite"),
        ("cluster probe --largest 1KiB", 2, "--largest must be at least 16384 bytes, found 1024"),
        ("cluster list none.toml", 4, "none.toml: no such cluster file"),
        ("cluster measure", 2, "no such command: 'measure'"),
        ("profile hf:model --device H100 -o model/config.json --overwrite", 2, "cannot be its output"),
    ],
)
@pytest.mark.reliability(46, 49, 50, 54, 57)
def test_what_cannot_be_done_is_refused(
    files: Path, monkeypatch: pytest.MonkeyPatch, command: Run, line: str, code: int, said: str
) -> None:
    monkeypatch.chdir(files)
    refused(command, code, said, *shlex.split(line))


@pytest.fixture
def run(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """Run autopar in a copy of those files; return (exit code, stdout, stderr)."""
    shutil.copytree(files, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return command


READERS = {"profile": (("plan",), ("compare",)), "cluster": (("plan",), ("compare",)), "plan": (("simulate",),)}


def _edited(kind: str, edit: Edit) -> None:
    path = Path(f"{kind}.json")
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def _cost(**changes: object) -> Edit:
    return lambda content: content["layers"][1]["costs"][0].update(changes)


def _apart(content: Content) -> None:
    content["tied"] = []
    content["tensors"] = [tensor for tensor in content["tensors"] if tensor["producer"] != "h.0"]


def _beside(content: Content) -> None:
    content.update(cluster={"path": "cluster.json", "sha256": "0" * 64}, cluster_name="2xH100")


@pytest.mark.parametrize(
    ("kind", "edit", "code", "said"),
    [
        ("profile", _cost(forward_s=float("nan")), 4, "profile.json: $.layers[1].costs[0].forward_s: NaN is not a"),
        ("profile", _cost(micro_batch=0), 4, "$.layers[1].costs[0].micro_batch: "),
        ("profile", lambda each: each["layers"][1].update(parameters_bytes=2**45), 3, "; layer h.0 alone fits no"),
        ("profile", lambda each: each.update(layers=[]), 4, "$.layers: "),
        ("profile", _apart, 4, "profile.json: $.tensors: no tensor connects wte, h.0 with the last layer, head; list"),
        ("cluster", lambda each: each["links"][0].update(latency_s=-1), 4, "cluster.json: $.links[0].latency_s: "),
        ("cluster", lambda each: each["devices"][1].update(type="H100"), 4, "$.devices[1].type: the profile has no"),
        ("cluster", lambda each: [one.update(memory_bytes=0) for one in each["devices"]], 3, "more than 0 B"),
        ("plan", lambda each: each["tensors"].clear(), 4, "$.tensors is not what the profile's layers exchange"),
        ("plan", lambda each: each["tensors"][0].update(bytes_per_sample=1), 4, "$.tensors[0] is not what"),
        ("plan", lambda each: each["tied"][0].update(bytes=1), 4, "$.tied[0] is not what"),
        ("plan", lambda each: each["tied"].append(each["tied"][0]), 4, "$.tied[1].parameter: parameter 'wte.weight'"),
        ("plan", lambda each: each["stages"][1].update(devices=[2**31 - 1]), 4, "$.stages[1].devices[0]: "),
        ("plan", lambda each: each["stages"][1].update(warmup=99), 4, "$.stages[1].warmup"),
        ("plan", lambda each: each.update(bytes_per_s=1e-300), 4, "$.bytes_per_s: "),
        ("plan", lambda each: each["stages"][1]["layers"].reverse(), 4, "layer 4 is 'head' in the plan"),
        ("plan", _beside, 4, "$.cluster_name: the plan records a cluster's file"),
        ("plan", lambda each: each.update(cluster=None, cluster_name="castle"), 4, "$.cluster_name: no cluster is"),
        ("plan", lambda each: each.update(profile=None), 4, "the plan records no profile"),
    ],
)
@pytest.mark.reliability(55)
def test_a_bad_file_is_refused_by_those_that_read_it(run: Run, kind: str, edit: Edit, code: int, said: str) -> None:
    _edited(kind, edit)
    for words in READERS[kind]:
        refused(run, code, said, *words)


@pytest.mark.parametrize("kept", [0, 1, 400, -3])
def test_truncated_files_are_refused_with_the_place(run: Run, kept: int) -> None:
    readers = [(kind, words) for kind, several in READERS.items() for words in several]
    for kind, words in (*readers, ("plan", ("show", "plan.json"))):
        path = Path(f"{kind}.json")
        whole = path.read_text()
        path.write_text(whole[:kept])
        refused(run, 4, f"{kind}.json:", *words)
        path.write_text(whole)


@pytest.mark.reliability(46, 49, 55)
def test_changed_profiles_and_what_the_system_refuses_end_as_bad_files_do(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt_profile(blocks=3).save("profile.json")
    refused(run, 4, "autopar: plan.json: $.profile.sha256: profile.json has changed", "simulate")
    code, _, err = run("show", "plan.json", "--png", "step.png")
    assert (code, Path("step.png").exists()) == (4, False)
    assert "has changed since the plan was made" in err
    refused(run, 4, "not of this profile", "simulate", "--profile", "profile.json")
    gpt_profile(blocks=3).save("profile.json")
    well(run, "plan", "--gpus", "7")
    well(run, "plan", "--gpus", "7", "--min-stages", "5", "--schedule", "1f1b")
    assert len(Plan.load("plan.json").stages) == 5

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("autopar.formats.references.kind_of", refuse)
    refused(run, 4, "autopar: plan.json: Permission denied\n", "show", "plan.json")
    os.mkfifo("pipe")
    for words in (("plan", "--gpus", "2", "-o", "pipe"), ("simulate", "--trace", "pipe")):
        refused(run, 2, "pipe is not a regular file", *words, "--overwrite")
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nothing_like_this", "No module named 'nothing_like_this'"),
        ("import ctypes\nctypes.CDLL('libnothing.so.12')", "libnothing.so.12: cannot open shared object file: "),
        ("none_such", "name 'none_such' is not defined"),
        (None, "No module named 'fractured'"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named_with_what_helps(
    run: Run, monkeypatch: pytest.MonkeyPatch, source: str | None, said: str
) -> None:
    if source is not None:
        Path("fractured.py").write_text(source)
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.setattr("autopar.formats.references.kind_of", lambda path: importlib.import_module("fractured"))
    _, _, err = run("show", "plan.json")
    refused(run, 4, f"autopar: fractured cannot be imported: {said}", "show", "plan.json")
    assert "; `pip check` says what it lacks, `pip install --force-reinstall fractured` installs it anew\n" in err
    # A fault of autopar's own is no package's.
    monkeypatch.setattr("autopar.formats.references.kind_of", lambda path: importlib.import_module("autopar.none_such"))
    refused(run, 1, "this is a fault of autopar", "show", "plan.json")


def _without_time(content: Content) -> None:
    content["step_overhead_s"] = 0
    for layer in content["layers"]:
        layer["update_s"] = 0
        for cost in layer["costs"]:
            cost.update(forward_s=0, backward_s=0)


def _without_parameters(content: Content) -> None:
    content["tied"] = []
    for layer in content["layers"]:
        layer.update(dict.fromkeys(("parameters_bytes", "trainable_bytes", "gradient_bytes", "optimizer_bytes"), 0))


def _single(content: Content) -> None:
    content.update(layers=content["layers"][:1], tensors=content["tensors"][:1], tied=[])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "file.json:1:2: not JSON"),
        ("[]", "$.format: expected one of"),
        ('{"format": "autopar.dream", "version": 1}', 'found "autopar.dream"'),
        ('{"traceEvents": []}', "$.otherData.format"),
        ('{"format": "autopar.cluster", "version": 1, "format": "x"}', "$.format: key is given twice"),
        ('{"format": "autopar.cluster", "version": 2}', "$.version"),
    ],
)
def test_what_is_no_file_of_autopar_gets_one_line_and_exit_code_4(run: Run, content: str, expected: str) -> None:
    Path("file.json").write_text(content)
    refused(run, 4, expected, "show", "file.json")


@pytest.mark.parametrize("edit", [_without_time, _without_parameters, _single], ids=lambda edit: edit.__name__)
@pytest.mark.reliability(46, 47)
def test_degenerate_profiles_are_planned_simulated_and_compared(run: Run, edit: Edit) -> None:
    gpt_profile(blocks=3).save("profile.json")
    _edited("profile", edit)
    planned = "plan --gpus 2"
    for line in (planned, f"{planned} --gap 0", f"{planned} --exact", "simulate", "show plan.json", "compare"):
        well(run, *line.split())
