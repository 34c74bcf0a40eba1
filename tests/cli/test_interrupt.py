"""A command that is asked to end while a model is captured, measured or rehearsed ends at once, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FILE = """
import os
import signal

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        try:
            if os.environ.get("ENDS") and (os.environ["ENDS"] == "0" or torch.compiler.is_compiling()):
                os.kill(os.getpid(), int(os.environ["SIGNAL"]))
            for block in self.blocks:
                x = block(x)
            return x
        except BaseException:
            # Where C++ code has called this, it may let nothing through.
            os._exit(66)


def model():
    return Net()


def dataset():
    return torch.utils.data.TensorDataset(torch.zeros(16, 4), torch.zeros(16, dtype=torch.int64))


def loss(output, batch):
    return F.cross_entropy(output, batch[-1])


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


def command(folder: Path, *arguments: str, number: int = 0, exporting: bool = False) -> tuple[int, str]:
    """Run a command whose model sends its process a signal; return its exit code and what it says."""
    ends = {"ENDS": "1" if exporting else "0", "SIGNAL": str(number)} if number else {}
    found = subprocess.run(
        [sys.executable, "-m", "autopar", *arguments],
        cwd=folder,
        env={**os.environ, **ends, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
    )
    return found.returncode, found.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("ending")
    (here / "model.py").write_text(FILE)
    for arguments in (("profile", "model.py", "--batch", "4"), ("plan", "--gpus", "2", "--stages", "0-0:1,1-2:1")):
        code, said = command(here, *arguments)
        assert code == 0, said
    return here


PROFILE = ("profile", "model.py", "--batch", "4", "-o", "other.json", "--cluster-output", "others.json")


@pytest.mark.parametrize(
    ("arguments", "number", "exporting"),
    [
        (PROFILE, signal.SIGTERM, True),
        (PROFILE, signal.SIGINT, True),
        (PROFILE, signal.SIGHUP, False),
        (("rehearse", "plan.json"), signal.SIGTERM, False),
        (("run", "plan.json", "--steps", "1"), signal.SIGTERM, True),
        (("run", "plan.json", "--steps", "1"), signal.SIGINT, False),
    ],
)
def test_a_signal_ends_a_command_at_once(
    folder: Path, arguments: tuple[str, ...], number: signal.Signals, exporting: bool
) -> None:
    before = sorted(path.name for path in folder.iterdir())
    code, said = command(folder, *arguments, number=number, exporting=exporting)
    assert code == 128 + number, said
    ended = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert said.splitlines()[-1] == f"autopar: {ended}"
    assert "Traceback" not in said
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == [
        name for name in before if name != "__pycache__"
    ]
