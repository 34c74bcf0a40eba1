"""Workers: processes that run cases, so that one that hangs or dies ends nothing but itself."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fuzzing.record import Line

__all__ = ["run_cases"]

HERE = Path(__file__).parents[2]
LONGEST_S = 240.0
"""That a case may take."""


class _Worker:
    """One process; it is told a case per line, and answers with a line."""

    def __init__(self, seed: int, root: Path) -> None:
        self.numbers: list[int] = []
        benchmarks = root / "benchmarks"
        others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = os.pathsep.join(map(str, filter(None, [benchmarks, root, *others])))
        command = [sys.executable, str(benchmarks / "differential.py"), "--seed", str(seed), "--serve"]
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


def run_cases(seed: int, groups: Iterable[list[int]], workers: int, root: Path = HERE) -> Generator[Line]:
    """Run groups of cases of the tree at ``root``, each by one worker; give their lines as they end.

    Cases of a group share what a worker knows of their model. Whoever stops before the last one ends all workers.
    """
    waiting = iter(groups)
    with selectors.DefaultSelector() as selector, ExitStack() as ending:
        ending.callback(_end_all, selector)
        for _ in range(workers):
            _next(_Worker(seed, root), waiting, selector)
        while selector.get_map():
            ready = selector.select(LONGEST_S)
            for key in [key for key, _ in ready] or list(selector.get_map().values()):
                worker: _Worker = key.data
                text = key.fileobj.readline() if ready else b""  # type: ignore[union-attr]
                selector.unregister(key.fileobj)
                number = worker.numbers.pop(0)
                if text:
                    line = json.loads(text)
                else:
                    worker.end(kill=True)
                    line = _lost(seed, number, "hang" if not ready else "crash", worker.process.returncode)
                    left, worker = worker.numbers, _Worker(seed, root)
                    worker.numbers = left
                _next(worker, waiting, selector)
                yield line


def _end_all(selector: selectors.DefaultSelector) -> None:
    for key in list(selector.get_map().values()):
        key.data.end(kill=True)


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
