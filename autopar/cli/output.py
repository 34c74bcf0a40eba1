"""Output of commands: tables, notes and progress on standard error (unless ``--quiet``), results on standard output.

Progress is a bar on a terminal, and lines elsewhere. Standard output is kept for a command's result, whoever else
writes to it; files are checked before they are written.
"""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import FileError, UsageError
from autopar.formats.document import write_bytes
from autopar.progress import PhaseTimes, phase_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.progress import Progress


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


def _is_quiet() -> bool:
    """Whether neither tables nor notes nor progress are shown."""
    return _QUIET.get()


def screen() -> Console:
    """Return the console on standard error.

    It is as wide as the terminal that a standard stream is connected to. Where there is none, as in a pipe or a log, it
    has 80 columns: what is written there may be read anywhere. `COLUMNS` sets another width.
    """
    from rich.console import Console

    return Console(stderr=True, quiet=_is_quiet())


def say(console: Console, text: str, style: str = "") -> None:
    """Print text, folded at its words."""
    from autopar.report import table

    table.say(console, text, style)


def put(result: object, as_json: bool) -> None:
    """Put a command's result on standard output as JSON, if that is asked for."""
    from autopar.formats.document import Document

    if as_json:
        text = result.dumps() if isinstance(result, Document) else json.dumps(result, indent=1) + "\n"
        sys.stdout.write(text)


_TRANSFORMERS_CONFIG = "config.json"
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
        folder = shlex.quote(str(output.parent))
        raise FileError(f"cannot write {output}: no such folder: {output.parent}; `mkdir -p {folder}` makes it")
    if not os.access(output.parent, os.W_OK):
        raise FileError(f"cannot write {output}: {output.parent} may not be written to")
    if output.is_dir():
        raise UsageError(f"{output} is a folder; name a file")
    if output.exists() and not output.is_file():
        raise UsageError(f"{output} is not a regular file and cannot be replaced; name another file")
    for path, used in (*((path, "read") for path in inputs), *((path, "written") for path in others)):
        # realpath, because resolve() raises an error of its own for a link that leads to itself.
        read = path / _TRANSFORMERS_CONFIG if path.is_dir() else path
        if os.path.realpath(read) == os.path.realpath(output):
            raise UsageError(f"{output} is {used} by this command and cannot be its output; name another file")
    if output.exists() and output != default and not overwrite:
        raise UsageError(f"{output} exists; pass --overwrite to replace it")


def check_drawn(path: Path, kind: str, *, overwrite: bool, inputs: tuple[Path, ...]) -> None:
    """Refuse a picture (``kind`` png) or a page (html) of another name, or where :func:`check_output` does."""
    if path.suffix.lower() != f".{kind}":
        what = "picture is a PNG" if kind == "png" else "page is HTML"
        error = UsageError(f"--{kind} {path}: the {what}; give a name that ends in .{kind}")
        error.meant = str(path), str(path.with_suffix(f".{kind}"))
        raise error
    check_output(path, None, overwrite=overwrite, inputs=inputs)


