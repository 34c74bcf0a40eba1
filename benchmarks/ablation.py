"""Ablation: which parts of the search find plans or bounds that the rest does not?

    python benchmarks/ablation.py --json benchmarks/results/ablation.json [--every 7] [--variants usual,no-paces]
    python benchmarks/ablation.py --constants [--every 7]

Planned are the instances of medium.py, with ``--exact``, chains of scale.py and the published pipelines (``--data``):
as usual, and with a part of the search left out, or a constant of it halved or doubled. Recorded are step, bound and
processor seconds; the summary has by how much each variant's plans are slower, and its bounds lower. What is recorded
already is kept: run it again to go on where it ended.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import medium
import published
import same_plans
from autopar.interop.pipedream import pipedream_profile
from autopar.planner import PlanOptions, plan
from autopar.planner.bounds import work_s
from autopar.planner.search.best_first import SearchResult
from instances import instance
from machine import Watch

SEARCH = "autopar.planner.search."
ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-6
"""Steps and bounds that differ by less are one."""

Swaps = Sequence[tuple[str, str, Any]]
"""A module or a class in it, the name there, and what stands in its place."""


def _no_tables(self: Any, *_: Any) -> Any:  # noqa: ANN401
    """Search nothing; no plan takes less than its work."""
    least_s = min(work_s(self.costs, family) for family in self.families)
    return SearchResult(min(least_s, self.best.step_s), float("inf"), {})


_LEVELS = importlib.import_module("autopar.planner.simulator.simulate").action_levels


def _round_trips_alone(self: Any, trip_s: Any, *_: Any) -> Any:  # noqa: ANN401
    return self._paces.micro_batches * trip_s / (self.beside_s + trip_s)


def _levels_of_one(candidate: Any) -> Any:  # noqa: ANN401
    return None if any(stage.period > 1 for stage in candidate.stages) else _LEVELS(candidate)


VARIANTS: dict[str, Swaps] = {
    "usual": (),
    "no tables, paces or heap": ((SEARCH + "best_first:Search", "go", _no_tables),),
    "no heap": ((SEARCH + "best_first", "EXPANSIONS", 0),),
    "no paces": ((SEARCH + "pace:FamilySearch", "try_paces", lambda _: None),),
    "no round trips": ((SEARCH + "pace:FamilySearch", "_round_trips_s", lambda _, cap_s, lower_s: lower_s),),
    "no caps": ((SEARCH + "pace", "CAPS", 0), (SEARCH + "pace", "FEW_CAPS", 0)),
    "nothing before a state": (
        (
            SEARCH + "tables:RoundTrips",
            "_before",
            lambda self, first, stop, each: np.zeros((len(each), self._layers + 1)),
        ),
        (SEARCH + "tables", "PRICES", (0.0,)),
    ),
    "one price of devices": ((SEARCH + "tables", "PRICES", (0.0,)),),
    "no prefixes of round trips": (
        (SEARCH + "tables:SuffixTables", "_prefixes", lambda self: np.zeros(self.stages.layers + 1)),
    ),
    "no levels of turns": (("autopar.planner.simulator.simulate", "action_levels", _levels_of_one),),
    "no peers": (("autopar.planner.plan", "peers", lambda *_, **__: []),),
    "no even splits": (("autopar.planner.plan", "judge_even_splits", lambda *_: None),),
    "no local moves": (("autopar.planner.plan", "search_locally", lambda *_: None),),
    "no moves of equal widths": ((SEARCH + "local", "EQUAL", 0.0),),
    "no sideways moves": ((SEARCH + "local", "SIDEWAYS", 0.0),),
    "nothing waits": ((SEARCH + "pace:PacePlan", "_in_flight_when_waiting", _round_trips_alone),),
    "gradients as known": ((SEARCH + "pace:PacePlan", "_passing", lambda _, in_flight, period, after: in_flight),),
    "no deepening": ((SEARCH + "local:LocalSearch", "deepen", lambda *_: None),),
    "no layers passed on": ((SEARCH + "moves", "layers_passed", lambda *_: iter(())),),
    "no stages joined or divided": (
        (SEARCH + "moves", "stages_joined", lambda *_: iter(())),
        (SEARCH + "moves", "stages_divided", lambda *_: iter(())),
    ),
    "no replicas changed": ((SEARCH + "moves", "replicas_changed", lambda *_: iter(())),),
    "no steady depths": ((SEARCH + "depths", "_steady_depths", lambda *_: ()),),
    "no depths by round trips": ((SEARCH + "depths:_Pacing", "round_trip_vectors", lambda _: []),),
    "no depths by paces": ((SEARCH + "depths:_Pacing", "vectors", lambda _: []),),
    "one pace of depths": ((SEARCH + "depths", "AHEAD", (1.0,)),),
    "stages of any length": ((SEARCH + "depths:DepthLimits", "reach", lambda self, _: self.layers),),
    "memory that may bind": ((SEARCH + "depths:DepthLimits", "binding", lambda *_: True),),
    "no caps of stages": ((SEARCH + "tables:CappedStages", "next", lambda self, first: self._stages.next(first)),),
    "passes of paces halved": ((SEARCH + "pace", "FEW_PASSES", 4), (SEARCH + "pace", "PASSES", 4)),
    "even splits, few": ((SEARCH + "local", "JUDGED", 8),),
    "few tries": ((SEARCH + "local", "TRIES", 12),),
    "one seed": ((SEARCH + "local", "SEEDS", 1),),
    "no coarse tables": ((SEARCH + "best_first", "MOST_FINE", float("inf")),),
    "cluster order": (("autopar.planner.pool", "_MOST_WORK", 0),),
}


def constants() -> Iterator[tuple[str, str, Any]]:
    """Yield module, name and value of every number of the search, or of numbers that belong together."""
    for path in sorted((ROOT / "planner" / "search").glob("*.py")):
        module = SEARCH + path.stem
        for each in ast.parse(path.read_text()).body:
            if isinstance(each, ast.Assign):
                (target,) = each.targets
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                for name in names:
                    value = getattr(importlib.import_module(module), name.id) if isinstance(name, ast.Name) else None
                    if isinstance(name, ast.Name) and name.id.lstrip("_").isupper() and _scaled(value, 2) is not None:
                        yield module, name.id, value


def _scaled(value: Any, times: float) -> Any:  # noqa: ANN401
    """Return a number, or each of several, times a factor; None of what has none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return max(1, round(value * times))
    if isinstance(value, float):
        # What lies near one, as a step from one pace to the next does, is moved away from it.
        return 1 + (value - 1) * times if 0.5 < value < 1.6 else value * times
    if isinstance(value, tuple) and all(isinstance(each, int | float) for each in value):
        return tuple(_scaled(each, times) for each in value)
    return None


