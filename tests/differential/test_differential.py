"""The fuzzer in benchmarks/fuzzing finds nothing in the tree, and every bug that a patch puts into a copy of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from paths import BENCHMARKS

# By bug, a case of seed 0 that finds it; `benchmarks/differential.py --bugs` counts from the first case on.
FOUND_BY = {
    "dropped-gradient": 169,
    "stale-buffer": 52,
    "swapped-micro-batches": 0,
    "wrong-seed-after-recomputation": 7,
    "wrong-share-weight": 22,
    "zero-for-none": 0,
}


def differential(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "differential.py"), *arguments]
    path = os.pathsep.join(filter(None, [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_random_models_train_as_the_plain_loop_does_or_are_refused_by_name(tmp_path: Path) -> None:
    output = tmp_path / "cases.jsonl"
    ran = differential("--cases", "36", "--output", str(output))
    lines = [json.loads(text) for text in output.read_text().splitlines()]
    assert ran.returncode == 0, ran.stderr
    assert len(lines) == 36
    ranks = Counter(line["ranks"] for line in lines if line["outcome"] == "equal")
    assert min(ranks["threads"], ranks["processes"]) >= 3
    # What is there is not run again.
    again = differential("--cases", "36", "--output", str(output))
    assert json.loads(again.stdout)["cases"] == 36
    assert len(output.read_text().splitlines()) == 36


@pytest.mark.slow
@pytest.mark.parametrize("bug", sorted(FOUND_BY))
def test_a_bug_in_a_copy_of_the_tree_is_found(bug: str, tmp_path: Path) -> None:
    record = tmp_path / "found.json"
    case = str(FOUND_BY[bug])
    ran = differential("--bugs", "--bug", bug, "--first", case, "--cases", "3", "--json", str(record))
    assert ran.returncode == 0, ran.stderr
    (found,) = json.loads(record.read_text())["bugs"]
    assert found["outcome"] == "wrong"


def test_every_bug_that_is_kept_has_a_case() -> None:
    kept = {patch.stem for patch in (Path(__file__).parent / "bugs").glob("*.patch")}
    assert kept == FOUND_BY.keys()


@pytest.mark.parametrize("bug", sorted(FOUND_BY))
def test_the_patch_of_a_bug_fits_the_tree(bug: str) -> None:
    patch = Path(__file__).parent / "bugs" / f"{bug}.patch"
    subprocess.run(["git", "apply", "--check", str(patch)], cwd=BENCHMARKS.parent, check=True)
