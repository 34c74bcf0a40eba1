"""Threads: as many as a rank gets, each kept on cores of its own."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SAMPLE_S = 0.05


@contextmanager
def pinned(count: int) -> Iterator[None]:
    """Compute with ``count`` threads in the block, on the least busy ``count`` cores that this process may use.

    Threads that exist already (of a progress bar, say) stay where they are. Where the system keeps no such masks, or
    refuses, only the number of threads is set.
    """
    before = torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    torch.set_num_threads(count)
    try:
        if len(cores) > count:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, _idlest(cores, count))
        yield
    finally:
        if cores:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cores)
        torch.set_num_threads(before)


def _idlest(cores: set[int], count: int) -> list[int]:
    first = _idle_ticks()
    time.sleep(SAMPLE_S)
    last = _idle_ticks()
    return sorted(cores, key=lambda core: (first.get(core, 0) - last.get(core, 0), -core))[:count]


def _idle_ticks() -> dict[int, int]:
    """Return how long every core has idled, in the system's ticks."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines if line.startswith("cpu") and line[3].isdigit())
    return {int(row[0][3:]): int(row[4]) for row in rows}
