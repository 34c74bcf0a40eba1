"""Pooled: the processes of a pool of ranks, and a pool of eight."""

import os
import time
from collections.abc import Iterator

import pytest

from autopar.ranks.pool import RankPool
from paths import HARNESS


def process_ids(pool: RankPool) -> list[int]:
    """Return the processes of all ranks, once all are there."""
    server = pool._server
    assert server is not None
    while len(server.pids) < len(server.links):
        time.sleep(0.01)
        server.look()
    return [server.pids[rank] for rank in range(len(server.links))]


def server_id(pool: RankPool) -> int:
    """Return the process that a pool's ranks are forked from."""
    assert pool._server is not None
    return pool._server.pid


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    """Give rank processes that find the jobs of this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HARNESS), prepend=os.pathsep)
        with RankPool(8, imports=["autopar.runtime.start.worker"]) as pool:
            yield pool
