"""Stacks: a test that reaches its time limit prints what all its processes stand at, ranks included.

Processes that come from the warm one print their threads when they get `SIGUSR1` (`warm_server.py`), to the standard
error of the test. Then pytest-timeout prints this process's and fails the test; a pool of ranks whose job is left so is
closed, and the next test that asks for one gets another.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import pytest_timeout

PRINT_S = 0.2
"""Longest that a process may take to print."""


def pytest_configure() -> None:
    """Print the stacks of other processes before pytest-timeout prints this one's."""
    dump_stacks = pytest_timeout.dump_stacks

    def dump_all_stacks(terminal: pytest.TerminalReporter) -> None:
        dump_other_stacks()
        dump_stacks(terminal)

    pytest_timeout.dump_stacks = dump_all_stacks


def dump_other_stacks() -> None:
    """Have all processes that descend from this one, and know how, print their stacks."""
    for each in psutil.Process().children(recursive=True):
        if _prints(each.pid):
            with suppress(psutil.Error):
                os.write(2, f"stack of {each.name()} ({each.pid}):\n".encode())
                each.send_signal(signal.SIGUSR1)
                time.sleep(PRINT_S)


def _prints(pid: int) -> bool:
    """Return whether a process has a handler for the signal, which would end it otherwise."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
    return False
