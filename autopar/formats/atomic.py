"""Atomic: a file that is written is there whole, or not at all, whatever fails meanwhile."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def new_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Give a file to write, which takes the place of ``path`` when the block ends.

    Until then it has a name in the same folder that nobody can guess. What ``path`` was before stays if anything fails;
    where it was a link, the link is replaced, and what it leads to stays. Who may read the file is up to the umask. A
    file that is not ``durable`` may be lost with the host's power.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".autopar-{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o666)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        _sync(path.parent)


def _sync(folder: Path) -> None:
    """Have a folder's new names outlive a loss of power, where its file system can; the file is there in any case."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
