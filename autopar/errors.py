"""Every error autopar raises on purpose, as one tree.

    AutoparError                 1
    ├── UsageError               2   what was asked contradicts itself or the machine
    ├── InfeasibleError          3   no plan fits the memory or the constraints
    ├── FileError                4   a file is missing, malformed, or does not fit another
    │   ├── ModelError           4   the user's model file is missing or broken
    │   ├── CaptureError         4   the model cannot be captured as a graph
    │   └── ProgramError         4   a plan's program does not carry it out, or would deadlock (autopar.schedules.check)
    └── TrainingError            5   a rank failed, was lost, or stopped answering
        └── OutOfMemoryError     5   a rank ran out of memory

The number is the exit code of the command line. A message is one line: what is wrong, where, which value, and
what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose."""

    exit_code = 1
    meant: tuple[str, str] | None = None
    """A name that is not known, and the known one that is nearest."""


class UsageError(AutoparError):
    """What was asked contradicts itself, or does not fit this machine."""

    exit_code = 2


class InfeasibleError(AutoparError):
    """No plan satisfies the memory limit or the constraints."""

    exit_code = 3


class FileError(AutoparError):
    """A file is missing, malformed, or does not fit another one."""

    exit_code = 4


class ModelError(FileError):
    """The user's model file is missing, broken, or lacks what autopar needs from it."""


class CaptureError(FileError):
    """The model cannot be captured as a graph of layers."""


class TrainingError(AutoparError):
    """A rank failed, was lost, or stopped answering."""

    exit_code = 5


class OutOfMemoryError(TrainingError):
    """A rank ran out of memory."""

    def __init__(self, message: str, memory_bytes: int) -> None:
        super().__init__(message)
        self.memory_bytes = memory_bytes
        """Of a device, with which to plan anew."""


def _plain(name: str) -> str:
    """Return a name without what many have in common: dashes before it, and how files end."""
    return name.casefold().lstrip("-").removesuffix(".json").removesuffix(".py")


E = TypeVar("E", bound=AutoparError)
_NEAR = 0.5
"""Of 1 for the same letters, how alike names have to be."""


def unknown(kind: type[E], message: str, name: str, known: Iterable[str]) -> E:
    """Return the error that a name is not known; it asks about the known one that is nearest, if any is near.

    >>> print(unknown(UsageError, "no such option: --gpu", "--gpu", ["--gap", "--gpus", "--quiet"]))
    no such option: --gpu; did you mean '--gpus'?
    """
    from difflib import get_close_matches

    plain = {_plain(each): each for each in known}
    near = get_close_matches(_plain(name), plain, n=1, cutoff=_NEAR)
    found = plain[near[0]] if near else None
    error = kind(message if found is None else f"{message}; did you mean {found!r}?")
    error.meant = None if found is None else (name, found)
    return error


def printable(message: str) -> str:
    """Return a message as one line that a terminal shows as it is: what users and files bring along may say anything.

    >>> printable("a name with\\x1b[31m an escape,\\nand a new line")
    'a name with\\\\x1b[31m an escape, and a new line'
    """
    return escape(" ".join(message.split()))


def escape(text: str) -> str:
    """Return a text whose lines a terminal shows as they are."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text
    )


_MOST_LETTERS = 2**20
"""Of what an error says that are said."""


def text_of(error: BaseException) -> str:
    """Return all that an error says, its notes and the errors that it is a group of, as one line.

    >>> text_of(RuntimeError("an illegal access\\n\\x1b[31mof memory")), text_of(KeyError())
    ('an illegal access \\\\x1b[31mof memory', 'no message')
    >>> text_of(ExceptionGroup("both", [ValueError("one"), KeyError("other")]))
    "both (2 sub-exceptions); ValueError: one; KeyError: 'other'"
    """
    notes = getattr(error, "__notes__", ())
    parts = [_own_text(error), *(each for each in (notes if isinstance(notes, list) else ()) if isinstance(each, str))]
    if isinstance(error, BaseExceptionGroup):
        parts += map(cause_of, error.exceptions)
    return printable(shorten("; ".join(filter(str.strip, parts)))) or "no message"


def shorten(text: str) -> str:
    """Return a text of which the middle is left out where it has more letters than anybody reads."""
    if len(text) <= _MOST_LETTERS:
        return text
    half, left = _MOST_LETTERS // 2, len(text) - _MOST_LETTERS
    return f"{text[:half]} ({left:,} letters are left out here) {text[-half:]}"


def _own_text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as reason:
        return f"its own message cannot be made ({type(reason).__name__})"


def cause_of(error: BaseException) -> str:
    """Return the kind of an error and all that it says, as one line; of one of autopar's, what it says alone.

    >>> cause_of(ValueError("two\\nlines")), cause_of(UsageError("one"))
    ('ValueError: two lines', 'one')
    """
    if isinstance(error, AutoparError):
        return printable(str(error))
    return printable(f"{type(error).__name__}: {text_of(error)}")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, where the others would tell a reader nothing."""
    return next((said for said in map(printable, _own_text(error).splitlines()) if said), text_of(error))
