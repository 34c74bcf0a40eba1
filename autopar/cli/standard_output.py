"""Standard output: kept for a command's result, whoever else writes to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def results_only() -> Iterator[None]:
    """Let ``sys.stdout`` alone write to standard output; its descriptor is standard error's meanwhile.

    A user's code may start programs, and call libraries, that print without asking Python. Where ``sys.stdout`` is
    not the process's own, nothing changes.
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
