"""Pooled: the processes of a pool of ranks, and a pool of eight."""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from autopar.ranks.pool import RankPool
from paths import HARNESS


def process_ids(pool: RankPool) -> list[int]:
    """Return the processes of all ranks, once all are there."""
    assert pool._server is not None
    while not all(link.process.pid for link in pool._server.links):
        time.sleep(0.01)
    return [each for link in pool._server.links if (each := link.process.pid)]


def server_id(pool: RankPool) -> int:
    """Return the process that a pool's ranks are forked from."""
    server: Any = pool._server
    return int(getattr(server._process, "pid", None) or server._process._pid)


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    """Give rank processes that find the jobs of this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HARNESS), prepend=os.pathsep)
        with RankPool(8, imports=["autopar.runtime.start.worker"]) as pool:
            yield pool
