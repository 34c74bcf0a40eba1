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


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_test_and_its_processes_use_is_charged_to_it(workers: int, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    pytester.path.joinpath("costs.json").write_text('{"rest": {"by_test": {"another": 9.0}}}')
    options = ["-p", "suite.costs", "-p", "suite.tiers", "--tier", "core", "--costs", "costs.json", "-n", str(workers)]
    ran = pytester.runpytest_subprocess(*options)
    ran.assert_outcomes(passed=3)
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


@pytest.mark.parametrize(("budget", "code"), [("0.001", 1), ("100000", 0)])
def test_tests_that_cost_more_than_their_budget_fail(budget: str, code: int, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    ran = pytester.runpytest_subprocess("-p", "suite.costs", "-p", "suite.tiers", "--budget", budget)
    assert (ran.ret, "tests cost too much" in ran.stdout.str()) == (code, code == 1)
