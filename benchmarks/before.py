"""Is a step as fast as it was at another commit?

    git worktree add ../before COMMIT
    python benchmarks/before.py ../before --case real --only "autopar 1f1b" --repeats 3 --steps 8 \\
        --json benchmarks/results/before-real.json

Runs `benchmarks/runtime.py --bare` twice at once, with that tree's code and with this one's; they make a step each in
turn, contestant by contestant, so that both meet what else the machine does. Compared are the median steps: the ratio
of every repeat, their median, and the smallest and the largest one.
Both run the benchmark of this tree, or, with `--own-benchmark`, each its own; of the emulated contestants, `sleeps` is
without autopar, and its ratio says what is noise. The record is written after every repeat.
With `--apart`, one runs behind the other, each first in turn: where ranks are many more than cores, those that wait
disturb. Wants an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from machine import Watch, commit_of
from turns import FIRST, TURNS

HERE = Path(__file__).parents[1]
OTHER = "before"
_LOOK_S = 0.2
Medians = dict[tuple[str, str], float]
"""Case and contestant -> seconds of a step."""


def main() -> None:
    arguments = _arguments()
    watch = Watch()
    repeats: list[tuple[Medians, Medians]] = []
    for number in range(arguments.repeats):
        repeats.append(_both(arguments, number))
        sys.stderr.write(f"repeat {number + 1} of {arguments.repeats}: {_said(repeats[-1:])}\n")
        how = {"apart": arguments.apart, "repeats": len(repeats), "steps": arguments.steps}
        told = {"before": commit_of(arguments.tree), **how}
        watch.record({**told, "rows": _rows(repeats)}, arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tree", type=Path, help="a checkout of the other commit")
    parser.add_argument("--case", default="emulated", help="as of runtime.py")
    parser.add_argument("--only", default="autopar", help="as of runtime.py")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="rounds that count, in every repeat")
    parser.add_argument("--apart", action="store_true", help="one behind the other, not step by step")
    parser.add_argument(
        "--own-benchmark", action="store_true", help="each tree's own, where modules have other names in the other one"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _both(arguments: argparse.Namespace, number: int) -> tuple[Medians, Medians]:
    """Return the medians of the other tree and of this one, run in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "turn").write_text(FIRST, encoding="utf-8")
        trees = [(OTHER, arguments.tree.resolve(), FIRST), (FIRST, HERE, OTHER)]
        running: list[subprocess.Popen[str]] = []
        for who, tree, other in trees if number % 2 else reversed(trees):
            turns = {} if arguments.apart else {TURNS: f"{folder / 'turn'}:{who}:{other}"}
            running.append(_started(tree, turns, folder / f"{who}.json", arguments))
            if arguments.apart:
                _ended(running)
        _ended(running)
        before, after = (_medians(folder / f"{who}.json") for who in (OTHER, FIRST))
    return before, after


def _started(tree: Path, turns: dict[str, str], record: Path, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    benchmark = (tree if arguments.own_benchmark else HERE) / "benchmarks" / "runtime.py"
    command = [sys.executable, str(benchmark), "--bare", "--case", arguments.case]
    command += ["--only", arguments.only, "--steps", str(arguments.steps), "--json", str(record)]
    return subprocess.Popen(
        command,
        cwd=tree,  # Ranks are started as modules, of which those of the working folder come first.
        env={**os.environ, "PYTHONPATH": str(tree), **turns},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ended(running: list[subprocess.Popen[str]]) -> None:
    """Wait for all that runs; where one fails, the others would wait for their turn without end."""
    while running:
        for each in list(running):
            with suppress(subprocess.TimeoutExpired):
                _, said = each.communicate(timeout=_LOOK_S)
                running.remove(each)
                if each.returncode:
                    for other in running:
                        other.kill()
                    sys.exit(said)


def _medians(record: Path) -> Medians:
    rows: list[dict[str, Any]] = json.loads(record.read_text(encoding="utf-8"))["rows"]
    return {(row["case"], row["contestant"]): row["step_s_median"] for row in rows}


def _rows(repeats: list[tuple[Medians, Medians]]) -> list[dict[str, object]]:
    rows = []
    for key in repeats[0][0].keys() & repeats[0][1].keys():
        ratios = [after[key] / before[key] for before, after in repeats]
        rows.append(
            {
                "case": key[0],
                "contestant": key[1],
                "before_s": round(statistics.median(before[key] for before, _ in repeats), 4),
                "after_s": round(statistics.median(after[key] for _, after in repeats), 4),
                "ratio_median": round(statistics.median(ratios), 4),
                "ratio_least": round(min(ratios), 4),
                "ratio_most": round(max(ratios), 4),
            }
        )
    return sorted(rows, key=lambda row: (row["case"], row["contestant"]))


def _said(repeats: list[tuple[Medians, Medians]]) -> str:
    return ", ".join(f"{row['contestant']} {row['ratio_median']}" for row in _rows(repeats))


if __name__ == "__main__":
    main()
