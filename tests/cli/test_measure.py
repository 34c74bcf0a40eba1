"""``autopar profile``: what it writes, and how it refuses; ``autopar cluster``: probing under torchrun and by itself,
listing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from autopar.cli import app
from autopar.errors import AutoparError, UsageError
from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.profile import Profile
from autopar.hardware.clusters import cluster_named
from autopar.hardware.gpus import GPUS
from calls import Run, ended, well

MODEL = """
import torch
def model():
    return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
def dataset():
    return torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
def loss(output, batch):
    return (output - batch[1]).square().mean()
"""


def run_profile(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", *arguments])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def test_profile_and_cluster_are_written_and_the_source_is_relative(folder: Path) -> None:
    (folder / "out").mkdir()
    result = run_profile("model.py", "--batch", "4", "--device", "A100", "-o", "out/p.json", "--json")
    assert result.exit_code == 0, result.output
    profile = Profile.load(folder / "out" / "p.json")
    assert profile.model.source == "../model.py"
    assert json.loads(result.stdout) == json.loads(profile.dumps())
    assert len(Cluster.load(folder / "out" / "cluster.json").devices) >= 1
    again = run_profile("model.py", "--batch", "4", "--device", "A100", "-o", "out/p.json")
    assert isinstance(again.exception, AutoparError)
    assert again.exception.exit_code == 2
    assert "--overwrite" in str(again.exception)


@pytest.mark.parametrize(
    ("replaced", "by", "options", "code", "message"),
    [
        ("def model():", "def model(:", (), 4, "model.py:3: invalid syntax"),
        (
            "import torch",
            "import torch\nraise ValueError('no')",
            (),
            4,
            "model.py:3: importing it raised ValueError: no",
        ),
        ("ones(8", "ones(3", ("--batch", "4"), 2, "the dataset has 3 samples"),
        ("ones(8", "ones(1", ("--batch", "1"), 4, "at least 2 samples"),
        ("ones(8", "ones(0", ("--batch", "4"), 4, "dataset() is empty"),
        (
            "torch.nn.Linear(4, 1))",
            "torch.nn.Linear(4, 1)).double()",
            ("--precision", "bf16"),
            2,
            "are fp64; leave the option out, or build them in",
        ),
        ("Linear(4, 1))", "Linear(4, 1)).double()", ("--precision", "bf16", "--device", "A100"), 2, "are fp64; leave"),
        ("(output - batch[1])", "(output.detach() - batch[1])", (), 4, "nothing to train"),
        ("    return torch.nn.Sequential", "    return torch.nn.ReLU() or torch.nn.Sequential", (), 4, "no parameter"),
        ("torch.nn.Linear(4, 1))", "torch.nn.Linear(4, 1)).half()", (), 4, "must be float32"),
        ("", "", ("--device", "tpu"), 2, "no GPU called 'tpu' is known"),
        ("", "", ("--ranks", "1"), 2, "at least 2 ranks"),
        ("", "", ("-o", "none/p.json"), 4, "no such folder"),
        ("", "", ("--cluster-output", "profile.json"), 2, "cannot hold both"),
    ],
)
@pytest.mark.reliability(35, 44, 46)
def test_bad_input_is_one_line_an_exit_code_and_no_file(
    folder: Path, replaced: str, by: str, options: tuple[str, ...], code: int, message: str
) -> None:
    (folder / "model.py").write_text(MODEL.replace(replaced, by) if replaced else MODEL)
    given = options if "--batch" in options else ("--batch", "4", *options)
    device = () if "--device" in options else ("--device", "cpu")
    result = run_profile("model.py", *given, *device)
    assert isinstance(result.exception, AutoparError), result.output
    assert result.exception.exit_code == code
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"model.py"}


def test_a_layer_that_autocast_breaks_is_named(folder: Path) -> None:
    mask = "(lambda x: x.masked_fill(x > 0, torch.finfo(x.dtype).min))(output)"
    (folder / "model.py").write_text(MODEL.replace("(output - batch[1])", f"({mask} - batch[1])"))
    result = run_profile("model.py", "--batch", "2", "--device", "cpu", "--precision", "bf16")
    assert isinstance(result.exception, AutoparError)
    assert result.exception.exit_code == 4
    assert "does not run" in str(result.exception)
    assert not (folder / "profile.json").exists()


def links(name: str, device: str = "cpu") -> str:
    link = Link(level="node", latency_s=1e-6, bytes_per_s=1e9)
    return Cluster(name=name, devices=(Device(type=device, memory_bytes=10**9),) * 2, links=(link,)).dumps()


@pytest.mark.parametrize(
    ("device", "estimated", "said"),
    [
        ("cpu", False, "wrote; --overwrite"),
        ("cpu", True, "whose devices are cpu, not cuda"),
        ("cuda", True, "wrote; -"),
    ],
)
def test_links_that_were_probed_are_kept_and_that_is_said(
    folder: Path, device: str, estimated: bool, said: str
) -> None:
    before = links("probed", device)
    (folder / "cluster.json").write_text(before)
    result = run_profile("model.py", "--batch", "2", "--device", "A100" if estimated else "cpu")
    assert result.exit_code == 0, result.output
    assert (folder / "cluster.json").read_text() == before
    line = " ".join(result.stderr.split())
    assert "Kept: cluster.json, which `autopar cluster probe`" in line
    assert said in line
    assert "Written: profile.json;" in line


def test_links_that_were_probed_are_replaced_where_that_is_asked(folder: Path) -> None:
    (folder / "cluster.json").write_text(links("probed"))
    asked = ("model.py", "--batch", "2", "--device", "A100", "--ranks", "4")
    error = run_profile(*asked).exception
    assert isinstance(error, UsageError)
    assert "--ranks 4: cluster.json holds links that `autopar cluster probe` measured" in str(error)
    assert not (folder / "profile.json").exists()
    result = run_profile(*asked, "--overwrite")
    assert result.exit_code == 0, result.output
    assert len(Cluster.load(folder / "cluster.json").devices) == 4


def test_links_of_an_earlier_profile_are_replaced(folder: Path) -> None:
    for text in (links("local"), "not a cluster"):
        (folder / "cluster.json").write_text(text)
        result = run_profile("model.py", "--batch", "2", "--device", "A100")
        assert result.exit_code == 0, result.output
        assert Cluster.load(folder / "cluster.json").devices[0].type == "A100-SXM-80G"
        assert "profile.json and cluster.json" in " ".join(result.stderr.split())


@pytest.mark.usefixtures("quick")
def test_links_that_one_gpu_leaves_as_they_were_are_mentioned(folder: Path) -> None:
    (folder / "cluster.json").write_text(links("local"))
    result = run_profile("model.py", "--batch", "2", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert (folder / "cluster.json").read_text() == links("local")
    assert "note: cluster.json was there before and is not of this profile" in " ".join(result.stderr.split())
    (folder / "cluster.json").unlink()
    assert "was there before" not in run_profile("model.py", "--batch", "2", "--device", "cpu").stderr


def test_float64_is_not_estimated_and_no_option_is_advised_that_would_not_help(folder: Path) -> None:
    double = MODEL.replace("Linear(4, 1))", "Linear(4, 1)).double()").replace("ones(8, 2)", "ones(8, 2).double()")
    (folder / "model.py").write_text(double)
    result = run_profile("model.py", "--batch", "2", "--device", "A100")
    assert isinstance(result.exception, UsageError), result.output
    message = str(result.exception)
    assert message.startswith("`device='A100-SXM-80G'`: the parameters of model.py are float64, and no rate of A100")
    assert message.endswith("build them in float32, or profile on a device that is there")


KINDS = ["p2p", "all_reduce", "all_gather", "reduce_scatter"]


@pytest.mark.slow
def test_a_quick_probe_writes_a_cluster_and_prints_both_bandwidths(run: Run) -> None:
    asked = ("--quick", "--device", "cpu", "--largest", "1MiB", "--json")
    out, err = well(run, "cluster", "probe", *asked)
    cluster = Cluster.load("cluster.json")
    assert out == cluster.dumps()
    assert [curve.kind for curve in cluster.curves] == KINDS
    assert cluster.overlaps == ()
    for expected in ("algbw", "busbw", "1 MiB", "p2p among 2 ranks in a node", "Written: cluster.json"):
        assert expected in err


@pytest.mark.slow
def test_under_torchrun_all_ranks_join_and_one_writes(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "autopar"]
    asked = ["cluster", "probe", "--quick", "--device", "cpu", "--largest", "64KiB", "-o", "mine.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *asked], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(tmp_path / "mine.json")
    assert [device.node for device in cluster.devices] == [0, 0]
    assert {(curve.kind, curve.ranks) for curve in cluster.curves} == {(kind, 2) for kind in KINDS}
    assert done.stderr.count("Written: mine.json") == 1


@pytest.mark.parametrize(
    ("size", "arguments", "message"),
    [
        ("1", (), "torchrun started a single rank"),
        ("2", ("--ranks", "2"), "--ranks 2: torchrun has started the ranks; leave it out"),
        ("two", (), "WORLD_SIZE must be a number, found 'two'"),
    ],
)
def test_a_launcher_that_does_not_fit_is_refused_and_one_rank_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch, size: str, arguments: tuple[str, ...], message: str
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    ended(run, 2, message, "cluster", "probe", "--device", "cpu", *arguments)
    monkeypatch.setenv("RANK", "1")
    for others in (("--device", "cpu", "--largest", "lots"), ("--device", "tpu", "--ranks", "2")):
        assert run("cluster", "probe", *others) == (2, "", "")


def test_known_gpus_are_listed_with_their_sources(run: Run) -> None:
    out, err = well(run, "cluster", "list", "--json")
    assert [gpu["name"] for gpu in json.loads(out)] == [gpu.name for gpu in GPUS]
    for gpu in GPUS:
        assert f"{gpu.name}: {gpu.source}" in err
    assert "4x8xA100-80G:200Gbps" in err


def test_a_named_cluster_is_shown_and_given_as_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run("cluster", "list", "4x8xA100-80G:200Gbps", "--json")
    assert code == 0
    assert Cluster.parse(out, Path("stdout")) == cluster_named("4x8xA100-80G:200Gbps")
    assert "Curves from 1 KiB to 1 GiB (estimated)" in err
    # Tables are whole on a terminal of 80 columns.
    assert all(len(line) <= 80 for line in err.splitlines())
    assert "estimated from what is published" in " ".join(err.split())
