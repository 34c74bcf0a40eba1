"""References: how one file of autopar records another, and how it is found again; which kind of file a file is.

A plan may come from anyone. What it names is opened only where it lies in the plan's own folder or in the working
folder, links followed, and is a regular file.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from autopar.errors import FileError
from autopar.formats.document import parse_json, read_text, value_text
from autopar.formats.plan import FileReference, Plan
from autopar.formats.profile import ModelSource, path_of, with_path

_TRUSTS = ContextVar("_TRUSTS", default=False)


@contextmanager
def allow_any_path() -> Iterator[None]:
    """Return the context in which files may name any path."""
    token = _TRUSTS.set(True)
    try:
        yield
    finally:
        _TRUSTS.reset(token)


def named_file(
    holder: Path, name: str, at: str, *, folders: bool = False, is_known: Callable[[Path], bool] = lambda path: False
) -> Path:
    """Return where a file is that another one names.

    Args:
        holder: the file that names it.
        name: a path relative to the holder's folder.
        at: where it is named, as a JSON path without ``$.``.
        folders: whether it may be a folder.
        is_known: tells of a file that leads elsewhere whether the user knows it.

    Raises:
        FileError: it leads elsewhere, or is not there, or neither a file nor a folder; nothing was opened.
    """
    path, place = holder.parent / name, f"{holder}: $.{at}"
    allowed = [os.path.realpath(holder.parent), os.path.realpath(".")]
    real = os.path.realpath(path)
    leads_out = not any(Path(real).is_relative_to(folder) for folder in allowed)
    if (leads_out or os.path.isabs(name)) and not _TRUSTS.get() and not is_known(path):
        if leads_out:
            raise FileError(
                f"{place}: {name} leads out of the folders of {holder.name} and of this command, to {real}; move it, "
                "run in a folder above both, or pass `autopar --trust-paths ...` if you know who wrote the file"
            )
        raise FileError(
            f"{place}: {name} is an absolute path; name it relative to {holder.parent}, or pass `autopar "
            "--trust-paths ...` if you know who wrote the file"
        )
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise FileError(f"{place}: no such file: {path}") from error
    except OSError as error:
        raise FileError(f"{place}: cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(mode) and not (folders and stat.S_ISDIR(mode)):
        raise FileError(f"{place}: {path} is not a regular file")
    return path


def reference(path: Path, text: str, output: Path) -> FileReference:
    """Return the record of a file that was read as ``text``, for a file to be written to ``output``."""
    return FileReference(path=_relative(path, output.parent), sha256=hashlib.sha256(text.encode()).hexdigest())


def resolve(file_reference: FileReference, holder: Path, kind: str) -> Path:
    """Return where a recorded file is.

    Raises:
        FileError: it is missing, or no longer what it was when ``holder`` was written.
    """
    try:
        path = named_file(holder, file_reference.path, f"{kind}.path")
        found = hashlib.sha256(read_text(path, kind).encode()).hexdigest()
    except FileError as error:
        raise FileError(f"{error}; or pass `{kind}`") from error
    if found != file_reference.sha256:
        raise FileError(
            f"{holder}: $.{kind}.sha256: {path} has changed since the plan was made; run `autopar plan` again"
        )
    return path


def plan_files(plan: Plan, path: Path) -> tuple[Path, ...]:
    """Return the files that a plan, read from ``path``, leans on, and the plan's own: none may be written over."""
    names = [each.path for each in (plan.profile, plan.cluster) if each is not None]
    names += [name for name in (path_of(plan.model.source), plan.model.data) if name is not None]
    return (path, *(path.parent / name for name in names))


def rebase_paths(model: ModelSource, origin: Path, output: Path) -> ModelSource:
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


KINDS = ("profile", "cluster", "plan", "program", "report", "trace", "checkpoint", "blackbox", "pulls")


def kind_of(path: str | Path) -> str:
    """Return which of :data:`KINDS` a file says it is.

    Raises:
        FileError: the file is missing, not JSON, or none of autopar's.
    """
    path = Path(path)
    content = parse_json(read_text(path, "autopar"), path)
    at, holder = "$", content
    if isinstance(content, dict) and "traceEvents" in content:
        at, holder = "$.otherData", content.get("otherData")
    found = holder.get("format") if isinstance(holder, dict) else None
    for kind in KINDS:
        if found == f"autopar.{kind}":
            return kind
    expected = ", ".join(f'"autopar.{kind}"' for kind in KINDS)
    raise FileError(f"{path}: {at}.format: expected one of {expected}, found {value_text(found)}")
