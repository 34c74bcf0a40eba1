"""Workers: processes that run cases, so that one that hangs or dies ends nothing but itself."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fuzzing.record import Line

__all__ = ["run_cases"]

LONGEST_S = 240.0
"""That a case may take."""


class _Worker:
    """One process; it is told a case per line, and answers with a line."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.model = -1
        """What it ran last."""
        self.numbers: list[int] = []
        here = Path(__file__).parent.parent
        path = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, str(here / "differential.py"), "--seed", str(seed), "--serve"]
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )

    def begin(self) -> None:
        """Ask for the next case."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{self.numbers[0]}\n".encode())
        self.process.stdin.flush()

    def end(self, *, kill: bool) -> None:
        """Let the process end, with all of its rank processes."""
        assert self.process.stdin is not None
        if kill:
            self.process.kill()
        self.process.stdin.close()
        self.process.wait()


def run_cases(seed: int, groups: Iterable[list[int]], workers: int) -> Iterator[Line]:
    """Run groups of cases, each by one worker; give their lines as they end.

    Groups share what a worker knows of their model.
    """
    waiting = iter(groups)
    with selectors.DefaultSelector() as selector:
        for _ in range(workers):
            _next(_Worker(seed), waiting, selector)
        while selector.get_map():
            ready = selector.select(LONGEST_S)
            for key in [key for key, _ in ready] or list(selector.get_map().values()):
                worker: _Worker = key.data
                text = key.fileobj.readline() if ready else b""  # type: ignore[union-attr]
                selector.unregister(key.fileobj)
                number = worker.numbers.pop(0)
                if text:
                    yield json.loads(text)
                else:
                    worker.end(kill=True)
                    yield _lost(seed, number, "hang" if not ready else "crash", worker.process.returncode)
                    left, worker = worker.numbers, _Worker(seed)
                    worker.numbers = left
                _next(worker, waiting, selector)


def _next(worker: _Worker, waiting: Iterator[list[int]], selector: selectors.DefaultSelector) -> None:
    worker.numbers = worker.numbers or next(waiting, [])
    if not worker.numbers:
        worker.end(kill=False)
        return
    worker.begin()
    assert worker.process.stdout is not None
    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)


def _lost(seed: int, number: int, outcome: str, code: int) -> dict[str, Any]:
    said = f"no answer within {LONGEST_S:g} s" if outcome == "hang" else f"the worker ended with exit code {code}"
    missing = dict.fromkeys(("plan", "schedule", "shard", "recompute", "ranks", "recipe"))
    return {"seed": seed, "case": number, "outcome": outcome, "where": "worker", "said": said, "seconds": 0, **missing}
