"""Tests of costs: a test is charged with its processes, tiers are kept side by side, and a budget holds."""

import json
import os
from pathlib import Path

import pytest

from paths import BENCHMARKS, HARNESS
from suite.costs import summarize
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


@pytest.mark.parametrize(("budget", "code"), [("0.001", pytest.ExitCode.TESTS_FAILED), ("100000", pytest.ExitCode.OK)])
def test_tests_that_cost_more_than_their_budget_fail(
    budget: str, code: pytest.ExitCode, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(SUITE)
    ran = pytester.runpytest_subprocess("-p", "suite.costs", "-p", "suite.tiers", "--budget", budget)
    assert ran.ret == code
    assert ("tests cost too much" in ran.stdout.str()) == (code != pytest.ExitCode.OK)


def test_sums_are_by_file_and_the_dearest_come_first() -> None:
    found = summarize({"a.py::x": 1.0, "b.py::y": 1.5, "a.py::z": 1.0}, 9.0, 5.0, [0.3, 0.5, 0.4])
    assert list(found["by_file"].items()) == [("a.py", 2.0), ("b.py", 1.5)]
    assert list(found["by_test"]) == ["b.py::y", "a.py::x", "a.py::z"]
    assert (found["loop_s"], found["processor_s"], found["wall_s"], found["tests"]) == (0.4, 9.0, 5.0, 3)
