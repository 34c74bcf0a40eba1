"""Output of commands: tables, notes and progress on standard error (unless ``--quiet``), results on standard output.

Standard output is kept for a command's result, whoever else writes to it; files are checked before they are written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import FileError, UsageError

if TYPE_CHECKING:
    from rich.console import Console


_QUIET = ContextVar("_QUIET", default=False)


@contextmanager
def quietly() -> Iterator[None]:
    """Return the context in which commands show errors only, and results on standard output where they are asked for.

    >>> with quietly():
    ...     screen().print("a note")
    """
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


def is_quiet() -> bool:
    """Whether neither tables nor notes nor progress are shown."""
    return _QUIET.get()


def screen() -> Console:
    """Return the console on standard error.

    It is as wide as the terminal that a standard stream is connected to. Where there is none, as in a pipe or a log, it
    has 80 columns: what is written there may be read anywhere. `COLUMNS` sets another width.
    """
    from rich.console import Console

    return Console(stderr=True, quiet=is_quiet())


def say(console: Console, text: str, style: str = "") -> None:
    """Print text, folded at its words."""
    from autopar.report import table

    table.say(console, text, style)


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


def check_outputs(
    plan: Path,
    substitutes: tuple[Path | None, str | None, Path | None],
    outputs: Iterable[Path | None],
    *,
    overwrite: bool,
) -> None:
    """Refuse outputs that would replace what is read, one another, or what nobody agreed to lose.

    What is read is the plan's, and the ``substitutes``: profile, cluster, program.
    """
    from autopar.formats.plan import Plan
    from autopar.formats.references import plan_files
    from autopar.hardware.clusters import is_file

    named = [path for path in outputs if path is not None]
    if not named:
        return
    profile, cluster, program = substitutes
    read = (profile, Path(cluster) if cluster is not None and is_file(cluster) else None, program)
    inputs = (*plan_files(Plan.load(plan), plan), *(path for path in read if path is not None))
    for index, path in enumerate(named):
        check_output(path, None, overwrite=overwrite, inputs=inputs, others=tuple(named[:index]))


@contextmanager
def results_only() -> Iterator[None]:
    """Let ``sys.stdout`` alone write to standard output, and no program or library of the user's code.

    Its descriptor is standard error's meanwhile. Where ``sys.stdout`` is not the process's own, nothing changes.
    """
    own = sys.__stdout__
    if own is None or own is not sys.stdout or sys.stderr is None:
        yield
        return
    own.flush()
    kept = os.dup(own.fileno())
    os.dup2(sys.stderr.fileno(), own.fileno())
    sys.stdout = open(kept, "w", encoding=own.encoding, errors=own.errors)  # noqa: SIM115
    try:
        yield
    finally:
        results, sys.stdout = sys.stdout, own
        try:
            results.flush()
        finally:
            os.dup2(kept, own.fileno())
            with suppress(OSError):
                results.close()


def version_of(package: str) -> str:
    """Return the installed version of a package.

    >>> version_of("no such package")
    'that is not installed'
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return "that is not installed"
