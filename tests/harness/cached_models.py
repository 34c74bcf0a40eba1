"""A model that reads all that a capture may depend on, and changes of each, of which none may find what is kept."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from unittest.mock import patch

import torch
from torch import nn

from autopar.capture.cache import recall
from autopar.capture.graph import LayerGraph
from autopar.capture.layers import export
from autopar.capture.layers.export import capture_module
from autopar.capture.model.source import load

VARIABLE = "CACHED_MODEL_SCALE"
MODEL = """
import json, os, pathlib, random
import torch
from torch import nn
import helper

FACTOR = {"a": 2.0, "b": [1, 2, 3], "c": {"x", "y", "z"}}
TABLE = torch.arange(4.0)
HERE = pathlib.Path(__file__).parent

class Net(nn.Module):
    steps = 2
    def __init__(self):
        super().__init__()
        sizes = json.loads((HERE / "sizes.json").read_text())
        self.first, self.last = nn.Linear(4, sizes["hidden"]), nn.Linear(sizes["hidden"], 2)
        self.drop, self.rate = nn.Dropout(0.0), 0.5
        self.register_buffer("offset", torch.full((4,), sizes["offset"]))
    def forward(self, x):
        scale = float(os.environ.get("CACHED_MODEL_SCALE", "1")) * float((HERE / "scale.txt").read_text())
        x = (x * FACTOR["a"] + TABLE + self.offset) * scale
        for _ in range(self.steps):
            x = helper.squash(x, self.rate)
        return self.last(self.drop(torch.relu(self.first(x))))

def model():
    return Net()

def dataset():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, generator=generator), torch.tensor(0)) for _ in range(8)]

def loss(output, batch, weight=0.5):
    return weight * nn.functional.cross_entropy(output, batch[1])

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""
FILES = {
    "model.py": MODEL,
    "helper.py": "def squash(x, rate):\n    return x * rate\n",
    "sizes.json": '{"hidden": 6, "offset": 0.25}',
    "scale.txt": "1.5",
}


def _text(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


CHANGES: dict[str, Callable[[Path], None]] = {
    "source": _text("model.py", "torch.relu", "torch.tanh"),
    "source, a comment": _text("model.py", "class Net", "# more\nclass Net"),
    "helper": _text("helper.py", "x * rate", "x + rate"),
    "configuration": _text("sizes.json", "6", "7"),
    "a buffer's value": _text("sizes.json", "0.25", "0.5"),
    "a file that forward reads": _text("scale.txt", "1.5", "2.5"),
    "a file that forward reads is gone": lambda folder: (folder / "scale.txt").unlink(),
    "environment that forward reads": lambda folder: os.environ.update({VARIABLE: "3"}),
}
"""Of files and the environment, made before a model is loaded."""
STATE: dict[str, str] = {
    "a global": "module.FACTOR['a'] = 3.0",
    "in a global's list": "module.FACTOR['b'].append(4)",
    "in a global's set": "module.FACTOR['c'].add('w')",
    "a global tensor": "module.TABLE[1] = 7.0",
    "another tensor": "module.TABLE = torch.zeros(4)",
    "a class attribute": "module.Net.steps = 3",
    "an attribute": "net.rate = 0.25",
    "a rate": "net.drop.p = 0.5",
    "a buffer": "net.offset[0] = 1",
    "a frozen parameter": "net.first.weight.requires_grad_(False)",
    "a module": "net.last = torch.nn.Linear(6, 3)",
    "a tied parameter": "net.last.bias = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))",
    "types": "net.double()",
    "a default": "module.loss.__defaults__ = (0.75,)",
    "a function": "module.helper.squash = lambda x, rate: x - rate",
    "a hook": "net.first.register_forward_hook(lambda *_: None)",
    "torch's default type": "torch.set_default_dtype(torch.float64)",
    "a version": "torch.__version__ = torch.__version__ + '1'",
}
"""Of what is there in a process, made before a model is captured; ``module`` is that of the file."""


def write(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text)


@contextmanager
def restored() -> Iterator[None]:
    """Put torch and the environment back at the end of the block."""
    version, kind = torch.__version__, torch.get_default_dtype()
    with patch.dict(os.environ):
        try:
            yield
        finally:
            torch.__version__ = version
            torch.set_default_dtype(kind)


def recalled(folder: Path, state: str = "", seed: int = 0) -> tuple[bool, LayerGraph, nn.Module]:
    """Build and recall the model of a folder; return whether its graph was there, the graph, and the model."""
    captures = []

    def count(*arguments: object, **how: object) -> LayerGraph:
        captures.append(arguments)
        return capture_module(*arguments, **how)  # type: ignore[arg-type]

    with patch("sys.path", [str(folder), *sys.path]):
        sys.modules.pop("helper", None)
        user = load(str(folder / "model.py"))
        net = user.build(seed)
        exec(state, {"torch": torch, "net": net, "module": _Globals(user.factory.__globals__)})  # type: ignore[attr-defined]
        with patch.object(recall, "capture_module", count), patch.object(export, "capture_module", count):
            graph = recall.recall(user, net, seed)
    return not captures, graph, net


class _Globals:
    """The globals of a file, as attributes."""

    def __init__(self, variables: dict[str, object]) -> None:
        vars(self)["of_file"] = variables

    def __getattr__(self, name: str) -> object:
        return vars(self)["of_file"][name]

    def __setattr__(self, name: str, value: object) -> None:
        vars(self)["of_file"][name] = value


def tear(folder: Path, random: Random) -> str:
    """Damage an entry's files, as a full disk, a bad sector or somebody might; return how."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    path, how = random.choice(files), random.choice(["cut", "flipped", "gone", "longer", "other"])
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[: random.randrange(len(content))])
    elif how == "longer":
        path.write_bytes(content + random.randbytes(random.randint(1, 9)))
    elif how == "other":
        path.write_bytes(random.randbytes(len(content)))
    else:
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)
    return f"{path.name} {how}"
