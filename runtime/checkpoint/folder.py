"""CheckpointFolder: the checkpoints of one run, a folder each, and which of them are sound.

A checkpoint is there once its folder has its name, ``step-N``: all of it was written, read again and found to be what
was meant. While it is written its folder is called otherwise, and whoever opens the folder next removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import file_digest
from pathlib import Path
from typing import NamedTuple

from autopar.errors import FileError, UsageError
from autopar.formats.checkpoint import Checkpoint, PieceFile
from autopar.formats.document import read_text, sync_folder

MANIFEST = "manifest.json"
KEPT = 2
"""How many of the newest sound checkpoints are kept."""
_LOCK = "lock"
_NAME, _UNFINISHED = re.compile(r"step-(\d{1,18})"), re.compile(r"(step-\d{1,18})\.[0-9a-f]+\.(new|old|gone)")


class StoredCheckpoint(NamedTuple):
    """A checkpoint and where it is."""

    folder: Path
    manifest: Checkpoint


class CheckpointFolder:
    """A folder of checkpoints."""

    def __init__(self, path: Path) -> None:
        """Look at a folder, which need not be there."""
        self.path = path

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, sound or not, ascending."""
        if not self.path.is_dir():
            return []
        found = (_NAME.fullmatch(each.name) for each in self.path.iterdir())
        return sorted(int(each[1]) for each in found if each is not None)

    def folder_of(self, step: int) -> Path:
        """Return where the checkpoint of a step is."""
        return self.path / f"step-{step}"

    def newest(self) -> tuple[StoredCheckpoint | None, list[str]]:
        """Return the newest sound checkpoint, and what is wrong with those after it; None where there is none at all.

        Raises:
            FileError: there are some, and none is sound; says what is wrong with each.
        """
        wrong: list[str] = []
        for step in reversed(self.steps()):
            try:
                folder = self.folder_of(step)
                return StoredCheckpoint(folder, read_verified(folder)), wrong
            except FileError as error:
                wrong.append(str(error))
        if wrong:
            raise FileError(f"{self.path}: no checkpoint is sound: {'; '.join(wrong)}")
        return None, wrong

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Return the context in which this process alone writes into the folder, which is made if it is not there.

        Raises:
            UsageError: another run writes there.
            FileError: it cannot be written.
        """
        with _errors_of(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"{self.path}: another run writes its checkpoints there; name another folder"
                ) from None
            self._clear()
            yield
        finally:
            os.close(handle)

    def _clear(self) -> None:
        """Remove what runs that were killed had not finished, and put back what they had not replaced."""
        for each in list(self.path.iterdir()):
            found = _UNFINISHED.fullmatch(each.name)
            if found is None or each.is_symlink():
                continue
            if found[2] == "old" and not os.path.lexists(self.path / found[1]):
                each.rename(self.path / found[1])
            else:
                shutil.rmtree(each, ignore_errors=True)

    def unfinished_folder(self, step: int, token: str) -> Path:
        """Return where a checkpoint is written; all ranks of an attempt have the same token."""
        return self.path / f"step-{step}.{token}.new"

    def admit(self, step: int, token: str) -> None:
        """Give a checkpoint that is written its name; one that had it before goes.

        Raises:
            OSError: that cannot be done; the one before is there.
        """
        target, before = self.folder_of(step), self.path / f"step-{step}.{token}.old"
        if os.path.lexists(target):
            target.rename(before)
        try:
            self.unfinished_folder(step, token).rename(target)
        except OSError:
            if os.path.lexists(before):
                before.rename(target)
            raise
        sync_folder(self.path)
        shutil.rmtree(before, ignore_errors=True)

    def prune(self, sound: list[int]) -> None:
        """Remove all but the newest of the checkpoints that are known to be sound, once there are enough."""
        kept = sorted(sound)[-KEPT:]
        if len(kept) < KEPT:
            return
        for step in set(self.steps()) - set(kept):
            with suppress(OSError):
                # Half removed, it would be taken for a damaged one.
                gone = self.path / f"step-{step}.{'0' * 16}.gone"
                self.folder_of(step).rename(gone)
                shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: checkpoints cannot be written there: {error.strerror or error}") from error


def read_manifest(folder: Path) -> Checkpoint:
    """Return the manifest of a checkpoint.

    Raises:
        FileError: there is none, or it is not what was written.
    """
    path = folder / MANIFEST
    _check_regular(path)
    return Checkpoint.read(read_text(path, Checkpoint.KIND), path)


def read_verified(folder: Path) -> Checkpoint:
    """Return the manifest of a checkpoint, all of whose files are what it says.

    Raises:
        FileError: one is not; names it.
    """
    found = read_manifest(folder)
    named = _NAME.fullmatch(folder.name)
    if named is not None and int(named[1]) != found.step:
        raise FileError(f"{folder / MANIFEST}: is of step {found.step}, and its folder's name of another")
    for file in found.files:
        check_file(folder, file)
    return found


def check_file(folder: Path, file: PieceFile) -> None:
    """Refuse a file that is not what a manifest says.

    Raises:
        FileError: it is missing, or another one; names it.
    """
    path = folder / file.name
    size = _check_regular(path)
    if size != file.bytes:
        raise FileError(f"{path}: has {size} bytes, {MANIFEST} says {file.bytes}: it is damaged")
    try:
        with path.open("rb") as opened:
            digest = file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    if digest != file.sha256:
        raise FileError(f"{path}: its sha256 is not the one that {MANIFEST} says: it is damaged")


def _check_regular(path: Path) -> int:
    """Return the size of a file of a checkpoint, which leads nowhere else."""
    try:
        status = path.lstat()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise FileError(f"{path}: not a regular file")
    return status.st_size
