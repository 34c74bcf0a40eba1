"""Constants: what another value of each constant of the planner's search costs, on a few medium problems.

    python benchmarks/constants.py --json benchmarks/results/constants.json [--only paces] [--minutes 20]

A line for every family of constants: with each of the other values, the mean and the largest ratio of the step to the
step with the planner's own value, and the mean ratios of the lower bound and of processor seconds. The values of a line
take turns on each problem, the planner's own first. What is recorded already is kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from autopar.planner.search.configs import Fineness
from machine import Watch
from medium import question, timed

INSTANCES = (
    "24x64-unequal-tight-given-auto-1",
    "48x32-unequal-tight-given-auto-1",
    "32x32-unequal-tight-free-none-1",
    "24x16-unequal-ample-free-auto-1",
)
BRANCHES = (
    "48x32-branches-tight-free-auto-1",
    "64x64-branches-tight-given-auto-1",
    "36x128-branches-ample-free-auto-1",
)
"""For what is done where not all tensors pass from stage to stage."""
SEARCH = "autopar.planner.search."


class ConstantFamily(NamedTuple):
    """A family of constants."""

    modules: tuple[str, ...]
    """That hold them, below the search."""
    others: tuple[Mapping[str, Any], ...]
    """Other values."""
    instances: tuple[str, ...] = INSTANCES


LINES = {
    "even splits: numbers of stages": ConstantFamily(("local",), ({"FEW_STAGES": 8}, {"FEW_STAGES": 64})),
    "even splits: simulated": ConstantFamily(("local",), ({"JUDGED": 12}, {"JUDGED": 80})),
    "even splits: work": ConstantFamily(("local",), ({"START": 3e5}, {"START": 3e6})),
    "local moves: seeds": ConstantFamily(("local",), ({"SEEDS": 1}, {"SEEDS": 12}, {"MOST_SEEDS": 4})),
    "local moves: how far a seed may be": ConstantFamily(("local",), ({"FAR": 1.1}, {"FAR": 3.0})),
    "local moves: work": ConstantFamily(
        ("local",),
        (
            {"CLIMB": 0.0, "MOST_CLIMB": 0.0},
            {"CLIMB": 1e6, "MOST_CLIMB": 1e6},
            {"CLIMB": 1e7, "MOST_CLIMB": 1e7},
            {"SIMULATIONS": 0},
            {"WHEN_EXACT": 1},
            {"WHEN_EXACT": 4},
        ),
    ),
    "local moves: stages that take devices": ConstantFamily(("local",), ({"BUSY": 2}, {"BUSY": 20})),
    "local moves: stages that pass layers": ConstantFamily(("local",), ({"MOST_PASSED": 0}, {"MOST_PASSED": 4096})),
    "local moves: moves simulated": ConstantFamily(
        ("local",), ({"FEW_TRIES": 3}, {"FEW_TRIES": 40}, {"TRIES": 12}, {"TRIES": 400})
    ),
    "local moves: power of the mean": ConstantFamily(("local",), ({"NORM": 4}, {"NORM": 64})),
    "local moves: sideways": ConstantFamily(("local",), ({"MOST_SIDEWAYS": 0}, {"SIDEWAYS": 1e-2})),
    "best first: work and plans": ConstantFamily(
        ("best_first",), ({"EXPANSIONS": 100, "BEST_FIRST": 2e5}, {"EXPANSIONS": 10_000, "BEST_FIRST": 1e7})
    ),
    "best first: plans in any case": ConstantFamily(
        ("best_first",), ({"LEAST_CANDIDATES": 1}, {"LEAST_CANDIDATES": 500})
    ),
    "best first: how far first depths may be": ConstantFamily(("best_first",), ({"HOPELESS": 1.0}, {"HOPELESS": 2.0})),
    "bounds: stages told apart": ConstantFamily(("best_first",), ({"MOST_APART": 0}, {"MOST_APART": 10**8})),
    "bounds: stages looked through": ConstantFamily(("pace",), ({"MANY_ELEMENTS": 5_000_000},)),
    "bounds: caps": ConstantFamily(("pace",), ({"FEW_CAPS": 0, "CAPS": 0}, {"FEW_CAPS": 4, "CAPS": 6})),
    "bounds: sorts of widths": ConstantFamily(
        ("best_first",),
        ({"FINE": Fineness(classes=8)}, {"FINE": Fineness(classes=48)}, {"FINE": Fineness(classes=200)}),
    ),
    "bounds: widths told apart": ConstantFamily(("configs",), ({"FEW_EXACT": 1, "MOST_EXACT": 1}, {"MOST_EXACT": 64})),
    "bounds: lengths": ConstantFamily(
        ("best_first",),
        ({"FINE": Fineness(lengths=8)}, {"FINE": Fineness(growth=1.5)}, {"FINE": Fineness(lengths=96)}),
    ),
    "bounds: recomputation": ConstantFamily(
        ("best_first",), ({"FINE": Fineness(ranges=2)}, {"FINE": Fineness(ranges=10)}, {"ROUGH": Fineness(ranges=2)})
    ),
    "bounds: work of tables of branches": ConstantFamily(
        ("best_first",), ({"TABLES": 5e6}, {"TABLES": 8e7}, {"MOST_FINE": 2e6}, {"MOST_FINE": 1e9}), BRANCHES
    ),
    "bounds: work of a table of branches": ConstantFamily(
        ("stages",), ({"MOST_TABLED": 1e6}, {"MOST_TABLED": 2e7}, {"TABLED_APART": 0.08}), BRANCHES
    ),
    "bounds: sorts of branches": ConstantFamily(
        ("best_first",), ({"COARSE": Fineness(), "MOST_FINE": 0.0}, {"MOST_FINE": 0.0}), BRANCHES
    ),
    "paces: passes": ConstantFamily(("pace",), ({"FEW_PASSES": 2, "PASSES": 2}, {"FEW_PASSES": 16, "PASSES": 16})),
    "paces: work": ConstantFamily(("best_first",), ({"PACES": 0.0}, {"PACES": 1e7})),
    "paces: large families": ConstantFamily(("best_first",), ({"MOST_PACED": 0}, {"MOST_PACED": 10**9}, {"FAR": 1.1})),
    "paces: first one": ConstantFamily(("pace",), ({"AHEAD": 1.1}, {"AHEAD": 1.8})),
    "paces: steps": ConstantFamily(("pace",), ({"COARSE_STEP": 1.01}, {"COARSE_STEP": 1.15}, {"FINE_STEP": 1.03})),
    "paces: how far plans are simulated": ConstantFamily(("pace",), ({"NEAR": 1.0}, {"NEAR": 1.2})),
    "paces: more in flight": ConstantFamily(("pace",), ({"WAITING": 1.0}, {"WAITING": 1.2})),
    "depths: ahead of the pace": ConstantFamily(
        ("depths",), ({"AHEAD": (1.0,)}, {"AHEAD": (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)})
    ),
    "depths: steps between paces": ConstantFamily(("depths",), ({"FINER": 1.1}, {"FINER": 1.005})),
    "depths: rounds": ConstantFamily(("depths",), ({"ROUNDS": 1}, {"ROUNDS": 8})),
    "other schedules: work": ConstantFamily(
        ("other_schedules",), ({"ACTIONS_BESIDE": 0}, {"ACTIONS_BESIDE": 10_000}, {"ACTIONS_BESIDE": 400_000})
    ),
    "other schedules: micro-batches and shapes": ConstantFamily(
        ("other_schedules",), ({"FEWER_COUNTS": 1}, {"FEWER_COUNTS": 8}, {"SEEDS_BESIDE": 1}, {"SEEDS_BESIDE": 12})
    ),
    "depths: slopes": ConstantFamily(
        ("depths",), ({"SLOPES": (1.0,)}, {"SLOPES": (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0)})
    ),
}


@contextmanager
def instead(line: ConstantFamily, values: Mapping[str, Any]) -> Iterator[None]:
    """Give the constants other values for a while."""
    modules = [importlib.import_module(SEARCH + each) for each in line.modules]
    before = [(module, name, getattr(module, name)) for module in modules for name in values]
    for module, name, _ in before:
        setattr(module, name, values[name])
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def measured(line: ConstantFamily) -> list[dict[str, Any]]:
    """Return what every other value costs."""
    ratios: list[list[tuple[float, float, float]]] = [[] for _ in line.others]
    for name in line.instances:
        own = _planned(name)
        for at, values in enumerate(line.others):
            with instead(line, values):
                other = _planned(name)
            ratios[at].append((other[0] / own[0], other[1] / own[1], other[2] / own[2]))
    found = []
    for values, each in zip(line.others, ratios, strict=True):
        steps, bounds, seconds = zip(*each, strict=True)
        found.append(
            {
                "values": {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()},
                "step": round(statistics.mean(steps), 4),
                "step_at_most": round(max(steps), 4),
                "lower_bound": round(statistics.mean(bounds), 4),
                "processor_s": round(statistics.mean(seconds), 2),
            }
        )
    return found


def _planned(name: str) -> tuple[float, float, float]:
    """Return the step, the bound and the processor seconds of a plan."""
    made, seconds = timed(question(name))
    return made.predicted.step_s, made.predicted.lower_bound_s, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--only", default="", help="lines whose names hold this")
    parser.add_argument("--minutes", type=float, default=20.0, help="after which no further line is begun")
    arguments = parser.parse_args()
    watch, end_s = Watch(), time.monotonic() + 60 * arguments.minutes
    known: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.exists():
        known = json.loads(arguments.json.read_text())["lines"]
    for name, line in LINES.items():
        if arguments.only in name and name not in known and time.monotonic() < end_s:
            known[name] = measured(line)
            sys.stderr.write(f"{name}: {known[name]}\n")
            if arguments.json is not None:
                arguments.json.write_text(json.dumps({"lines": known}, indent=1) + "\n")
    ordered = {name: known[name] for name in LINES if name in known}
    watch.record({"instances": INSTANCES, "branches": BRANCHES, "lines": ordered}, arguments.json)


if __name__ == "__main__":
    main()
