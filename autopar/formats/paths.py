"""Paths that files name: where they may lead.

A plan may come from anyone. What it names is opened only where it lies in the plan's own folder or in the working
folder, links followed, and is a regular file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from autopar.errors import FileError

_TRUSTS = ContextVar("_TRUSTS", default=False)


@contextmanager
def trusting() -> Iterator[None]:
    """Return the context in which files may name any path."""
    token = _TRUSTS.set(True)
    try:
        yield
    finally:
        _TRUSTS.reset(token)


def named_file(holder: Path, name: str, at: str, *, folders: bool = False) -> Path:
    """Return where a file is that another one names.

    Args:
        holder: the file that names it.
        name: a path relative to the holder's folder.
        at: where it is named, as a JSON path without ``$.``.
        folders: whether it may be a folder.

    Raises:
        FileError: it leads elsewhere, or is not there, or neither a file nor a folder; nothing was opened.
    """
    path, place = holder.parent / name, f"{holder}: $.{at}"
    if not _TRUSTS.get():
        allowed = [os.path.realpath(holder.parent), os.path.realpath(".")]
        real = os.path.realpath(path)
        if not any(Path(real).is_relative_to(folder) for folder in allowed):
            raise FileError(
                f"{place}: {name} leads out of the folders of {holder.name} and of this command, to {real}; move it, "
                "run in a folder above both, or pass `autopar --trust-paths ...` if you know who wrote the file"
            )
        if os.path.isabs(name):
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
