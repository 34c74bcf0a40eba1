"""Pools: rank processes that are started when a case wants them, and again after one has failed."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from autopar.ranks.pool import RankPool
from fuzzing.asks import MOST_RANKS_IN_TEAMS

__all__ = ["Pools"]

_FOLDER = str(Path(__file__).resolve().parents[1])


class Pools:
    """Gives living rank processes."""

    def __init__(self) -> None:
        """Start none yet."""
        self._pool: RankPool | None = None

    def __call__(self) -> RankPool:
        """Return rank processes that are alive."""
        if self._pool is None or self._pool.is_closed:
            # Ranks see no folder but those that Python is told of.
            before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys((_FOLDER, *filter(None, before))))
            self._pool = RankPool(MOST_RANKS_IN_TEAMS, imports=["autopar.runtime.start.worker"])
        return self._pool

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.close()