def _everywhere(module: str, name: str, value: Any) -> Swaps:  # noqa: ANN401
    """Return the swaps of a constant wherever it was imported to."""
    found = [(module, name, value)]
    for other, loaded in list(sys.modules.items()):
        if other.startswith("autopar.planner.") and other != module and loaded.__file__ is not None:
            for each in ast.parse(Path(loaded.__file__).read_text()).body:
                if isinstance(each, ast.ImportFrom) and each.module == module:
                    found += [(other, name, value) for one in each.names if one.name == name]
    return found


@contextmanager
def swapped(swaps: Swaps) -> Iterator[None]:
    """Put other things in the places of names of the planner."""
    before = []
    for place, name, value in swaps:
        # `autopar.planner.plan` is a function that shadows its module.
        module, _, owner = place.partition(":")
        target = importlib.import_module(module)
        target = getattr(target, owner) if owner else target
        before.append((target, name, getattr(target, name)))
        setattr(target, name, value)
    try:
        yield
    finally:
        for target, name, value in before:
            setattr(target, name, value)


def questions(every: int, data: Path | None) -> dict[str, Callable[[], medium.Question]]:
    """Return what makes the questions, by their names."""
    found = {name: partial(medium.question, name) for name in medium.names()[::every]}
    for seed, layers, devices in same_plans.CHAINS:
        found[f"chain {seed} {layers}x{devices}"] = partial(_chain, seed, layers, devices)
    if data is not None:
        for model, rows, micro_batches in published.STEPS:
            found[f"{model} {rows}x{micro_batches}"] = partial(_published, data, model, rows, micro_batches)
    return found


