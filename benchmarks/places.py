"""Does it matter how a cluster is listed, and is no plan behind those that stand on whole nodes?

    python benchmarks/places.py --json benchmarks/results/places.json
    python benchmarks/places.py --listed 0 --oracle 0 --only 8x4xV100

- ``listed``: random problems on up to three uneven nodes of up to three devices of two kinds, each planned twice, the
  second time with its devices, nodes and racks in another order. Stages, step, bound and alternatives are to be equal.
- ``oracle``: such problems of at most four layers, every third on one kind, in any order: an exact search finds the
  step of the fastest of all plans, each simulated where it stands, and no bound is above it.
- ``whole nodes``: layers of a Transformer on clusters of GPUs, with little and with much memory, with nothing, the
  optimizer's state or parameters sharded. Beside the best of equal stages that have whole nodes each stand the fastest
  plan that the search met, and the one that it returns, the simplest within 1 % of that.

Of a file that is there, the parts that are not run stay, each with its date.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "harness")]

# ruff: noqa: E402
from autopar.errors import InfeasibleError
from autopar.formats.cluster import Cluster
from autopar.formats.prediction import MetPlan
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions, plan
from autopar.planner.search.judge import NEAR, Met
from instances import instance
from listed import known, problem, relisted
from machine import Watch
from searched import agreed

CLUSTERS = {"8x8xH100": (64, 8), "16x8xH100": (128, 8), "32x8xH100": (256, 8), "8x4xV100": (32, 4)}
LAYERS, SEEDS = 32, (0, 1)
MEMORY = {"little": 1.0, "much": 4.0}
SHARDS = ("none", "optimizer", "parameters")
MOST_LAYERS = {4: 4, 5: 3, 9: 2}
"""By the most devices, of problems of which all plans are simulated."""
BEHIND = 1e-3
"""How far the fastest plan may be behind one on whole nodes; and the simplest, beyond NEAR, behind either."""
FIRST = 1000


class Whole(NamedTuple):
    """A problem on nodes that stages may fill."""

    name: str
    profile: Profile
    cluster: Cluster
    options: PlanOptions
    node: int


def main() -> None:
    arguments = _arguments()
    watch, found = Watch(), dict[str, Any]()
    if arguments.json and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())
        found = {name: kept[name] for name in ("listed", "oracle", "whole_nodes") if name in kept}
    ran = {"date": f"{date.today()}"}
    if arguments.listed:
        found["listed"] = ran | _listed(arguments.listed)
    if arguments.oracle:
        found["oracle"] = ran | _held_against_all(arguments.oracle)
    names = [name for name in CLUSTERS if arguments.only in (None, name)]
    if names and arguments.whole:
        found["whole_nodes"] = ran | _whole_nodes(names)
    watch.record(found, arguments.json)
    sys.exit(any(part["wrong"] for part in found.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--listed", type=int, default=100)
    parser.add_argument("--oracle", type=int, default=300)
    parser.add_argument("--whole", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only", choices=CLUSTERS)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _listed(count: int) -> dict[str, Any]:
    wrong = []
    for seed in range(FIRST, FIRST + count):
        profile, cluster = problem(seed)
        options = PlanOptions(gap=0.0 if seed % 3 == 0 else 0.02, exact=seed % 3 == 1)
        both = [plan(profile, each, options) for each in (cluster, relisted(cluster, seed))]
        if known(both[0]) != known(both[1]):
            wrong.append(seed)
        _tell(f"listed, seed {seed}: {both[0].predicted.step_s:.6g} s, wrong so far: {wrong}")
    return {"problems": count, "wrong": wrong}


def _held_against_all(count: int) -> dict[str, Any]:
    wrong, with_a_plan = [], 0
    for seed in range(FIRST, FIRST + count):
        kinds = 1 if seed % 3 == 0 else 2
        profile, cluster = problem(seed, kinds=kinds)
        # So that there are not too many plans.
        most = next(layers for devices, layers in MOST_LAYERS.items() if len(cluster.devices) <= devices)
        profile, cluster = problem(seed, most_layers=most, kinds=kinds)
        options = PlanOptions(gpus=len(cluster.devices), gap=0.0, recompute="none")
        try:
            with_a_plan += agreed(profile, relisted(cluster, seed), options, seed).fastest is not None
        except AssertionError as error:
            wrong.append({"seed": seed, "said": str(error)[:300]})
        _tell(f"oracle, seed {seed}, {len(profile.layers)} layers, {len(cluster.devices)} devices: {len(wrong)} wrong")
    return {"problems": count, "with_a_plan": with_a_plan, "wrong": wrong}


def _whole_nodes(names: list[str]) -> dict[str, Any]:
    rows = []
    for each in _problems(names):
        started_s, met = time.process_time(), list[MetPlan]()
        simplest_s = _step_s(each.profile, each.cluster, each.options, met.extend)
        took_s, counts = time.process_time() - started_s, len(each.cluster.devices)
        step_s = min((simplest_s, *(found.step_s for found in met)))
        best_s, best_stages = min(
            (_step_s(each.profile, each.cluster, _equal(each.options, stages)), stages)
            for stages in range(1, counts // each.node + 1)
            if counts % (stages * each.node) == 0
        )
        rows.append(
            {
                "problem": each.name,
                "step_s": step_s,
                "simplest_s": simplest_s,
                "cpu_s": round(took_s, 1),
                "whole_nodes_s": best_s,
                "whole_nodes_stages": best_stages,
                "behind": _behind(step_s, best_s),
                "simplest_behind": _behind(simplest_s, min(step_s, best_s)),
            }
        )
        _tell(
            f"{each.name}: {step_s:.6g} s, whole nodes {best_s:.6g} s ({best_stages} stages), behind "
            f"{rows[-1]['behind']:.2%}, simplest {rows[-1]['simplest_behind']:.2%}"
        )
    wrong = [row["problem"] for row in rows if row["behind"] > BEHIND or row["simplest_behind"] > NEAR + BEHIND]
    worst = {f"worst_{name}": max(row[name] for row in rows) for name in ("behind", "simplest_behind")}
    return {"problems": len(rows), **worst, "wrong": wrong, "rows": rows}


def _behind(step_s: float, other_s: float) -> float:
    return step_s / other_s - 1 if other_s < float("inf") else 0.0


def _problems(names: list[str]) -> Iterator[Whole]:
    for name in names:
        devices, node = CLUSTERS[name]
        for seed in SEEDS:
            profile, cluster, options = instance(seed, LAYERS, devices)
            nodes = [each.model_copy(update={"node": at // node}) for at, each in enumerate(cluster.devices)]
            cluster = cluster.model_copy(update={"devices": tuple(nodes)})
            for memory, times in MEMORY.items():
                for shard in SHARDS:
                    limit = int(times * (options.memory_bytes or 0))
                    asked = replace(options, memory_bytes=limit, shard=shard)
                    yield Whole(f"{name}, seed {seed}, {memory} memory, {shard}", profile, cluster, asked, node)


def _equal(options: PlanOptions, stages: int) -> PlanOptions:
    return replace(options, equal_widths=True, min_stages=stages, max_stages=stages)


def _step_s(profile: Profile, cluster: Cluster, options: PlanOptions, met: Met | None = None) -> float:
    try:
        return float(plan(profile, cluster, options, met=met).predicted.step_s)
    except InfeasibleError:
        return float("inf")


if __name__ == "__main__":
    main()
