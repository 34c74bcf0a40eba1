"""Whatever a file holds, its reader gives an object or one clean line: some cases of benchmarks/broken_files.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from paths import BENCHMARKS


@pytest.mark.slow
def test_broken_files_give_an_object_or_one_clean_line() -> None:
    path = os.pathsep.join(filter(None, [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(BENCHMARKS / "broken_files.py"), "--cases", "10000"]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    outcomes = json.loads(ran.stdout)["outcomes"]
    assert min(outcomes["object"], outcomes["refused"]) > 1000
