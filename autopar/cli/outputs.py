"""Outputs: which files a command may write."""

from __future__ import annotations

import os
from pathlib import Path

from autopar.errors import FileError, UsageError

TRANSFORMERS_CONFIG = "config.json"
"""What is read of a folder that an ``hf:`` model names."""


def check_output(
    output: Path, default: Path | None, *, overwrite: bool, inputs: tuple[Path, ...] = (), others: tuple[Path, ...] = ()
) -> None:
    """Refuse an output that would replace a file nobody agreed to lose, before any work is done.

    ``others`` are the command's other outputs.

    Raises:
        UsageError: the file exists, is not the default one, and ``overwrite`` is false; or it is an input
            or another output.
        FileError: its folder does not exist.
    """
    if not output.parent.is_dir():
        raise FileError(f"cannot write {output}: no such folder: {output.parent}")
    if not os.access(output.parent, os.W_OK):
        raise FileError(f"cannot write {output}: {output.parent} may not be written to")
    if output.is_dir():
        raise UsageError(f"{output} is a folder; name a file")
    if output.exists() and not output.is_file():
        raise UsageError(f"{output} is not a regular file and cannot be replaced; name another file")
    for path, used in (*((path, "read") for path in inputs), *((path, "written") for path in others)):
        # realpath, because resolve() raises an error of its own for a link that leads to itself.
        read = path / TRANSFORMERS_CONFIG if path.is_dir() else path
        if os.path.realpath(read) == os.path.realpath(output):
            raise UsageError(f"{output} is {used} by this command and cannot be its output; name another file")
    if output.exists() and output != default and not overwrite:
        raise UsageError(f"{output} exists; pass --overwrite to replace it")
