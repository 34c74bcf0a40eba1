"""Pooled: the processes of a pool of ranks."""

from __future__ import annotations

import time

from autopar.ranks.pool import RankPool


def process_ids(pool: RankPool) -> list[int]:
    """Return the processes of all ranks, once all are there."""
    assert pool._server is not None
    while not all(link.process.pid for link in pool._server.links):
        time.sleep(0.01)
    return [each for link in pool._server.links if (each := link.process.pid)]
