"""Model files: what is found in them, and what a broken one is told, with its line."""
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import sys

import pytest
import torch

from autopar.capture import capture, load
from autopar.errors import AutoparError, ModelError, UsageError


def _captured(path):
    user = load(str(path))
    return capture(user, user.build())


GOOD = """
import torch
def model():
    return torch.nn.Linear(2, 1)
def dataset():
    return torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
def loss(output, batch):
    return (output - batch[1]).square().mean()
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def model(:\n", "model.py:1: invalid syntax"),
        ("import math\n\nmath.sqrt(-1)\n", "model.py:3: importing it raised ValueError: math domain error"),
        ("import sys\nsys.exit(3)\n", "model.py:2: importing it raised SystemExit(3)"),
        ("x = 1\n", "model.py: defines no model()"),
        ("def model():\n    return 3\n", "model() returned a int"),
        ("def model():\n    raise KeyError('a')\n", "model.py:2: model raised KeyError"),
        ("def model():\n    return None\nloss = 3\n", "loss is a int"),
        (GOOD.replace("(output - batch[1]).square().mean()", "output"), "it must be a scalar"),
        (
            GOOD.replace("(output - batch[1])", "(output - batch[7])"),
            "model.py:8: the model's forward raised IndexError",
        ),
        (GOOD.replace("output - ", "output.detach() - "), "nothing to train"),
        (GOOD.replace("ones(4", "ones(1"), "at least 2 samples"),
        (GOOD.replace("def dataset", "def other"), "defines no dataset()"),
    ],
)
def test_a_broken_model_file_is_refused_with_its_line(text, message, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(text)
    with pytest.raises(ModelError) as caught:
        _captured(path)
    assert message in str(caught.value)


def test_other_specs_are_refused(tmp_path):
    with pytest.raises(UsageError, match="only hf: models"):
        load(str(tmp_path / "model.py"), data="data.py")
    with pytest.raises(UsageError):
        load(str(tmp_path))
    with pytest.raises(ModelError, match="no such model file"):
        load(str(tmp_path / "none.py"))
    with pytest.raises(ModelError, match="no module is called"):
        load("autopar_has_no_such_module:model")


def test_a_model_file_prints_to_standard_error_and_finds_its_neighbours(tmp_path, capsys):
    (tmp_path / "capture_neighbour.py").write_text("WIDTH = 2\n")
    path = tmp_path / "model.py"
    path.write_text("import capture_neighbour\nprint('hello')\n" + GOOD.replace("2, 1", "capture_neighbour.WIDTH, 1"))
    before = list(sys.path)
    user = load(str(path))
    one, other = user.build(3), user.build(3)
    assert torch.equal(one.weight, other.weight)
    assert len(capture(user, one).layers) == 1
    assert sys.path == before
    assert capsys.readouterr().out == ""
    assert isinstance(user.make_optimizer(one.named_parameters()), torch.optim.AdamW)
    assert user.make_scheduler(user.make_optimizer(one.named_parameters())) is None


def test_a_factory_is_found_by_its_module(tmp_path, monkeypatch):
    (tmp_path / "capture_factory.py").write_text(GOOD.replace("def model", "def make"))
    monkeypatch.syspath_prepend(tmp_path)
    user = load("capture_factory:make")
    assert user.path.name == "capture_factory.py"
    assert len(capture(user, user.build()).layers) == 1
    with pytest.raises(AutoparError, match=r"defines no model\(\)"):
        load("capture_factory:model")
