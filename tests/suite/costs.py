"""Costs: the processor seconds of every test, its processes included; written as JSON, and the dearest printed.

A test is charged what this process and all that descend from it have used meanwhile, user and system: what it starts
for later tests, too (a pool of ranks, a fixture of the session). The file keeps one part for every tier. With a budget,
the tests fail where all they used is more than that by a fifth, scaled by how long a loop takes, which is timed
throughout, and took on the machine that recorded `benchmarks/results/tests.json`.
"""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paths import BENCHMARKS

RECORDED = BENCHMARKS / "results" / "tests.json"
DEAREST = 20
ALLOWED = 1.2
"""What may be used, of the budget."""
LOOP_EVERY_S, LOOP_PART = 30.0, 10
_COST, _LOOP = "processor_s", "loop_s"


def tree_s() -> float:
    """Return the processor seconds of this process and of all that descend from it, living and ended."""
    me = psutil.Process()
    total = 0.0
    for each in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            total += sum(each.cpu_times()[:4])
    return total


class Meter:
    """Charges the tests that this process runs."""

    _looped_s = -LOOP_EVERY_S
    _before_s: float | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        # Later tests begin where the one before has ended: all processes of the machine are looked through for this.
        self._before_s = tree_s() if self._before_s is None else self._before_s
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Tell the cost with the report of the tear-down, which xdist sends on."""
        report = yield
        if call.when == "teardown":
            assert self._before_s is not None
            now_s = tree_s()
            found, self._before_s = {_COST: round(now_s - self._before_s, 3)}, now_s
            if time.monotonic() - self._looped_s > LOOP_EVERY_S:
                from machine import loop_s

                found[_LOOP] = loop_s(LOOP_PART)
                self._looped_s, self._before_s = time.monotonic(), tree_s()
            report.user_properties = [*report.user_properties, *found.items()]
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tell what this process has used in all, collecting tests included."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_COST] = tree_s()


class Ledger:
    """Keeps what the processes of the suite report, where one of them speaks for all."""

    def __init__(self, path: Path | None, budget_s: float | None, tier: str) -> None:
        self._path, self._budget_s, self._tier = path, budget_s, tier
        self._by_test: dict[str, float] = {}
        self._loops: list[float] = []
        self._workers_s = 0.0
        self._began_s = time.monotonic()
        self._found: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            found: dict[str, Any] = dict(report.user_properties)
            self._by_test[report.nodeid] = found[_COST]
            self._loops += [found[_LOOP]] if _LOOP in found else []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:  # noqa: ANN401
        self._workers_s += getattr(node, "workeroutput", {}).get(_COST, 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Sum up; have the session fail where it used too much."""
        own_s = sum(psutil.Process().cpu_times()[:2]) if self._workers_s else tree_s()
        wall_s = time.monotonic() - self._began_s
        self._found = summarize(self._by_test, own_s + self._workers_s, wall_s, self._loops)
        if self._over() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the dearest tests of all tiers, and write all."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
            kept |= {self._tier: self._found}
            self._path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            terminalreporter.section(f"{DEAREST} dearest tests, processor seconds")
            costs = [(cost, test) for found in kept.values() for test, cost in found["by_test"].items()]
            for cost, test in sorted(costs, reverse=True)[:DEAREST]:
                terminalreporter.write_line(f"{cost:8.2f} {test}")
            told = f"{len(self._by_test)} tests used {self._found['processor_s']:.0f} s of processors"
            terminalreporter.write_line(f"{told} in {self._found['wall_s']:.0f} s ({self._path})")
        if self._over():
            terminalreporter.write_line(f"FAILED: tests cost too much: {self._over()}", red=True)

    def _over(self) -> str:
        """Say by how much the budget is exceeded; nothing where it is not, or there is none."""
        if self._budget_s is None:
            return ""
        reference_s = json.loads(RECORDED.read_text(encoding="utf-8"))["budget_loop_s"]
        return over_budget(self._found["processor_s"], self._found["loop_s"], self._budget_s, reference_s)


def over_budget(used_s: float, loop_s: float, budget_s: float, reference_loop_s: float) -> str:
    """Say by how much a budget is exceeded; nothing where it is not by a fifth.

    >>> over_budget(1000.0, 0.4, 900.0, 0.4)
    ''
    >>> over_budget(1600.0, 0.5, 900.0, 0.4)
    '1280 s of processors (1600 where a loop takes 0.5 s, scaled to 0.4 s); 1080 are allowed'
    """
    scaled_s, allowed_s = used_s * reference_loop_s / loop_s, ALLOWED * budget_s
    if scaled_s <= allowed_s:
        return ""
    scale = f"{used_s:.0f} where a loop takes {loop_s} s, scaled to {reference_loop_s} s"
    return f"{scaled_s:.0f} s of processors ({scale}); {allowed_s:.0f} are allowed"


def summarize(by_test: Mapping[str, float], used_s: float, wall_s: float, loops: list[float]) -> dict[str, Any]:
    """Return the sums by file and all tests, the dearest first."""
    by_file: defaultdict[str, float] = defaultdict(float)
    for test, cost in by_test.items():
        by_file[test.partition("::")[0]] += cost
    return {
        "wall_s": round(wall_s, 1),
        "processor_s": round(used_s, 1),
        "loop_s": round(statistics.median(loops), 3) if loops else None,
        "tests": len(by_test),
        "by_file": _dearest_first(by_file),
        "by_test": _dearest_first(by_test),
    }


def _dearest_first(costs: Mapping[str, float]) -> dict[str, float]:
    return {name: round(cost, 2) for name, cost in sorted(costs.items(), key=lambda pair: (-pair[1], pair[0]))}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Have --costs and --budget."""
    parser.addoption("--costs", type=Path, metavar="FILE", help="write what every test costs, and print the dearest")
    parser.addoption("--budget", type=float, metavar="SECONDS", help="fail where tests use more by a fifth")


def pytest_configure(config: pytest.Config) -> None:
    """Measure in every process of the suite, and keep it in the one that speaks."""
    config.pluginmanager.register(Meter(), "meter")
    if not hasattr(config, "workerinput"):
        options = config.option
        config.pluginmanager.register(Ledger(options.costs, options.budget, options.tier), "ledger")
