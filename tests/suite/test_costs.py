"""Tests of costs: a test is charged with its processes, tiers are kept side by side, and a budget holds."""

import json
import os
from pathlib import Path

import pytest

from paths import BENCHMARKS, HARNESS
from suite.warm import TESTS

SUITE = """
import subprocess, sys, time

BURN = "import time\\nwhile time.process_time() < 0.3: pass"

def test_burns_itself():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass

def test_has_a_process_burn():
    subprocess.run([sys.executable, "-c", BURN], check=True)

def test_idles():
    pass
"""


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [TESTS, HARNESS, BENCHMARKS])))


@pytest.mark.parametrize(("workers", "budget_s"), [(0, 0.001), pytest.param(2, 100_000, marks=pytest.mark.slow)])
def test_what_a_test_and_its_processes_use_is_charged_to_it_and_more_than_the_budget_fails(
    workers: int, budget_s: float, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(SUITE)
    pytester.path.joinpath("costs.json").write_text('{"rest": {"by_test": {"another": 9.0}}}')
    options = ["-p", "suite.costs", "-p", "suite.tiers", "--tier", "core", "--costs", "costs.json", "-n", str(workers)]
    ran = pytester.runpytest_subprocess(*options, "--budget", str(budget_s))
    ran.assert_outcomes(passed=3)
    assert (ran.ret, "tests cost too much" in ran.stdout.str()) == ((1, True) if budget_s < 1 else (0, False))
    ran.stdout.fnmatch_lines(["*dearest tests*", "*9.00 another"])
    found = json.loads(Path("costs.json").read_text())["core"]
    itself, process, idle = (
        next(cost for name, cost in found["by_test"].items() if name.endswith(f"::test_{each}"))
        for each in ("burns_itself", "has_a_process_burn", "idles")
    )
    assert min(itself, process) >= 0.29
    assert idle < 0.2
    assert found["processor_s"] >= itself + process
    assert 0.05 < found["loop_s"] < 20
