"""Siblings: whether a launcher that is at work has started this process beside others of the same job.

A launcher's variables alone do not say so: shells keep them, and batch scripts have them, too. What says so is another
process of this host with the variables of another rank of the same job, or, where every host has a single rank, that
somebody listens where the job's ranks meet.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from autopar.errors import UsageError
from autopar.ranks.environment import MARKERS, Environment, LaunchedRank, rank_from_environment

_CONNECT_S = 1.0


def refuse_siblings(environment: Environment) -> None:
    """Check that this process, which is to start ranks, is not one of several that a launcher has started alike.

    Raises:
        UsageError: it is; names ``worker``.
    """
    own = _rank_of(environment)
    if own is None or own.size == 1:
        return
    others = (each for each in map(_rank_of, _environments_of_others()) if each is not None and each.rank != own.rank)
    alike = (each._replace(rank=own.rank, local_rank=own.local_rank) == own for each in others)
    if any(alike) or _is_listened_to(own):
        unset = " ".join(f"-u {name}" for name in MARKERS if name in environment)
        raise UsageError(
            f"`autopar run` starts all ranks itself, and {own.starter} has started it {own.size} times (here as "
            f"rank {own.rank}): each would train alone, and write the same files; have {own.starter} start "
            f"`autopar worker`, or put `env {unset}` before `autopar run` if it is to be alone"
        )


def _rank_of(environment: Environment) -> LaunchedRank | None:
    try:
        return rank_from_environment(environment)
    except UsageError:
        # A batch script has some of srun's variables.
        return None


def _environments_of_others() -> Iterator[Environment]:
    """Yield the environments that this user's other processes were started with; none where the system has no /proc."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        # Others' are not to be read, and processes end.
        with suppress(OSError):
            if file.parent.name != str(os.getpid()):
                lines = file.read_bytes().decode(errors="replace").split("\0")
                yield dict(line.split("=", 1) for line in lines if "=" in line)


def _is_listened_to(own: LaunchedRank) -> bool:
    """Whether torchrun's agent waits where ranks meet; others open that port only when ranks ask for it."""
    if own.starter != "torchrun":
        return False
    with suppress(OSError), socket.create_connection((own.address, own.port), _CONNECT_S):
        return True
    return False
