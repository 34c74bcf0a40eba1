"""Interrupt: being asked to end unwinds a command, so that its processes and temporary folders go with it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["INTERRUPTED", "Terminated", "termination_unwinds"]

INTERRUPTED = 130


class Terminated(BaseException):
    """A signal asked this process to end; not an ``Exception``, nor an exit that a user's code could have meant."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Make SIGTERM, and the end of the terminal, unwind this process as an interrupt does."""

    def unwind(number: int, frame: object) -> None:
        raise Terminated(number)

    # Whoever started this command with nohup wants it to outlive the terminal.
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
