"""Board: a small shared file on which every rank of a host notes what it is doing.

A rank that is killed or stopped cannot say where it was; the board still can.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

__all__ = ["FINISHED", "SETTING_UP", "SET_UP_S", "STEPPING", "Board", "Note"]

SETTING_UP = 0
STEPPING = 1
FINISHED = 2

SET_UP_S = 120.0
"""Shortest time that setting up is given: it runs imports and user code once."""

_SLOT = struct.Struct("<qqqd")


class Note(NamedTuple):
    """What a rank last noted."""

    phase: int
    """``SETTING_UP``, ``STEPPING`` or ``FINISHED``."""
    step: int
    position: int
    """Index of the action in the rank's program."""
    time_s: float
    """When, on this host's monotonic clock; 0 if never."""


class Board:
    """One slot per rank in a memory-mapped file; a rank writes only its own."""

    def __init__(self, path: Path, ranks: int) -> None:
        """Open the board at ``path``, creating it if it is not there."""
        size = _SLOT.size * ranks
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def write(self, rank: int, phase: int, step: int = 0, position: int = 0) -> None:
        """Note what a rank begins to do, now."""
        _SLOT.pack_into(self._map, rank * _SLOT.size, phase, step, position, time.monotonic())

    def stepping(self, rank: int) -> Callable[[int, int], None]:
        """Return what notes, as quickly as can be, the action of a step that a rank begins: step, position."""
        pack, now_s, at = _SLOT.pack_into, time.monotonic, rank * _SLOT.size

        def note(step: int, position: int, board: mmap.mmap = self._map) -> None:
            pack(board, at, STEPPING, step, position, now_s())

        return note

    def read(self, rank: int) -> Note:
        """Return a rank's last note."""
        return Note(*_SLOT.unpack_from(self._map, rank * _SLOT.size))

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
