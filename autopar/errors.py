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


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose."""

    exit_code = 1


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


def printable(message: str) -> str:
    """Return a message as one line that a terminal shows as it is: what users and files bring along may say anything.

    >>> printable("a name with\\x1b[31m an escape,\\nand a new line")
    'a name with\\\\x1b[31m an escape, and a new line'
    """
    line = " ".join(message.split())
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)
