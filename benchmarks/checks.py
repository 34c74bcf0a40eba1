"""Checks: what `make test` and `make check` take, some runs of each, and whether they pass on a busy machine.

    python benchmarks/checks.py --test 3 --check 3 --json benchmarks/results/tests.json
    python benchmarks/checks.py --test 5 --check 1 --busy --json benchmarks/results/tests.json

Processor seconds are of all processes that make starts, user and system. With `--busy` a loop keeps each core busy
meanwhile. With `--add` runs of the same kind that were recorded are kept, too, of which each has its date and loop.
What was recorded of the other kind of runs always is, and the costs of single tests are of the last idle runs.
The budget of `make check` is for a machine that takes `budget_loop_s` for the loop (`tests/suite/costs.py`), which no
run changes: machines are faster on some days than on others.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import Watch, loop_s

ROOT = Path(__file__).parents[1]
COSTS = ROOT / "build" / "tests.json"
TARGETS = ("test", "check")


def main() -> int:
    arguments = _arguments()
    watch = Watch()
    kept = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json and arguments.json.exists() else {}
    found = {key: kept[key] for key in ("budget_loop_s", "idle", "busy", "tests") if key in kept}
    with _busy_cores() if arguments.busy else nullcontext():
        runs = {target: [_run(target, arguments.date) for _ in range(getattr(arguments, target))] for target in TARGETS}
    kind = "busy" if arguments.busy else "idle"
    before = {target: each["runs"] for target, each in kept.get(kind, {}).items()} if arguments.add else {}
    every = {target: [*before.get(target, ()), *each] for target, each in runs.items()}
    found[kind] = {target: _summary(each) for target, each in every.items() if each}
    if not arguments.busy:
        found["tests"] = json.loads(COSTS.read_text(encoding="utf-8"))
    watch.record(found, arguments.json)
    return any(run["exit_code"] for each in runs.values() for run in each)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for target in TARGETS:
        parser.add_argument(f"--{target}", type=int, default=0, metavar="N", help=f"runs of make {target}")
    parser.add_argument("--date", help="the day that chooses a part of the rest")
    parser.add_argument("--add", action="store_true", help="keep the runs of the same kind that were recorded")
    parser.add_argument("--busy", action="store_true", help="keep each core busy with a loop")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _run(target: str, date: str | None) -> dict[str, Any]:
    """Run make once, and return what it took."""
    looped_s = loop_s()
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(["make", target, *([f"DATE={date}"] if date else [])], cwd=ROOT, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    took = {"exit_code": done.returncode, "wall_s": round(time.monotonic() - began_s), "processor_s": round(used_s)}
    # A busy loop takes half of the core on which this one is timed.
    took |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "loop_s": round(statistics.mean((looped_s, loop_s())), 3)}
    sys.stderr.write(f"make {target}: {took}\n")
    return took


def _summary(runs: list[dict[str, Any]]) -> dict[str, object]:
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
