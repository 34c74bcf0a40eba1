"""The fuzzer in benchmarks/fuzzing finds nothing in the tree; `benchmarks/differential.py --bugs` has it find bugs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from paths import BENCHMARKS


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
