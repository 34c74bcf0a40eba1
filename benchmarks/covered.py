"""Covered: which lines and branches do tests reach, here and at another commit, in ranks' processes, too?

    git worktree add ../before COMMIT
    python benchmarks/covered.py ../before --cases 1 --seconds 40 --data before tests/planner tests/runtime
    python benchmarks/covered.py . --cases 1 --seconds 40 --data after tests/planner tests/runtime
    python benchmarks/covered.py ../before --data before --and . after --json benchmarks/results/covered.json

Of every test function the first cases are run, each for some seconds at most: a longer one counts as far as it came.
So both trees are measured by the same rule, whatever their tests take. Data is kept in a folder, to which later calls
add; what is recorded are the shares of lines and branches by part of the product, of all that its folder has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
CASES = "AUTOPAR_CASES"
RUNS = "runs.txt"
"""What the data in a folder is of."""
OWN = ("planner", "profiler", "runtime")
"""Parts of the product that have a folder at the top."""


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:  # noqa: ANN401
    """Leave out all but the first cases of every test function (this module is pytest's plugin, too)."""
    cases: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.split("[")[0]].append(item)
    most = int(os.environ[CASES])
    config.hook.pytest_deselected(items=[item for each in cases.values() for item in each[most:]])
    items[:] = [item for each in cases.values() for item in each[:most]]


def main() -> None:
    from machine import Watch

    arguments = _arguments()
    watch = Watch()
    for tests in arguments.tests:
        _measure(arguments, tests)
    found = {"before" if arguments.others else "here": _found(arguments.tree, arguments.data)}
    if arguments.others:
        found["after"] = _found(*map(Path, arguments.others))
    watch.record(found, arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tree", type=Path, help="a checkout of a commit")
    parser.add_argument("tests", nargs="*", help="folders or files of its tests, one run of pytest each")
    parser.add_argument("--data", type=Path, required=True, help="where its data is kept")
    parser.add_argument("--and", dest="others", nargs=2, metavar=("TREE", "DATA"), help="to be shown beside it")
    parser.add_argument("--cases", type=int, default=1, help="of every test function")
    parser.add_argument("--seconds", type=int, default=40, help="that each may take")
    parser.add_argument("--json", type=Path)
    return parser.parse_intermixed_args()


def _environment(tree: Path, data: Path) -> dict[str, str]:
    rules = HERE / "pyproject.toml"
    paths = os.pathsep.join([str(tree.resolve()), str(HERE / "benchmarks")])
    return {**os.environ, "PYTHONPATH": paths, "COVERAGE_FILE": str(data.resolve()), "COVERAGE_RCFILE": str(rules)}


def _measure(arguments: argparse.Namespace, tests: str) -> None:
    """Run tests; those that fail count, too."""
    arguments.data.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "coverage", "run", "-m", "pytest", "-p", "covered", tests]
    environment = {**_environment(arguments.tree, arguments.data / "data"), CASES: str(arguments.cases)}
    subprocess.run([*command, "-o", f"timeout={arguments.seconds}"], cwd=arguments.tree, env=environment, check=False)
    with (arguments.data / RUNS).open("a", encoding="utf-8") as file:
        file.write(f"{tests}: {arguments.cases} cases, {arguments.seconds} s\n")


def _found(tree: Path, data: Path) -> dict[str, object]:
    runs = (data / RUNS).read_text(encoding="utf-8").splitlines()
    return {"runs": runs, "parts": _shares(tree, data)}


def _shares(tree: Path, data: Path) -> dict[str, dict[str, float]]:
    """Return the lines and branches of every part of the product, and the shares of them that are reached."""
    with tempfile.TemporaryDirectory() as name:
        environment, report = _environment(tree, Path(name) / "all"), Path(name) / "report.json"
        pieces = [str(each.resolve()) for each in sorted(data.glob("data.*"))]
        for command in (["combine", "--keep", "-q", *pieces], ["json", "-q", "-o", str(report)]):
            subprocess.run([sys.executable, "-m", "coverage", *command], cwd=tree, env=environment, check=True)
        files = json.loads(report.read_text(encoding="utf-8"))["files"]
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path, found in files.items():
        first, *rest = Path(path).parts
        part = first if first in OWN else rest[0] if len(rest) > 1 else "autopar"
        for each in (part, "all"):
            sums[each].update({key: value for key, value in found["summary"].items() if isinstance(value, int)})
    return {part: _row(each) for part, each in sorted(sums.items())}


def _row(sums: Counter[str]) -> dict[str, float]:
    lines, branches = sums["num_statements"], sums["num_branches"]
    return {
        "lines": lines,
        "lines_reached": round(sums["covered_lines"] / lines, 4),
        "branches": branches,
        "branches_reached": round(sums["covered_branches"] / max(1, branches), 4),
    }


if __name__ == "__main__":
    main()
