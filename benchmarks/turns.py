"""Turns: two races that make a step each in turn, so that what the machine does meanwhile is the same for both."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autopar.ranks.context import RankContext

__all__ = ["FIRST", "TURNS", "turn"]

TURNS = "AUTOPAR_RACE_TURNS"
"""The variable that names a file and who this race is: ``FILE:me:the other``."""
FIRST = "after"
_LOOK_S = 0.005


@contextmanager
def turn(context: RankContext) -> Iterator[None]:
    """Wait, on all ranks, until it is this race's turn; at the end of the block it is the other's, if there is one."""
    named = os.environ.get(TURNS)
    if named is None:
        yield
        return
    file, me, other = named.split(":")
    if context.rank == 0:
        while Path(file).read_text(encoding="utf-8") != me:
            time.sleep(_LOOK_S)
    context.barrier()
    yield
    context.barrier()
    if context.rank == 0:
        Path(file).write_text(other, encoding="utf-8")
