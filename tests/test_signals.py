"""A command that is asked to end while a model is captured, measured or rehearsed ends at once, and leaves nothing."""

import os
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import autopar
from autopar.signals import (
    Termination,
    ended_by,
    may_unwind,
    record_interrupts,
    stopping,
    unwind_on_termination,
    unwinding_aborts,
)
from suite import warm

FILE = """
import os
import signal
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Sequential):
    def forward(self, x):
        try:
            if os.environ.get("ENDS") and (os.environ["ENDS"] == "0" or torch.compiler.is_compiling()):
                os.kill(os.getpid(), int(os.environ["SIGNAL"]))
            return super().forward(x)
        except BaseException:
            # Where C++ code has called this, it may let nothing through.
            os._exit(66)

def model():
    return Net(*(nn.Linear(4, 4) for _ in range(3)))

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
    environment = {**os.environ, **ends, "TMPDIR": str(folder)}
    line = [sys.executable, "-m", "autopar", *arguments]
    found = warm.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    return found.returncode, found.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("ending")
    (here / "model.py").write_text(FILE)
    autopar.profile(here / "model.py", 4, budget_s=0.1, tensor=1).save(here / "profile.json")
    code, said = command(here, "plan", "--gpus", "2", "--stages", "0-0:1,1-2:1")
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
    before = {path.name for path in folder.iterdir()} - {"__pycache__"}
    code, said = command(folder, *arguments, number=number, exporting=exporting)
    assert code == 128 + number, said
    ended = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert said.splitlines()[-1] == f"autopar: {ended}"
    assert "Traceback" not in said
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before


def test_interrupts_are_noted_and_unwind_only_where_they_may_and_newest_first(
    capfd: pytest.CaptureFixture[str],
) -> None:
    came: list[int] = []
    with record_interrupts(came), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert came == [signal.SIGINT]
    assert [ended_by(each) for each in (signal.SIGINT, signal.SIGHUP)] == ["interrupted", "ended by SIGHUP"]
    assert may_unwind()
    with unwinding_aborts(), unwinding_aborts():
        assert not may_unwind()
    assert may_unwind()
    came: list[int] = []
    ask = Mock(return_value=True)
    with unwind_on_termination(came), stopping(ask):
        os.kill(os.getpid(), signal.SIGTERM)
        assert (came, ask.call_count) == ([signal.SIGTERM], 1)
        with pytest.raises(Termination, match="ended by SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
    assert (came, ask.call_count) == ([signal.SIGTERM] * 2, 1)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert capfd.readouterr().err == "autopar: ended by SIGTERM: ending behind this step; once more ends at once\n"
    found = warm.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert (found.returncode, found.stdout.split(), found.stderr) == (7, ["first", "second", "last"], "why\n")


ENDING = """
from autopar.signals import closing, end

def fail():
    print("second", flush=True)
    raise RuntimeError

with closing(lambda: print("last", flush=True)), closing(fail), closing(lambda: print("first", flush=True)):
    with closing(lambda: print("never")):
        pass
    try:
        end(7, "why")
    finally:
        print("unwound")
"""
