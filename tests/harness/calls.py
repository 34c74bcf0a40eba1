"""Calls of autopar's commands in the process of a test: what has to end well, and what has to be refused."""

from collections.abc import Callable
from pathlib import Path

MODEL = """
import torch
def model():
    return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
def dataset():
    return torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
def loss(output, batch):
    return (output - batch[1]).square().mean()
"""
Run = Callable[..., tuple[int, str, str]]
"""Runs autopar with arguments; returns (exit code, stdout, stderr)."""


def well(run: Run, *words: str) -> tuple[str, str]:
    """Run a command that has to end well; return what it writes to standard output, and to standard error on a line."""
    code, out, err = run(*words)
    assert code == 0, err
    return out, " ".join(err.split())


def files() -> dict[Path, bytes]:
    """Return what is in the files of the working folder and below."""
    return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file() and path.suffix != ".pyc"}


def refused(run: Run, code: int, said: str, *words: str) -> None:
    """Run a command that has to be refused in one line, and to make and change no file."""
    before = files()
    found, out, err = run(*words)
    assert (found, out) == (code, ""), err
    assert err.startswith("autopar: ")
    assert err.count("\n") == 1
    assert said in err
    assert files() == before


def ended(run: Run, code: int, said: str, *words: str) -> None:
    """Run a command that has to end with a line of error, whatever it has told before."""
    found, _, err = run(*words)
    assert found == code, err
    assert err.splitlines()[-1].startswith("autopar: ")
    assert said in err.splitlines()[-1]
    assert "Traceback" not in err
