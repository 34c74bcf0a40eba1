"""Is a step as fast as it was at another commit?

    git worktree add ../before COMMIT
    python benchmarks/before.py ../before --case real --only "autopar 1f1b" --turns 6 --steps 3 \
        --json benchmarks/results/before-real.json

Runs `benchmarks/runtime.py --bare` with that tree's code and with this one's in turns, and compares the median steps of
every contestant: the ratio of each turn, their median, and the smallest and the largest one. Which tree goes first
changes from turn to turn, and the record is written after each. Both run the benchmark of this tree: between its
contestants are some without autopar (`plain`, `copies`, `sleeps`), whose ratios say what the machine alone makes of
it. Wants an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import Watch

HERE = Path(__file__).parents[1]
Medians = dict[tuple[str, str], float]
"""Case and contestant -> seconds of a step."""


def main() -> None:
    arguments = _arguments()
    watch = Watch()
    turns: list[tuple[Medians, Medians]] = []
    for turn in range(arguments.turns):
        trees = [arguments.tree, HERE]
        found = [_medians(tree, arguments) for tree in (trees if turn % 2 else reversed(trees))]
        before, after = found if turn % 2 else reversed(found)
        turns.append((before, after))
        sys.stderr.write(f"turn {turn + 1} of {arguments.turns}: {_said(turns[-1:])}\n")
        told = {"before": _commit(arguments.tree), "turns": len(turns), "steps": arguments.steps, "rows": _rows(turns)}
        watch.record(told, arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tree", type=Path, help="a checkout of the other commit")
    parser.add_argument("--case", default="emulated", help="as of runtime.py")
    parser.add_argument("--only", default="autopar", help="as of runtime.py")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="rounds that count, in every turn")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _medians(tree: Path, arguments: argparse.Namespace) -> Medians:
    """Run a tree's benchmark once."""
    tree = tree.resolve()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "runtime.json"
        command = [sys.executable, str(HERE / "benchmarks" / "runtime.py"), "--bare", "--case", arguments.case]
        command += ["--only", arguments.only, "--steps", str(arguments.steps), "--json", str(record)]
        ran = subprocess.run(
            command,
            cwd=tree,  # Ranks are started as modules, of which those of the working folder come first.
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            sys.exit(f"{tree}: {ran.stderr}")
        rows: list[dict[str, Any]] = json.loads(record.read_text())["rows"]
    return {(row["case"], row["contestant"]): row["step_s_median"] for row in rows}


def _rows(turns: list[tuple[Medians, Medians]]) -> list[dict[str, object]]:
    rows = []
    for key in turns[0][0].keys() & turns[0][1].keys():
        ratios = [after[key] / before[key] for before, after in turns]
        rows.append(
            {
                "case": key[0],
                "contestant": key[1],
                "before_s": round(statistics.median(before[key] for before, _ in turns), 4),
                "after_s": round(statistics.median(after[key] for _, after in turns), 4),
                "ratio_median": round(statistics.median(ratios), 4),
                "ratio_least": round(min(ratios), 4),
                "ratio_most": round(max(ratios), 4),
            }
        )
    return sorted(rows, key=lambda row: (row["case"], row["contestant"]))


def _said(turns: list[tuple[Medians, Medians]]) -> str:
    return ", ".join(f"{row['contestant']} {row['ratio_median']}" for row in _rows(turns))


def _commit(tree: Path) -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=tree, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


if __name__ == "__main__":
    main()
