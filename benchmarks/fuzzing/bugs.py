"""Bugs: those of tests/bugs that the fuzzer finds, each hunted in a copy of the tree."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from bugs import Bug, patched, read_bugs
from fuzzing.record import bad
from fuzzing.workers import run_cases

__all__ = ["fuzzed_bugs", "hunt"]


def fuzzed_bugs(name: str | None = None) -> list[Bug]:
    """Return the bugs that a case of the fuzzer finds, or the one of that name."""
    return [bug for bug in read_bugs() if bug.fuzzed is not None and name in (None, bug.name)]


def hunt(bug: Bug, seed: int, numbers: Iterable[int], workers: int = 1) -> dict[str, Any]:
    """Run cases of a tree with a bug until one says so, which the tree without it does not; say after how many."""
    began_s, tried = time.monotonic(), 0
    found: dict[str, Any] = {"bug": bug.name, "found": False}
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
