"""Bugs: patches that put a bug into a copy of the tree, and the case by which it is found."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from fuzzing.record import bad
from fuzzing.workers import run_cases

__all__ = ["BUGS", "hunt", "patched"]

ROOT = Path(__file__).parents[2]
BUGS = ROOT / "tests" / "differential" / "bugs"
TREE = ("autopar", "planner", "profiler", "runtime", "examples", "benchmarks", "tests/harness")
CODE = shutil.ignore_patterns("__pycache__", "results")


def patched(bug: Path, folder: Path) -> Path:
    """Copy the tree into a folder and apply a patch to it; return the folder."""
    for name in TREE:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=CODE)
    subprocess.run(["git", "apply", str(bug.resolve())], cwd=folder, check=True)
    return folder


def hunt(bug: Path, seed: int, numbers: Iterable[int], workers: int = 1) -> dict[str, Any]:
    """Run cases of a tree with a bug until one says so, which the tree without it does not; say after how many."""
    began_s, tried = time.monotonic(), 0
    found: dict[str, Any] = {"bug": bug.stem, "found": False}
    with tempfile.TemporaryDirectory() as folder:
        root = patched(bug, Path(folder))
        with closing(run_cases(seed, ([number] for number in numbers), workers, root)) as lines:
            for line in lines:
                tried += 1
                if bad(line) and not _bad_anyway(seed, line["case"]):
                    found |= {"found": True, **{key: line[key] for key in ("case", "outcome", "where", "said", "plan")}}
                    break
    return found | {"tried": tried, "seconds": round(time.monotonic() - began_s)}


def _bad_anyway(seed: int, number: int) -> bool:
    return any(bad(line) for line in run_cases(seed, [[number]], 1))