def write_png(figure: Figure, path: Path, *, overwrite: bool) -> None:
    """Write a picture, whole or not at all, and say so."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_bytes(path, content.getvalue(), overwrite=overwrite)
    say(screen(), f"Written: {path}")


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


LINE_EVERY_S, DRAWN_EVERY_S = 2.0, 0.1
SLOW_S = 1.0
"""What takes longer shows how far it is."""


@contextmanager
def steps_progress(steps: int | None, *, quiet: bool = False) -> Iterator[Callable[[int, float], None]]:
    """Yield what to call with (step, loss): a bar on a terminal, a line now and then elsewhere."""
    if quiet or _is_quiet():
        yield lambda step, loss: None
    elif sys.stderr.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        # It draws itself as steps end, and not in a thread: a process that has one is not forked into ranks.
        shown = Progress(*columns, TimeRemainingColumn(), console=screen(), transient=True, auto_refresh=False)
        with shown as bar:
            task, drawn_s = bar.add_task("starting ranks", total=steps), 0.0
            bar.refresh()

            def draw(step: int, loss: float) -> None:
                nonlocal drawn_s
                bar.update(task, completed=step + 1, description=f"loss {loss:.4f}")
                if time.monotonic() - drawn_s >= DRAWN_EVERY_S:
                    bar.refresh()
                    drawn_s = time.monotonic()

            yield draw
    else:
        yield _lines(steps)


def _lines(steps: int | None) -> Callable[[int, float], None]:
    said_s = -LINE_EVERY_S

    def say(step: int, loss: float) -> None:
        nonlocal said_s
        if step + 1 == steps or time.monotonic() - said_s >= LINE_EVERY_S:
            said_s = time.monotonic()
            of = "" if steps is None else f"/{steps}"
            sys.stderr.write(f"step {step + 1}{of}: loss {loss:.4f}\n")

    sys.stderr.write("starting ranks\n")
    return say


@contextmanager
def phases(*, sums_up: bool = False, forks: bool = False) -> Iterator[Callable[[str, float], None]]:
    """Yield what to call with (what is being done, share done): a bar on a terminal, a line per phase elsewhere.

    Both say about how long a phase will take yet, lines every two seconds. Where it ``sums_up``, the phases that took
    longest are named in the end. Where the command ``forks`` ranks, the bar has no thread.
    """
    times = PhaseTimes(time.monotonic)
    if _is_quiet():
        yield lambda what, share: None
        return
    if sys.stderr.isatty():
        with _bar(threaded=not forks) as bar:
            task, drawn_s = bar.add_task("loading the model", total=1.0, left=""), 0.0

            def update(what: str, share: float) -> None:
                nonlocal drawn_s
                bar.update(task, description=what, completed=share, left=_time_left(times.tell(what, share)))
                if forks and time.monotonic() - drawn_s >= DRAWN_EVERY_S:
                    bar.refresh()
                    drawn_s = time.monotonic()

            yield update
    else:
        yield _phase_lines(times)
    if sums_up:
        say(screen(), times.summary())


def _time_left(seconds: float | None) -> str:
    """Say how long something will take yet.

    >>> _time_left(None), _time_left(0.2), _time_left(41.3)
    ('', 'about 1 s left', 'about 42 s left')
    """
    return "" if seconds is None else f"about {max(1, math.ceil(seconds))} s left"


def _bar(*, threaded: bool = True) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
    return Progress(*columns, console=screen(), transient=True, auto_refresh=threaded)


def _phase_lines(times: PhaseTimes) -> Callable[[str, float], None]:
    phase, said_s = "", 0.0

    def say(what: str, share: float) -> None:
        nonlocal phase, said_s
        left_s, now_s = times.tell(what, share), time.monotonic()
        if phase_of(what) != phase:
            phase, said_s = phase_of(what), now_s
            sys.stderr.write(f"{phase}\n")
        elif now_s - said_s >= LINE_EVERY_S and share < 1:
            said_s = now_s
            known = f" ({share:.0%} done, {_time_left(left_s)})" if left_s is not None else ""
            sys.stderr.write(f"{what}{known}\n")

    return say


def long_simulation(what: str, share: float) -> None:
    """Say that a simulation takes a while, as :func:`autopar.api.inputs.read_inputs` tells it."""
    say(screen(), f"{what.capitalize()} ...")


@contextmanager
def slow_phases(begin: str) -> Iterator[Callable[[str, float], None]]:
    """Yield what to call as that of :func:`phases`; a bar appears on a terminal after a second, and nothing elsewhere.

    What is done stands still while its share is 0: then the bar says only that something goes on.
    """
    if _is_quiet() or not sys.stderr.isatty():
        yield lambda what, share: None
        return
    bar = _bar()
    task = bar.add_task(begin, total=None, left="")
    # The one thread calls, the other begins to draw; whoever comes first, a bar that has ended is not begun.
    lock, ended = threading.Lock(), False

    def draw() -> None:
        with lock:
            if not ended:
                bar.start()

    timer = threading.Timer(SLOW_S, draw)
    timer.daemon = True
    timer.start()
    try:
        yield lambda what, share: bar.update(task, description=what, completed=share, total=1.0 if share else None)
    finally:
        with lock:
            ended = True
        timer.cancel()
        bar.stop()
