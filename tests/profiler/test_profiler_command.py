"""``autopar profile`` from the command line: what it writes, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from autopar.cli import app
from autopar.errors import AutoparError
from autopar.formats.cluster import Cluster
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
        ("(output - batch[1])", "(output.detach() - batch[1])", (), 4, "nothing to train"),
        ("    return torch.nn.Sequential", "    return torch.nn.ReLU() or torch.nn.Sequential", (), 4, "no parameter"),
        ("torch.nn.Linear(4, 1))", "torch.nn.Linear(4, 1)).half()", (), 4, "must be float32"),
        ("", "", ("--device", "tpu"), 2, "no GPU called 'tpu' is known"),
        ("", "", ("--ranks", "1"), 2, "at least 2 ranks"),
        ("", "", ("-o", "none/p.json"), 4, "no such folder"),
        ("", "", ("--cluster-output", "profile.json"), 2, "cannot hold both"),
    ],
)
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
