"""Signals: being asked to end unwinds a command, so that its processes and temporary folders go with it.

An exception that a signal raises while C++ code calls Python code may have to pass a C++ function that lets none
through, and the process aborts. Capturing, rehearsing and measuring therefore end the process without unwinding it:
what is to be closed is closed by the signal's handler.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import NoReturn

_inside: list[None] = []
_stops: list[Callable[[], bool]] = []
_to_close: list[Callable[[], None]] = []


@contextmanager
def unwinding_aborts() -> Iterator[None]:
    """Have a signal that ends this process do so at once, inside the block."""
    _inside.append(None)
    try:
        yield
    finally:
        _inside.pop()


@contextmanager
def stopping(ask: Callable[[], bool]) -> Iterator[None]:
    """Have ``ask`` called where this process is first asked to end inside the block.

    It returns whether what runs there ends by itself soon; if it does not, the process ends at once. Of blocks inside
    each other all are asked, and the innermost one decides.
    """
    _stops.append(ask)
    try:
        yield
    finally:
        _stops.remove(ask)


def ends_by_itself() -> bool:
    """Ask what runs to end, and return whether it does so by itself."""
    answers = [ask() for ask in _stops]
    return bool(answers) and answers[-1]


def may_unwind() -> bool:
    """Whether a signal's handler may raise."""
    return not _inside


@contextmanager
def closing(close: Callable[[], None]) -> Iterator[None]:
    """Have ``close`` called where the process ends at once inside the block."""
    _to_close.append(close)
    try:
        yield
    finally:
        _to_close.remove(close)


def end(code: int, line: str) -> NoReturn:
    """Close what is to be closed, say why on stderr, and end this process."""
    for close in reversed(_to_close):
        with suppress(Exception):
            close()
    # A progress bar hides the cursor of a terminal.
    shown = "\x1b[?25h\r" if os.isatty(2) else ""
    os.write(2, f"{shown}{line}\n".encode())
    os._exit(code)


INTERRUPTED = 130
"""The exit code of a command that was interrupted."""


class Termination(BaseException):
    """A signal asked this process to end; not an ``Exception``, nor an exit that a user's code could have meant."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


def ended_by(number: int) -> str:
    """Return what is said of a command that a signal ended."""
    return "interrupted" if number == signal.SIGINT else str(Termination(number))


def _is_awaited(number: int, signal_numbers: list[int]) -> bool:
    """Add a signal to those that came, and return whether what runs ends by itself: of the first one it is asked."""
    signal_numbers.append(number)
    if len(signal_numbers) == 1 and ends_by_itself():
        os.write(2, f"autopar: {ended_by(number)}: ending behind this step; once more ends at once\n".encode())
        return True
    if not may_unwind():
        end(128 + number, f"autopar: {ended_by(number)}")
    return False


@contextmanager
def _with_handler(
    usual: Mapping[signal.Signals, signal._HANDLER],
    unwind: Callable[[int, FrameType | None], object],
    signal_numbers: list[int],
) -> Iterator[None]:
    """Have signals unwind this process inside the block, and add their numbers; but those not handled as usual."""

    def handle(number: int, frame: FrameType | None) -> None:
        if not _is_awaited(number, signal_numbers):
            unwind(number, frame)

    own = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
    for number in own:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in own:
            signal.signal(number, usual[number])


def record_interrupts(signal_numbers: list[int]) -> AbstractContextManager[None]:
    """Add the numbers of the signals that interrupt this process to ``signal_numbers``, and let them unwind it.

    What unwinds may be replaced on its way: where it leaves a library's state half changed, clean-up that meets this
    state raises something else, and a command that was asked to end would seem to have failed.
    """
    # Whoever started this command in the background may have it ignore interrupts.
    return _with_handler({signal.SIGINT: signal.default_int_handler}, signal.default_int_handler, signal_numbers)


def unwind_on_termination(signal_numbers: list[int]) -> AbstractContextManager[None]:
    """Make SIGTERM, and the end of the terminal, unwind this process as an interrupt does; add their numbers."""

    def unwind(number: int, frame: object) -> None:
        raise Termination(number)

    # Whoever started this command with nohup wants it to outlive the terminal.
    return _with_handler(dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL), unwind, signal_numbers)