def _published(data: Path, model: str, rows: int, micro_batches: int) -> medium.Question:
    path = data / "dapple" / f"{model}.txt"
    options = PlanOptions(
        batch=rows * micro_batches,
        memory_bytes=published.NO_LIMIT,
        bytes_per_s=published.BANDWIDTHS[0],
        micro_batches=micro_batches,
        exact=True,
    )
    cluster = published.cluster_of(published.Topology(1, 16, 1e9, 1e9))
    return medium.Question(model, pipedream_profile(path.read_text(), path, rows), cluster, options)


def _chain(seed: int, layers: int, devices: int) -> medium.Question:
    made = instance(seed, layers, devices, repeated=True)
    return medium.Question("chain", made.profile, made.cluster, replace(made.options, exact=True))


def measured(asked: medium.Question, swaps: Swaps) -> dict[str, Any]:
    """Return what is recorded of a question under a variant."""
    with swapped(swaps):
        began = time.process_time()
        made = plan(asked.profile, asked.cluster, asked.options)
        seconds = time.process_time() - began
    stages = [(each.layers, each.devices, each.warmup, each.recompute) for each in made.stages]
    return {
        "step_s": made.predicted.step_s,
        "lower_bound_s": made.predicted.lower_bound_s,
        "processor_s": round(seconds, 2),
        "plan": hashlib.sha256(repr(stages).encode()).hexdigest()[:8],
    }


def differences(usual: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return by how much plans are slower, and bounds lower, than usual."""
    both = [name for name in usual if name in other]
    slower = {each: other[each]["step_s"] / usual[each]["step_s"] - 1 for each in both}
    lower = {each: 1 - other[each]["lower_bound_s"] / usual[each]["lower_bound_s"] for each in both}
    ratios = [other[each]["processor_s"] / usual[each]["processor_s"] for each in both]
    return {
        "instances": len(both),
        "processor_s": statistics.median(ratios),
        "slower": {each: round(by, 6) for each, by in slower.items() if abs(by) > TOLERANCE},
        "lower": {each: round(by, 6) for each, by in lower.items() if abs(by) > TOLERANCE},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/ablation.json"))
    parser.add_argument("--every", type=int, default=7, help="of medium.py's instances")
    parser.add_argument("--only", default="", help="names of questions, with commas between")
    parser.add_argument("--variants", default="", help="names, with commas between; all where none is given")
    parser.add_argument("--constants", action="store_true", help="halve and double the search's constants instead")
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no further question is begun")
    parser.add_argument("--data", type=Path, help="folder of the published profiles")
    arguments = parser.parse_args()
    watch, end_s = Watch(), time.monotonic() + 60 * arguments.minutes
    found: dict[str, dict[str, Any]] = {}
    if arguments.json.exists():
        found = json.loads(arguments.json.read_text())["found"]
    variants = dict(VARIANTS)
    if arguments.constants:
        variants = {
            f"{module.removeprefix(SEARCH)}.{name} x {times:g}": _everywhere(module, name, _scaled(value, times))
            for module, name, value in constants()
            for times in (0.5, 2.0)
        }
    wanted = arguments.variants.split(",") if arguments.variants else list(variants)
    only = arguments.only.split(",") if arguments.only else None
    every = questions(1 if only else arguments.every, arguments.data)
    for question, make in every.items() if only is None else ((name, every[name]) for name in only):
        left = [each for each in wanted if question not in found.get(each, {})]
        asked = make() if left else None
        for name in left:
            if asked is None or time.monotonic() > end_s:
                break
            one = measured(asked, variants[name])
            found.setdefault(name, {})[question] = one
            usual = found.get("usual", {}).get(question)
            if usual is not None and name != "usual":
                by, lower = one["step_s"] / usual["step_s"] - 1, 1 - one["lower_bound_s"] / usual["lower_bound_s"]
                ratio = one["processor_s"] / usual["processor_s"]
                sys.stderr.write(f"{question}, {name}: {by:+.3%} slower, bound {lower:.3%} lower, {ratio:.2f}\n")
            arguments.json.write_text(json.dumps({"found": found}, indent=1) + "\n")
    summary = {each: differences(found["usual"], found[each]) for each in found if each != "usual"}
    watch.record({"summary": summary, "found": found}, arguments.json)


if __name__ == "__main__":
    main()
