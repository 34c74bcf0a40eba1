"""Model files: what is found in them, and what a broken one is told, with its line."""
# ruff: noqa: ANN001, ANN201, ANN202

import sys

import pytest
import torch

import autopar
from autopar.capture import capture, load
from autopar.capture.model import hooks
from autopar.capture.model.source import StageTraits
from autopar.errors import AutoparError, ModelError, UsageError


def write(folder, text):
    (folder / "model.py").write_text(text)
    return str(folder / "model.py")


def _captured(path):
    user = load(path)
    return capture(user, user.build())


def _told(raising, path):
    with pytest.raises(ModelError) as caught:
        raising(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
        ("import torch\ndef model(): return torch.nn.LazyLinear(3)", "model.py: the shape of weight is not known"),
        ("def model():\n    raise KeyError('a')\n", "model.py:2: model raised KeyError"),
        ("def model():\n    return None\nloss = 3\n", "loss is a int"),
        (GOOD.replace("(output - batch[1]).square().mean()", "output"), "it must be a scalar"),
        (GOOD.replace("- batch[1]", "- batch[7]"), "model.py:8: loss() raised IndexError"),
        (GOOD.replace("output - ", "output.detach() - "), "nothing to train"),
        (GOOD.replace("ones(4", "ones(1"), "at least 2 samples"),
        (GOOD.replace("def dataset", "def other"), "defines no dataset()"),
    ],
)
@pytest.mark.reliability(44, 45)
def test_a_broken_model_file_is_refused_with_its_line(text, message, tmp_path):
    assert message in _told(_captured, write(tmp_path, text))


@pytest.mark.reliability(44, 45)
def test_model_files_factories_and_their_neighbours_are_found_and_other_specs_refused(tmp_path, monkeypatch, capsys):
    with pytest.raises(UsageError, match="only hf: models"):
        load(str(tmp_path / "model.py"), data="data.py")
    with pytest.raises(UsageError):
        load(str(tmp_path))
    with pytest.raises(ModelError, match="no such model file"):
        load(str(tmp_path / "none.py"))
    with pytest.raises(ModelError, match="no module is called"):
        load("autopar_has_no_such_module:model")
    (tmp_path / "capture_factory.py").write_text(GOOD.replace("def model", "def make"))
    monkeypatch.syspath_prepend(tmp_path)
    user = load("capture_factory:make")
    assert user.path.name == "capture_factory.py"
    assert len(capture(user, user.build()).layers) == 1
    with pytest.raises(AutoparError, match=r"defines no model\(\)"):
        load("capture_factory:model")
    (tmp_path / "capture_neighbour.py").write_text("WIDTH = 2\n")
    text = "import capture_neighbour as near\nprint('hello')\n" + GOOD.replace("2, 1", "near.WIDTH, 1")
    path = write(tmp_path, text)
    before = list(sys.path)
    user = load(path)
    one, other = user.build(3), user.build(3)
    assert torch.equal(one.weight, other.weight)
    assert len(capture(user, one).layers) == 1
    assert sys.path == before
    assert capsys.readouterr().out == ""
    assert isinstance(user.make_optimizer(one.named_parameters()), torch.optim.AdamW)
    assert user.make_scheduler(user.make_optimizer(one.named_parameters())) is None


TELLING = """
import torch


class Told(torch.optim.SGD):
    def __init__(self, parameters, delay=0.0, replicas=1):
        super().__init__(parameters, lr=0.1)
        self.told = {"delay": delay, "replicas": replicas}


make = Told
"""
BOTH, ONE, HALF = {"delay": 0.5, "replicas": 4}, {"delay": 0, "replicas": 4}, {"delay": 0.5}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def optimizer(parameters): return make(parameters)", {}),
        ("def optimizer(parameters, delay): return make(parameters, delay=delay)", HALF),
        ("def optimizer(parameters, *, replicas, delay=9): return make(parameters, delay, replicas)", BOTH),
        ("def optimizer(named_parameters, replicas=3): return make(dict(named_parameters).values(), 0, replicas)", ONE),
        ("def optimizer(parameters, **more): return make(parameters, **more)", {}),
        ("def optimizer(delay): return make(delay)", {}),
        ("import functools; optimizer = functools.partial(make, delay=7)", {"delay": 7, "replicas": 4}),
        ("class optimizer(Told):\n    def __init__(s, parameters, delay): super().__init__(parameters, delay)", HALF),
    ],
)
def test_an_optimizer_is_told_of_its_stage_what_it_asks_for(tmp_path, text, told):
    user = load(write(tmp_path, GOOD + TELLING + text))
    found = user.make_optimizer(user.build().named_parameters(), StageTraits(0.5, 4))
    assert found.told == {"delay": 0.0, "replicas": 1} | told
    assert set(user.optimizer_options) <= {"delay", "replicas"}
    assert user.make_optimizer(user.build().named_parameters()).told["replicas"] == 1


HOOKED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)
    def forward(self, x):
        return self.linear(x)
class Wide(Net):
    def __init__(self, width):
        super().__init__()
