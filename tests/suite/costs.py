"""Costs: the processor seconds of every test, its processes included; written as JSON, and the dearest printed.

    python -m pytest tests/formats --costs build/tests.json

A test is charged what this process and all that descend from it have used meanwhile, user and system: what it starts
for later tests, too (a pool of ranks, a fixture of the session).
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

PROPERTY = "processor_s"
DEAREST = 20


def tree_s() -> float:
    """Return the processor seconds of this process and of all that descend from it, living and ended."""
    me = psutil.Process()
    total = 0.0
    for each in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            total += sum(each.cpu_times()[:4])
    return total


class Costs:
    """Charges tests, and keeps what all processes of the suite report."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.by_test: dict[str, float] = {}
        self.began_s = time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure a test with its set-up and what it leaves to be torn down."""
        self._before_s = tree_s()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Tell the cost with the report of the tear-down, which xdist's workers send on."""
        report = yield
        if call.when == "teardown":
            report.user_properties = [*report.user_properties, (PROPERTY, round(tree_s() - self._before_s, 3))]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep it."""
        if report.when == "teardown":
            self.by_test[report.nodeid] = dict(report.user_properties)[PROPERTY]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the dearest tests, and write all."""
        if self.path is None:
            return
        found = summarize(self.by_test, tree_s(), time.monotonic() - self.began_s)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        terminalreporter.section(f"{DEAREST} dearest tests, processor seconds")
        dearest = sorted(self.by_test.items(), key=lambda pair: -pair[1])[:DEAREST]
        for test, cost in dearest:
            terminalreporter.write_line(f"{cost:8.2f} {test}")


def summarize(by_test: dict[str, float], total_s: float, wall_s: float) -> dict[str, object]:
    """Return the sums by file and all tests, the dearest first."""
    by_file: defaultdict[str, float] = defaultdict(float)
    for test, cost in by_test.items():
        by_file[test.partition("::")[0]] += cost
    return {
        "wall_s": round(wall_s, 1),
        "processor_s": round(total_s, 1),
        "tests": len(by_test),
        "by_file": _dearest_first(by_file),
        "by_test": _dearest_first(by_test),
    }


def _dearest_first(costs: dict[str, float]) -> dict[str, float]:
    return {name: round(cost, 2) for name, cost in sorted(costs.items(), key=lambda pair: (-pair[1], pair[0]))}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Have --costs."""
    parser.addoption("--costs", type=Path, metavar="FILE", help="write what every test costs, and print the dearest")


def pytest_configure(config: pytest.Config) -> None:
    """Measure in every process of the suite."""
    config.pluginmanager.register(Costs(config.getoption("--costs")), "costs")
