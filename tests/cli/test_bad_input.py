"""Bad files and contradictory flags: one line that says where, the right exit code, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.formats.plan import Plan
from random_problems import gpt_profile, local_cluster

Run = Callable[..., tuple[int, str, str]]
Content = dict[str, Any]
Edit = Callable[[Content], object]

G = ("--gpus", "2")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """Run autopar in a folder that holds a profile and a cluster; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    gpt_profile(blocks=3).save("profile.json")
    local_cluster(2).save("cluster.json")
    return command


def _edited(name: str, edit: Edit) -> None:
    content = json.loads(Path(name).read_text())
    edit(content)
    Path(name).write_text(json.dumps(content))


def _refused(run: Run, code: int, message: str, *arguments: str) -> None:
    before = sorted(os.listdir("."))
    found, out, err = run(*arguments)
    assert (found, out) == (code, ""), err
    assert err.startswith("autopar: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(os.listdir(".")) == before


def _cost(**changes: object) -> Edit:
    return lambda content: content["layers"][1]["costs"][0].update(changes)


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


def _apart(content: Content) -> None:
    content["tied"] = []
    content["tensors"] = [tensor for tensor in content["tensors"] if tensor["producer"] != "h.0"]


@pytest.mark.parametrize(
    ("edit", "code", "message"),
    [
        (_cost(forward_s=float("nan")), 4, "profile.json: $.layers[1].costs[0].forward_s: NaN is not a JSON number"),
        (_cost(backward_s=float("inf")), 4, "$.layers[1].costs[0].backward_s: Infinity is not"),
        (_cost(forward_s=-1), 4, "$.layers[1].costs[0].forward_s: "),
        (_cost(forward_s="1"), 4, "$.layers[1].costs[0].forward_s: "),
        (_cost(peak_bytes=-5), 4, "$.layers[1].costs[0].peak_bytes: "),
        (_cost(micro_batch=0), 4, "$.layers[1].costs[0].micro_batch: "),
        (lambda content: content["layers"][1].update(parameters_bytes=2**70), 4, "$.layers[1].parameters_bytes: "),
        (lambda content: content["layers"][1].update(parameters_bytes=2**45), 3, "; layer h.0 alone fits no device; "),
        (lambda content: content["layers"][1].update(name="wte"), 4, "$.layers[0].name: layer 'wte' is given twice"),
        (lambda content: content.update(layers=[]), 4, "$.layers: "),
        (lambda content: content.update(batch=True), 4, "$.batch: "),
        (_apart, 4, "profile.json: $.tensors: no tensor connects wte, h.0 with the last layer, head; list what"),
        (lambda content: content["tensors"][2].update(consumers=["wte"]), 4, "$.tensors[2].consumers: 'wte' does not"),
        (lambda content: content["tensors"][1].update(producer="nope"), 4, "$.tensors[1].producer: no layer is called"),
    ],
)
def test_a_bad_profile_is_refused_by_plan_and_compare(run: Run, edit: Edit, code: int, message: str) -> None:
    _edited("profile.json", edit)
    for command in ("plan", "compare"):
        _refused(run, code, message, command, *G)


@pytest.mark.parametrize(
    ("edit", "code", "message"),
    [
        (lambda content: content["links"][0].update(bytes_per_s=0), 4, "cluster.json: $.links[0].bytes_per_s: "),
        (lambda content: content["links"][0].update(latency_s=-1), 4, "$.links[0].latency_s: "),
        (lambda content: content.update(links=[]), 4, "$.links: "),
        (lambda content: content.update(devices=[]), 4, "$.devices: "),
        (lambda content: content["devices"][1].update(node=1), 4, "$.links: devices on several nodes need a link of"),
        (lambda content: content["devices"][1].update(type="H100"), 4, "$.devices[1].type: the profile has no costs"),
        (lambda content: content["curves"][0].update(seconds=[]), 4, "$.curves[0].seconds: "),
        (lambda content: [each.update(memory_bytes=0) for each in content["devices"]], 3, "more than 0 B"),
    ],
)
@pytest.mark.reliability(55)
def test_a_bad_cluster_is_refused_by_plan_and_compare(run: Run, edit: Edit, code: int, message: str) -> None:
    _edited("cluster.json", edit)
    for command in ("plan", "compare"):
        _refused(run, code, message, command)


@pytest.mark.parametrize("edit", [_without_time, _without_parameters, _single], ids=lambda edit: edit.__name__)
@pytest.mark.reliability(46, 47)
def test_degenerate_profiles_are_planned_simulated_and_compared(run: Run, edit: Edit) -> None:
    _edited("profile.json", edit)
    for command in (
        ("plan", *G),
        ("plan", *G, "--gap", "0"),
        ("plan", *G, "--exact"),
        ("simulate",),
        ("show", "plan.json"),
        ("compare", *G),
    ):
        code, _, err = run(*command)
        assert code == 0, err


@pytest.mark.parametrize("kept", [0, 1, 400, -3])
def test_truncated_files_are_refused_with_the_place(run: Run, kept: int) -> None:
    assert run("plan", *G)[0] == 0
    for name, command in (
        ("profile.json", ("plan", *G)),
        ("profile.json", ("compare", *G)),
        ("cluster.json", ("plan", *G)),
        ("plan.json", ("simulate",)),
        ("plan.json", ("show", "plan.json")),
    ):
        whole = Path(name).read_text()
        Path(name).write_text(whole[:kept])
        _refused(run, 4, f"{name}:", *command)
        Path(name).write_text(whole)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--gpus", "0"), 2, "--gpus must be at least 1, found 0"),
        (("--gpus", "-1"), 2, "--gpus must be at least 1, found -1"),
        (("--gpus", "x"), 2, "Invalid value for '--gpus'"),
        (("--gpus", "1e9"), 2, "found '1e9' (try --help)"),
        (("--gpus=2.5",), 2, "found '2.5' (try --help)"),
        (("--gpus", "2", "--gpus", "x"), 2, "found 'x' (try --help)"),
        (("--batch", "8", "--gpus"), 2, "requires an argument. (try --help)"),
        (("--gpus", "99999999"), 2, "--gpus must be at most 65536"),
        (("--gpus", "7", "--min-stages", "7"), 2, "--min-stages 7: 5 layers on 7 devices make at most 5 stages"),
        (("--gpus", "2", "--min-stages", "7"), 2, "--min-stages 7 needs as many devices, but --gpus is 2"),
        ((*G, "--memory", "1KB"), 3, "a plan fits with --memory "),
        ((*G, "--bandwidth", "0GB/s"), 2, "--bandwidth '0GB'"),
        ((*G, "--gap", "nan"), 2, "--gap must be 0 or more, found nan"),
        ((*G, "--batch", "2147483648"), 2, "--batch must be below 2147483648"),
        ((*G, "--recompute", "maybe"), 2, "--recompute must be auto, none or full"),
        ((*G, "--stages", "0-4:1", "--use-all"), 2, "--stages uses 1 devices, but --use-all asks for all 2"),
        ((*G, "--cluster", ""), 2, "--cluster '': name a file or a cluster"),
        (("--cluster", "0xH100"), 2, "cluster '0xH100' has no devices"),
        (("--cluster", "8xNOPE"), 2, "no GPU called 'NOPE' is known"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
@pytest.mark.reliability(46, 49, 50)
def test_flags_that_cannot_be_are_refused(run: Run, arguments: tuple[str, ...], code: int, message: str) -> None:
    _refused(run, code, message, "plan", *arguments)


@pytest.mark.reliability(46, 49)
def test_more_devices_than_layers_are_planned(run: Run) -> None:
    assert run("plan", "--gpus", "7")[0] == 0
    assert run("plan", "--gpus", "7", "--min-stages", "5", "--schedule", "1f1b")[0] == 0
    assert len(Plan.load("plan.json").stages) == 5


def test_show_says_what_plan_said(run: Run) -> None:
    _, _, planned = run("plan", *G, "--min-stages", "2", "--schedule", "1f1b")
    code, _, shown = run("show", "plan.json")
    assert code == 0
    for expected in ("bound of any plan", "one stage a device: contiguous", "+ links", "+ memory", "gap", "what binds"):
        assert expected in planned
        assert expected in shown


def test_commands_that_read_files_import_no_torch(tmp_path: Path) -> None:
    gpt_profile(blocks=3).save(tmp_path / "profile.json")
    (tmp_path / "graph.txt").write_text(
        "node1 -- x -- forward_compute_time=1, backward_compute_time=1, activation_size=1, parameter_size=1\n"
    )
    script = (
        "import sys\nfrom autopar.cli import main\nsys.argv = sys.argv[1:]\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "assert not {'torch', 'pandas', 'matplotlib', 'networkx', 'pulp'} & set(sys.modules)\n"
    )
    commands = (
        ("plan", *G),
        ("compare", *G),
        ("show", "plan.json"),
        ("show", "profile.json"),
        ("import", "pipedream", "graph.txt", "-o", "imported.json"),
        ("cluster", "list"),
    )
    for arguments in commands:
        command = [sys.executable, "-c", script, "autopar", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
