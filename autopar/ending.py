"""Ending: what a process does that is asked to end while C++ code calls Python code.

An exception that a signal raises there may have to pass a C++ function that lets none through, and the process aborts.
Capturing, rehearsing and measuring therefore end the process without unwinding it: what is to be closed is closed by
the signal's handler.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

    It returns whether what runs there ends by itself soon; if it does not, the process ends at once.
    """
    _stops.append(ask)
    try:
        yield
    finally:
        _stops.remove(ask)


def ends_by_itself() -> bool:
    """Ask what runs to end, and return whether it does so by itself."""
    return bool(_stops) and _stops[-1]()


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
