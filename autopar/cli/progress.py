"""Progress on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from autopar.cli.screen import screen

__all__ = ["phases", "steps_progress"]

LINE_EVERY_S = 2.0


@contextmanager
def steps_progress(steps: int | None, *, quiet: bool = False) -> Iterator[Callable[[int, float], None]]:
    """Yield what to call with (step, loss): a bar on a terminal, a line now and then elsewhere.

    How many steps there are may not be known.
    """
    if quiet:
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
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=screen(), transient=True) as bar:
            task = bar.add_task("loading the model", total=1.0)
            yield lambda what, share: bar.update(task, description=what, completed=share)
        return
    said = ""

    def say(what: str, share: float) -> None:
        nonlocal said
        if what != said:
            said = what
            sys.stderr.write(f"{what}\n")

    yield say
