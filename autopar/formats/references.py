"""References: how one file of autopar records another, and how it is found again."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from autopar.errors import FileError
from autopar.formats.document import read_text
from autopar.formats.paths import named_file
from autopar.formats.plan import FileReference, Plan
from autopar.formats.profile import ModelSource, path_of, with_path


def reference(path: Path, text: str, output: Path) -> FileReference:
    """Return the record of a file that was read as ``text``, for a file to be written to ``output``."""
    return FileReference(path=_relative(path, output.parent), sha256=hashlib.sha256(text.encode()).hexdigest())


def resolve(recorded: FileReference, holder: Path, kind: str) -> Path:
    """Return where a recorded file is.

    Raises:
        FileError: it is missing, or no longer what it was when ``holder`` was written.
    """
    try:
        path = named_file(holder, recorded.path, f"{kind}.path")
        found = hashlib.sha256(read_text(path, kind).encode()).hexdigest()
    except FileError as error:
        raise FileError(f"{error}; or pass `{kind}`") from error
    if found != recorded.sha256:
        raise FileError(
            f"{holder}: $.{kind}.sha256: {path} has changed since the plan was made; run `autopar plan` again"
        )
    return path


def recorded(plan: Plan, path: Path) -> tuple[Path, ...]:
    """Return the files that a plan, read from ``path``, leans on, and the plan's own: none may be written over."""
    names = [each.path for each in (plan.profile, plan.cluster) if each is not None]
    names += [name for name in (path_of(plan.model.source), plan.model.data) if name is not None]
    return (path, *(path.parent / name for name in names))


def rebased(model: ModelSource, origin: Path, output: Path) -> ModelSource:
    """Return a record whose paths are relative to the file ``origin`` with paths relative to ``output``."""
    update: dict[str, str] = {}
    path = path_of(model.source)
    if path is not None:
        update["source"] = with_path(model.source, _relative(origin.parent / path, output.parent))
    if model.data is not None:
        update["data"] = _relative(origin.parent / model.data, output.parent)
    return model.model_copy(update=update)


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(os.path.realpath(path), os.path.realpath(folder))).as_posix()
