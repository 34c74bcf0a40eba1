"""``autopar profile`` from the command line: what it writes, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from autopar.cli import app
from autopar.errors import AutoparError, UsageError
from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.profile import Profile

MODEL = """
import torch
def model():
    return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
def dataset():
    return torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
def loss(output, batch):
    return (output - batch[1]).square().mean()
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", *arguments])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def test_profile_and_cluster_are_written_and_the_source_is_relative(folder: Path) -> None:
    (folder / "out").mkdir()
    result = run("model.py", "--batch", "4", "--device", "cpu", "-o", "out/p.json", "--json")
    assert result.exit_code == 0, result.output
    profile = Profile.load(folder / "out" / "p.json")
    assert profile.model.source == "../model.py"
    assert json.loads(result.stdout) == json.loads(profile.dumps())
    assert len(Cluster.load(folder / "out" / "cluster.json").devices) >= 1
    again = run("model.py", "--batch", "4", "--device", "cpu", "-o", "out/p.json")
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
    result = run("model.py", *given, *device)
    assert isinstance(result.exception, AutoparError), result.output
    assert result.exception.exit_code == code
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"model.py"}


def test_a_layer_that_autocast_breaks_is_named(folder: Path) -> None:
    mask = "(lambda x: x.masked_fill(x > 0, torch.finfo(x.dtype).min))(output)"
    (folder / "model.py").write_text(MODEL.replace("(output - batch[1])", f"({mask} - batch[1])"))
    result = run("model.py", "--batch", "2", "--device", "cpu", "--precision", "bf16")
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
    result = run("model.py", "--batch", "2", "--device", "A100" if estimated else "cpu")
    assert result.exit_code == 0, result.output
    assert (folder / "cluster.json").read_text() == before
    line = " ".join(result.stderr.split())
    assert "Kept: cluster.json, which `autopar cluster probe`" in line
    assert said in line
    assert "Written: profile.json;" in line


def test_links_that_were_probed_are_replaced_where_that_is_asked(folder: Path) -> None:
    (folder / "cluster.json").write_text(links("probed"))
    refused = run("model.py", "--batch", "2", "--device", "A100", "--ranks", "4")
    assert isinstance(refused.exception, UsageError)
    assert "--ranks 4: cluster.json holds links that `autopar cluster probe` measured" in str(refused.exception)
    assert not (folder / "profile.json").exists()
    result = run("model.py", "--batch", "2", "--device", "A100", "--ranks", "4", "--overwrite")
    assert result.exit_code == 0, result.output
    assert len(Cluster.load(folder / "cluster.json").devices) == 4


@pytest.mark.parametrize("text", [links("local"), "not a cluster"])
def test_links_of_an_earlier_profile_are_replaced(folder: Path, text: str) -> None:
    (folder / "cluster.json").write_text(text)
    result = run("model.py", "--batch", "2", "--device", "A100")
    assert result.exit_code == 0, result.output
    assert Cluster.load(folder / "cluster.json").devices[0].type == "A100-SXM-80G"
    assert "profile.json and cluster.json" in " ".join(result.stderr.split())


def test_links_that_one_gpu_leaves_as_they_were_are_mentioned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.cli.profile._local_ranks", lambda here, asked: 1)
    (folder / "cluster.json").write_text(links("local"))
    result = run("model.py", "--batch", "2", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert (folder / "cluster.json").read_text() == links("local")
    line = " ".join(result.stderr.split())
    assert "note: cluster.json was there before and is not of this profile" in line
    (folder / "cluster.json").unlink()
    assert "was there before" not in run("model.py", "--batch", "2", "--device", "cpu").stderr


def test_float64_is_not_estimated_and_no_option_is_advised_that_would_not_help(folder: Path) -> None:
    double = MODEL.replace("Linear(4, 1))", "Linear(4, 1)).double()").replace("ones(8, 2)", "ones(8, 2).double()")
    (folder / "model.py").write_text(double)
    result = run("model.py", "--batch", "2", "--device", "A100")
    assert isinstance(result.exception, UsageError), result.output
    message = str(result.exception)
    assert message.startswith("`device='A100-SXM-80G'`: the parameters of model.py are float64, and no rate of A100")
    assert message.endswith("build them in float32, or profile on a device that is there")
