"""CheckpointFolder: the checkpoints of one run, a folder each; which are sound, and reading what they hold.

A checkpoint is there once its folder has its name, ``step-N``: all of it was written, read again and found to be what
was meant. While it is written its folder is called otherwise, and whoever opens the folder next removes it.

Some of a stored tensor is put together of the pieces that hold it; nothing else is read. A checkpoint's model is
exported as one file that other libraries read.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from autopar.errors import FileError, UsageError
from autopar.formats.checkpoint import Checkpoint, CheckpointView, IndexRange, Piece, PieceFile, StoredTensor, sides_of
from autopar.formats.document import read_text, sync_folder
from autopar.progress import Progress, no_progress
from autopar.ranks.scratch import Closable
from autopar.runtime.checkpoint import weights
from autopar.runtime.checkpoint.weights import TensorFile

MANIFEST = "manifest.json"
KEPT = 2
"""How many of the newest sound checkpoints are kept."""
_LOCK = "lock"
_NAME, _UNFINISHED = re.compile(r"step-(\d{1,18})"), re.compile(r"(step-\d{1,18})\.[0-9a-f]+\.(new|old|gone)")


class _StoredCheckpoint(NamedTuple):
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
        if not os.path.isdir(self.path):
            return []
        found = (_NAME.fullmatch(each.name) for each in self.path.iterdir())
        return sorted(int(each[1]) for each in found if each is not None)

    def folder_of(self, step: int) -> Path:
        """Return where the checkpoint of a step is."""
        return self.path / f"step-{step}"

    def newest(self) -> tuple[_StoredCheckpoint | None, list[str]]:
        """Return the newest sound checkpoint, and what is wrong with those after it; None where there is none at all.

        Raises:
            FileError: there are some, and none is sound; says what is wrong with each.
        """
        wrong, whole = list[str](), list[int]()
        for step in reversed(self.steps()):
            try:
                folder = self.folder_of(step)
                found = _StoredCheckpoint(folder, read_verified(folder))
                if found.manifest.unsound is None:
                    return found, wrong
                wrong.append(f"{folder}: {found.manifest.unsound}")
                whole.append(step)
            except FileError as error:
                wrong.append(str(error))
        if wrong:
            export = f"; `autopar checkpoint export {self.path} --step {whole[0]}` writes its model" if whole else ""
            raise FileError(f"{self.path}: no checkpoint is sound: {'; '.join(wrong)}{export}")
        return None, wrong

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Return the context in which this process alone writes into the folder, which is made if it is not there.

        Raises:
            UsageError: another run writes there.
            FileError: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            why = error.strerror or error
            raise FileError(f"{self.path}: checkpoints cannot be written there: {why}") from error
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

    def remove(self, step: int) -> None:
        """Remove a checkpoint."""
        with suppress(OSError):
            # Half removed, it would be taken for a damaged one.
            gone = self.path / f"step-{step}.{'0' * 16}.gone"
            self.folder_of(step).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def prune(self, sound: list[int]) -> None:
        """Remove all but the newest of the checkpoints that are known to be sound, once there are enough."""
        kept = sorted(sound)[-KEPT:]
        if len(kept) < KEPT:
            return
        for step in set(self.steps()) - set(kept):
            self.remove(step)


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
    _check_regular(path)
    weights.check(path, file.bytes, file.sha256, MANIFEST, anew=True)


def _check_regular(path: Path) -> None:
    """Refuse a file of a checkpoint that leads elsewhere."""
    try:
        status = path.lstat()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise FileError(f"{path}: not a regular file")


class CheckpointReader(Closable):
    """Reads the tensors of a checkpoint that has been verified."""

    def __init__(self, folder: Path, checkpoint: Checkpoint) -> None:
        """Open nothing yet; ``checkpoint`` is the manifest of ``folder``."""
        self.checkpoint = checkpoint
        self._folder = folder
        self._opened: dict[str, TensorFile] = {}

    def read(self, record: StoredTensor, ranges: Sequence[IndexRange] = ()) -> torch.Tensor:
        """Return some of a tensor: the given indices of dimensions, and of the others all.

        Raises:
            FileError: a file does not hold what the manifest says.
        """
        wanted = sides_of(ranges, record.shape)
        dtype = getattr(torch, record.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise FileError(f"{self._folder}: {record.key} is of type {record.dtype!r}, which torch has not")
        if len(record.pieces) == 1 and wanted == sides_of(record.pieces[0].ranges, record.shape):
            return self._of_piece(record, record.pieces[0], None, dtype)
        found = torch.empty([stop - start for start, stop in wanted], dtype=dtype)
        for piece in record.pieces:
            held = sides_of(piece.ranges, record.shape)
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, held, strict=True)]
            if all(start < stop for start, stop in common):
                within = tuple(slice(s - h, e - h) for (s, e), (h, _) in zip(common, held, strict=True))
                into = tuple(slice(s - w, e - w) for (s, e), (w, _) in zip(common, wanted, strict=True))
                found[into] = self._of_piece(record, piece, within, dtype)
        return found

    def _of_piece(
        self, record: StoredTensor, piece: Piece, within: tuple[slice, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor:
        if piece.file not in self._opened:
            self._opened[piece.file] = TensorFile(self._folder / piece.file)
        file, shape = self._opened[piece.file], piece.shape(record.shape)
        found = file.read(piece.key or record.key, within)
        expected = shape if within is None else tuple(each.stop - each.start for each in within)
        if found.dtype != dtype or tuple(found.shape) != expected:
            raise FileError(
                f"{self._folder / piece.file}: {record.key} is {found.dtype} {list(found.shape)}, the manifest says "
                f"{record.dtype} {list(expected)}"
            )
        return found

    def close(self) -> None:
        """Close the files."""
        for each in self._opened.values():
            each.close()
        self._opened.clear()


def views(folder: Path, *, thorough: bool = False, progress: Progress = no_progress) -> list[CheckpointView]:
    """Return the checkpoints of a folder, by their steps; ``thorough``: every file is read, and its hash compared.

    Raises:
        FileError: there is no such folder, or nothing in it.
    """
    checkpoints, found = CheckpointFolder(folder), list[CheckpointView]()
    steps = _steps(checkpoints)
    for at, step in enumerate(steps):
        progress(f"reading step {step}", at / len(steps))
        place, manifest, problem = checkpoints.folder_of(step), None, None
        try:
            manifest = read_verified(place) if thorough else read_manifest(place)
            problem = None if manifest.unsound is None else f"{place}: {manifest.unsound}"
        except FileError as error:
            problem = str(error)
        found.append(CheckpointView(step, place, manifest, problem, thorough and manifest is not None))
    return found


def _steps(checkpoints: CheckpointFolder) -> list[int]:
    steps = checkpoints.steps()
    if not steps:
        raise FileError(f"{checkpoints.path}: holds no checkpoints (folders step-N)")
    return steps


def _find_checkpoint(folder: Path, step: int | None) -> _StoredCheckpoint:
    """Return a checkpoint of a folder that is sound: that of a step, or the newest.

    Raises:
        FileError: there is none, or it is damaged.
        UsageError: there is none of that step.
    """
    checkpoints = CheckpointFolder(folder)
    steps = _steps(checkpoints)
    if step is None:
        newest, _ = checkpoints.newest()
        assert newest is not None
        return newest
    if step not in steps:
        raise UsageError(f"{folder} has no checkpoint of `step={step}`; it has those of {', '.join(map(str, steps))}")
    return _StoredCheckpoint(checkpoints.folder_of(step), read_verified(checkpoints.folder_of(step)))


def export(folder: Path, output: Path, step: int | None = None) -> int:
    """Write a checkpoint's model as one safetensors file, under the keys of its ``state_dict``; return its step.

    A tied parameter is there under every one of its names. No more than one tensor is held at a time.

    Raises:
        FileError: as :func:`_find_checkpoint`, or the file cannot be written.
    """
    place, manifest = _find_checkpoint(folder, step)
    kinds = ("parameter", "buffer", "average") if manifest.plan.used_weights == "average" else ("parameter", "buffer")
    # Of a parameter that has both, its average counts.
    stored = {each.name: each for kind in kinds for each in manifest.tensors if each.kind == kind}
    keys = {each.key: each.tensor for each in manifest.state_keys} or {name: name for name in stored}
    missing = [key for key, name in keys.items() if name not in stored]
    if missing:
        raise FileError(f"{place}: the manifest has the key {missing[0]!r}, but nothing that it is of")
    with CheckpointReader(place, manifest) as reader:
        types = {key: (stored[name].shape, getattr(torch, stored[name].dtype)) for key, name in keys.items()}
        like = {key: torch.empty(shape, dtype=dtype, device="meta") for key, (shape, dtype) in types.items()}
        weights.write(output, like, lambda key: reader.read(stored[keys[key]]))
    return manifest.step
