"""Checks: what `make test` and `make check` take, some runs of each, and whether they pass on a busy machine.

    python benchmarks/checks.py --test 3 --check 3 --json benchmarks/results/tests.json
    python benchmarks/checks.py --test 5 --check 1 --busy --json benchmarks/results/tests.json

Processor seconds are of all processes that make starts, user and system. With `--busy` a loop keeps each core busy
meanwhile. What was recorded of the other kind of runs is kept, and the costs of single tests are of the last idle runs.
The time of the loop that is recorded is what the budget of `make check` is scaled by (`tests/suite/costs.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from machine import Watch

ROOT = Path(__file__).parents[1]
COSTS = ROOT / "build" / "tests.json"
TARGETS = ("test", "check")


def main() -> int:
    arguments = _arguments()
    watch = Watch()
    kept = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json and arguments.json.exists() else {}
    found = {key: kept[key] for key in ("idle", "busy", "tests") if key in kept}
    with _busy_cores() if arguments.busy else nullcontext():
        runs = {target: [_run(target, arguments.date) for _ in range(getattr(arguments, target))] for target in TARGETS}
    found["busy" if arguments.busy else "idle"] = {target: _summary(each) for target, each in runs.items() if each}
    if not arguments.busy:
        found["tests"] = json.loads(COSTS.read_text(encoding="utf-8"))
    watch.record(found, arguments.json)
    return any(run["exit_code"] for each in runs.values() for run in each)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for target in TARGETS:
        parser.add_argument(f"--{target}", type=int, default=0, metavar="N", help=f"runs of make {target}")
    parser.add_argument("--date", help="the day that chooses a part of the rest")
    parser.add_argument("--busy", action="store_true", help="keep each core busy with a loop")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _run(target: str, date: str | None) -> dict[str, float]:
    """Run make once, and return what it took."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(["make", target, *([f"DATE={date}"] if date else [])], cwd=ROOT, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    took = {"exit_code": done.returncode, "wall_s": round(time.monotonic() - began_s), "processor_s": round(used_s)}
    sys.stderr.write(f"make {target}: {took}\n")
    return took


def _summary(runs: list[dict[str, float]]) -> dict[str, object]:
    keys = ("wall_s", "processor_s")
    return {"runs": runs, "median": {key: statistics.median(run[key] for run in runs) for key in keys}}


@contextmanager
def _busy_cores() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    sys.exit(main())
