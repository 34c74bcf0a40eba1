"""Settings that every test shares, and autopar's command line called in the process of a test."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest
from hypothesis import settings

from autopar.cli import main

Command = Callable[..., tuple[int, str, str]]

# A shell starts background jobs with interrupts ignored, which the commands under test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # So does nohup with the end of the terminal: a handler, which children do not inherit, keeps it from this process.
    signal.signal(signal.SIGHUP, lambda number, frame: None)

settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run autopar with arguments; return (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["autopar", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call
