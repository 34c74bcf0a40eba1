"""Shared folder: whether all hosts see the folder that rank 0 sees."""

from __future__ import annotations

import platform
import secrets
from pathlib import Path

from autopar.errors import FileError
from autopar.ranks.context import RankContext

__all__ = ["check_shared"]


def check_shared(context: RankContext, folder: Path) -> None:
    """Refuse, on all ranks alike, a folder that is not the same one on all hosts.

    Raises:
        FileError: rank 0 cannot write there, or a host sees another folder; names it.
    """
    marker = context.gather(_mark(folder) if context.rank == 0 else "")[0]
    missing = not (folder / marker).exists()
    hosts = context.gather(platform.node() if missing else "")
    if context.rank == 0 and not missing:
        (folder / marker).unlink()
    for rank, host in enumerate(hosts):
        if host:
            why = f"cannot be written on {host}" if rank == 0 else f"rank {rank} on {host} sees another than rank 0"
            raise FileError(f"`save={str(folder)!r}`: {why}; name a folder that all hosts share")


def _mark(folder: Path) -> str:
    """Return the name of a new file in the folder; it is not there if it could not be made."""
    marker = f".shared-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / marker).touch()
    except OSError:
        # Found missing, then, like a folder that is another's.
        pass
    return marker
