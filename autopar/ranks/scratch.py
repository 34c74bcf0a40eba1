"""Scratch: a temporary folder that does not outlive its use, even where its owner is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from autopar.signals import closing

PREFIX = "autopar-"
LOCK = "lock"


class Closable:
    """Something that is closed where a ``with`` block ends."""

    def close(self) -> None:
        """Let go of what it has."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Scratch(Closable):
    """A private temporary folder, removed when it is closed.

    A process that is killed removes nothing. Its lock on the folder goes with it, though, and the next scratch folder
    of the same user removes what is not locked.
    """

    def __init__(self, purpose: str) -> None:
        """Make the folder; ``purpose`` stands in its name."""
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
        # Locked before it has its name, so that nobody finds it unlocked.
        unnamed = self.path / f".{LOCK}"
        # Taken away by close(), or where the process ends at once.
        self._closing = ExitStack()
        self._closing.enter_context(closing(self._remove))
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / LOCK)

    def close(self) -> None:
        self._closing.close()
        self._remove()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove this user's scratch folders whose owners have gone: they are not locked."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                with open(os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
