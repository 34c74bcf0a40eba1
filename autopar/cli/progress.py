"""Progress of a training run on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["steps_progress"]

LINE_EVERY_S = 2.0


@contextmanager
def steps_progress(steps: int, *, quiet: bool = False) -> Iterator[Callable[[int, float], None]]:
    """Yield what to call with (step, loss): a bar on a terminal, a line now and then elsewhere."""
    if quiet:
        yield lambda step, loss: None
    elif sys.stderr.isatty():
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting ranks", total=steps)
            yield lambda step, loss: bar.update(task, completed=step + 1, description=f"loss {loss:.4f}")
    else:
        yield _lines(steps)


def _lines(steps: int) -> Callable[[int, float], None]:
    said_s = -LINE_EVERY_S

    def say(step: int, loss: float) -> None:
        nonlocal said_s
        if step + 1 == steps or time.monotonic() - said_s >= LINE_EVERY_S:
            said_s = time.monotonic()
            sys.stderr.write(f"step {step + 1}/{steps}: loss {loss:.4f}\n")

    sys.stderr.write("starting ranks\n")
    return say
