"""Autopar's command line, called in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from autopar.cli import main

Command = Callable[..., tuple[int, str, str]]


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
