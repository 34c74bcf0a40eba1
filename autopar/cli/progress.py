"""Progress on standard error: a bar on a terminal, lines elsewhere; none where a command is quiet."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from autopar.cli.output import is_quiet, say, screen

LINE_EVERY_S = 2.0
SLOW_S = 1.0
"""What takes longer shows how far it is."""


@contextmanager
def steps_progress(steps: int | None, *, quiet: bool = False) -> Iterator[Callable[[int, float], None]]:
    """Yield what to call with (step, loss): a bar on a terminal, a line now and then elsewhere."""
    if quiet or is_quiet():
        yield lambda step, loss: None
    elif sys.stderr.isatty():
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Progress(*columns, TimeRemainingColumn(), console=screen(), transient=True) as bar:
            task = bar.add_task("starting ranks", total=steps)
            yield lambda step, loss: bar.update(task, completed=step + 1, description=f"loss {loss:.4f}")
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
def phases() -> Iterator[Callable[[str, float], None]]:
    """Yield what to call with (what is being done, share done): a bar on a terminal, a line per phase elsewhere."""
    if is_quiet():
        yield lambda what, share: None
    elif sys.stderr.isatty():
        with _bar() as bar:
            task = bar.add_task("loading the model", total=1.0)
            yield lambda what, share: bar.update(task, description=what, completed=share)
    else:
        yield _phase_lines()


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=screen(), transient=True)


def _phase_lines() -> Callable[[str, float], None]:
    said = ""

    def say(what: str, share: float) -> None:
        nonlocal said
        if what != said:
            said = what
            sys.stderr.write(f"{what}\n")

    return say


def long_simulation(what: str, share: float) -> None:
    """Say that a simulation takes a while, as :func:`autopar.inputs.read_inputs` tells it."""
    say(screen(), f"{what.capitalize()} ...")


@contextmanager
def slow_phases(begin: str) -> Iterator[Callable[[str, float], None]]:
    """Yield what to call as that of :func:`phases`; a bar appears on a terminal after a second, and nothing elsewhere.

    What is done stands still while its share is 0: then the bar says only that something goes on.
    """
    if is_quiet() or not sys.stderr.isatty():
        yield lambda what, share: None
        return
    bar = _bar()
    task = bar.add_task(begin, total=None)
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
