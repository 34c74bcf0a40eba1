"""What tests share: settings, autopar's command line called in the process of a test, and rank processes."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer
from hypothesis import settings

from autopar.cli import main
from paths import BENCHMARKS, HARNESS
from suite import warm

if TYPE_CHECKING:
    from autopar.ranks.pool import RankPool

Command = Callable[..., tuple[int, str, str]]

# A shell starts background jobs with interrupts ignored, which the commands under test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # So does nohup with the end of the terminal: a handler, which children do not inherit, keeps it from this process.
    signal.signal(signal.SIGHUP, lambda number, frame: None)

settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests more time: they compute, and other work may slow them further."""
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.timeout(1200))


# Most of what a refusal takes is the making of all commands' options.
_command_of = functools.cache(typer.main.get_command)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run autopar with arguments; return (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["autopar", *arguments])
        monkeypatch.setattr("typer.main.get_command", _command_of)
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> Command:
    """Run autopar in a folder of the test's own, as on a wide terminal; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return command


@pytest.fixture(scope="session", autouse=True)
def _warm_ranks() -> Iterator[None]:
    """Fork all rank processes from one that has imported what they need."""
    warm.use_for_ranks()
    yield
    warm.close()


@pytest.fixture(scope="session")
def pools() -> Iterator[list[RankPool]]:
    """Give the rank processes that were started, the last ones alive; they end with the session."""
    started: list[RankPool] = []
    yield started
    for each in started:
        each.close()


@pytest.fixture
def living_pool(pools: list[RankPool], monkeypatch: pytest.MonkeyPatch) -> Callable[[], RankPool]:
    """Give what gives six rank processes that find the jobs of tests/runtime.

    They are others where a job that failed has ended them.
    """
    from autopar.ranks.pool import RankPool

    def living() -> RankPool:
        if not pools or pools[-1].is_closed:
            with monkeypatch.context() as patch:
                patch.setenv("PYTHONPATH", f"{HARNESS}{os.pathsep}{BENCHMARKS}", prepend=os.pathsep)
                pools.append(RankPool(6, imports=["autopar.runtime.start.worker"]))
        return pools[-1]

    return living


@pytest.fixture
def pool(living_pool: Callable[[], RankPool]) -> RankPool:
    """Give rank processes for one job that fails at most."""
    return living_pool()
