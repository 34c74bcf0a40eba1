"""Screen: where commands show tables, notes and progress: standard error, unless `--quiet` silences it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


_QUIET = ContextVar("_QUIET", default=False)


@contextmanager
def quietly() -> Iterator[None]:
    """Return the context in which commands show errors only, and results on standard output where they are asked for.

    >>> with quietly():
    ...     screen().print("a note")
    """
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


def is_quiet() -> bool:
    """Whether neither tables nor notes nor progress are shown."""
    return _QUIET.get()


def screen() -> Console:
    """Return the console on standard error.

    It is as wide as the terminal that a standard stream is connected to. Where there is none, as in a pipe or a log, it
    has 80 columns: what is written there may be read anywhere. `COLUMNS` sets another width.
    """
    from rich.console import Console

    return Console(stderr=True, quiet=is_quiet())


def say(console: Console, text: str, style: str = "") -> None:
    """Print text, folded at its words."""
    from autopar.report import table

    table.say(console, text, style)