def model(): return Net()
def dataset(): return TensorDataset(torch.ones(4, 2), torch.ones(4, dtype=torch.long))
def loss(output, batch): return nn.functional.cross_entropy(output, batch[1])
def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)
"""
END = HOOKED.count("\n") + 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model = Net()", "model is a module, a Net, and not a function that builds one; write `def model(): return N"),
        ("model = nn.Sequential(Net(), nn.ReLU())", "write `def model(): return nn.Sequential(Net(), nn.ReLU())`"),
        ("if True:\n    model = Net()", "write `def model(): return Net()`"),
        ("model = Wide", "missing a required argument: 'width'; write `def model(): return Wide(width=...)`"),
        ("def model(width): ...", "model(width) is called as model(): missing a required argument: 'width'; give widt"),
        ("model = 'gpt2'", "model is a str; it must be a function: write `def model(): return Net()`"),
        ("async def model(): return Net()", "model is an async function; write `def model():` without async"),
        ("def loss(output): ...", "loss(output) is called as loss(output, batch): too many positional arguments; writ"),
        ("def loss(output, x, y): ...", "loss(output, batch): missing a required argument: 'y'; write `def loss"),
        ("loss = nn.CrossEntropyLoss", "loss is the class CrossEntropyLoss, which takes no outputs; write `def loss"),
        ("def dataset(split): ...", "called as dataset(): missing a required argument: 'split'; give split"),
        ("dataset = TensorDataset(torch.ones(4, 2))", "a function: write `def dataset(): return TensorDataset("),
        ("def optimizer(): ...", "called as optimizer(parameters): too many positional arguments; write `def"),
        ("optimizer = torch.optim.SGD(Net().parameters())", "write `def optimizer(parameters): return SGD(param"),
        ("def scheduler(): ...", "scheduler() is called as scheduler(optimizer): too many"),
        ("def collate(a, b): ...", "collate(a, b) is called as collate(samples): missing a required argument: 'b'"),
        ("def layers(): ...", "called as layers(model): too many positional arguments; write `def layers(model)"),
    ],
)
def test_what_cannot_be_called_as_it_will_be_is_told_in_a_line_with_what_to_write(text, said, tmp_path):
    path = write(tmp_path, f"{HOOKED}{text}\n")
    found = _told(load, path)
    assert found.startswith(f"{path}:{END + text.startswith('if')}: ")
    assert said in found


@pytest.mark.parametrize(
    "text",
    [
        "model = Net",
        "optimizer = torch.optim.SGD",
        "def loss(output, batch, weight=1.0): return output.mean()",
        "def loss(*arguments): return arguments[0].mean()",
        "import functools\ndef _build(width): return Net()\nmodel = functools.partial(_build, 3)",
        "class _Loss(nn.Module):\n    def forward(self, output, batch): return output.mean()\nloss = _Loss()",
    ],
)
def test_whatever_can_be_called_so_is_as_good_as_a_function(text, tmp_path):
    user = load(write(tmp_path, f"{HOOKED}{text}\n"))
    assert len(capture(user, user.build()).layers) == 1
    assert isinstance(user.make_optimizer(user.build().named_parameters()), torch.optim.Optimizer)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("del loss", "there is no loss(), so forward(self, x) is given all 2 items of a sample: too many positional"),
        ("def loss(a, target): return nn.functional.cross_entropy(a, target)", "its target is batch[1]: `def"),
        ("def loss(output, batch): return nowhere(output)", "model.py:19: loss() raised NameError: name 'nowhere' is"),
        ("loss = nn.CrossEntropyLoss()", "loss(output, batch) is given the whole batch; its target is batch[1]"),
        ("def dataset(): return TensorDataset(*[torch.ones(4, 2)] * 3)", "items of a sample but the last, the target"),
        (
            "def dataset(): return [{'y': torch.ones(2), 'x1': torch.ones(2)}] * 4\nNet.forward = lambda s, x1, x2: x1",
            "missing a required argument: 'x2', and the batch has the keys y, x1; let dataset() or collate() give it",
        ),
        ("loss = nn.CrossEntropyLoss()\ndef dataset(): return [{'x': torch.ones(2), 'y': 1}] * 4", "a dict of x, y"),
        ("del model", "defines no model(); add a function that returns a torch.nn"),
        ("del model\ndef build_model(): return Net()", "write `model = build_model`"),
        ("def model(): Net()", "model() returned None; it must return a torch.nn.Module: write `return Net()`"),
        ("def model(): return Wide", "model() returned the class Wide; it must return a torch.nn.Module: write `retur"),
    ],
)
def test_what_does_not_fit_together_or_is_not_there_is_told_with_what_to_write(text, said, tmp_path):
    assert said.replace("(self, x)", "(x)") in _told(_captured, write(tmp_path, f"{HOOKED}{text}\n"))


def test_classes_wrong_losses_and_optimizers_that_want_the_model_are_told_what_they_are_given(tmp_path):
    batch = (torch.ones(4, 2), torch.ones(4, 1))
    with pytest.raises(ModelError, match=r"is the class Linear, where a torch.nn.Module is needed: pass Linear\("):
        autopar.profile(torch.nn.Linear, batch)
    with pytest.raises(ModelError, match=r"called as loss\(output, batch\): too many positional"):
        autopar.profile(torch.nn.Linear(2, 1), batch, loss=lambda output: output)
    user = load(write(tmp_path, f"{HOOKED}def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)\n"))
    with pytest.raises(ModelError, match=r"raised AttributeError: .*; optimizer\(parameters\) is given a list"):
        user.make_optimizer(user.build().named_parameters())


def test_what_a_name_is_bound_to_is_shown_if_it_is_short():
    for length, shown in ((60, True), (61, False)):
        value = "1" * length
        assert hooks._last_binding(f"x = 2\nx = {value}\n".encode(), "x") == (2, value if shown else "")
