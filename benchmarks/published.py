"""PipeDream's and Piper's own objectives: what autopar finds, beside what their planners found.

    python benchmarks/published.py --data DIR --json benchmarks/results/published.json

The folder holds ``reference_numbers.csv``, ``pipedream/*.txt`` and ``piper/bert32a100.json``: published profiles, and
results and processor seconds of those systems' planners on them. Times of autopar's are processor seconds of the search
alone, the median of ``--repeats``.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from machine import Watch

from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.profile import Profile
from autopar.interop.pipedream import pipedream_profile
from autopar.interop.piper import piper_profile
from autopar.planner.objectives.pipedream import PipeDreamPlan, pipedream_plan
from autopar.planner.objectives.piper import PiperPlan, piper_plan

GIB = 2**30
Plan = TypeVar("Plan", PipeDreamPlan, PiperPlan)


class Topology(NamedTuple):
    """Nodes, devices of each, and bandwidths inside and between them."""

    nodes: int
    per_node: int
    node: float
    network: float


# Settings of the reference as it names them.
TOPOLOGIES = {
    "4 (": Topology(1, 4, 1e9, 1e9),
    "16 flat": Topology(1, 16, 1e9, 1e9),
    "A 4x4": Topology(4, 4, 10e9, 1.25e9),
    "B 8x2": Topology(2, 8, 25e9, 3.125e9),
}


class Result(NamedTuple):
    """One row: seconds per mini-batch or micro-batch, and processor seconds."""

    planner: str
    model: str
    setting: str
    reference_s: float
    autopar_s: float
    difference: float
    """Of autopar's, relative to the reference."""
    reference_cpu_s: float
    autopar_cpu_s: float
    plan: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the published profiles")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch, results = Watch(), []
    for result in compared(arguments.data, arguments.repeats):
        sys.stderr.write(
            f"{result.planner:9} {result.model:8} {result.setting[:24]:24} {result.reference_s:.8f} s, autopar "
            f"{result.autopar_s:.8f} s ({result.difference:+.1e}); {result.reference_cpu_s:7.2f} s of a processor, "
            f"autopar {result.autopar_cpu_s:.2f} s\n"
        )
        results.append(result._asdict())
    text = json.dumps({**watch.describe(), "repeats": arguments.repeats, "rows": results}, indent=1)
    sys.stdout.write(text + "\n")
    if arguments.json:
        arguments.json.write_text(text + "\n")


def compared(folder: Path, repeats: int) -> Iterator[Result]:
    """Yield a result for every row of the reference whose objective is autopar's: communication counted."""
    with (folder / "reference_numbers.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["planner"] == "piper":
            yield _piper(row, folder, repeats)
        elif row["setting"].endswith(" PPcomm"):
            yield _pipedream(row, folder, repeats)


def _pipedream(row: dict[str, str], folder: Path, repeats: int) -> Result:
    path = folder / "pipedream" / f"{row['model']}.txt"
    profile = pipedream_profile(path.read_text(), path)
    cluster = cluster_of(next(each for name, each in TOPOLOGIES.items() if row["setting"].startswith(name)))
    plan, cpu_s = _timed(lambda: pipedream_plan(profile, cluster), repeats)
    stages = " ".join(f"[{stage.first},{stage.stop})x{stage.replicas}" for stage in plan.stages)
    return _result(row, plan, cpu_s, stages)


def _piper(row: dict[str, str], folder: Path, repeats: int) -> Result:
    # Its gigabytes of memory, and those per second that it was run with, are 2**30 bytes.
    devices, memory = map(int, re.findall(r"\d+", row["setting"])[:2])
    cluster = cluster_of(Topology(1, devices, 25 * GIB, 25 * GIB), memory * GIB)
    profile = _bert(folder)
    plan, cpu_s = _timed(lambda: piper_plan(profile, cluster), repeats)
    stages = "".join(
        f"[{stage.stop - stage.first}n d{stage.replicas} t{stage.tensor_parallel} ar{sum(stage.recompute)}]"
        for stage in plan.stages
    )
    return _result(row, plan, cpu_s, stages)


def _bert(folder: Path) -> Profile:
    path = folder / "piper" / "bert32a100.json"
    return piper_profile(path.read_text(), path)


def cluster_of(topology: Topology, memory_bytes: int = 16 * 10**9) -> Cluster:
    """Return equal nodes with links of no latency."""
    nodes = [node for node in range(topology.nodes) for _ in range(topology.per_node)]
    return Cluster(
        devices=tuple(Device(type="cuda", memory_bytes=memory_bytes, node=node) for node in nodes),
        links=(
            Link(level="node", latency_s=0.0, bytes_per_s=topology.node),
            Link(level="network", latency_s=0.0, bytes_per_s=topology.network),
        ),
    )


def _timed(find: Callable[[], Plan], repeats: int) -> tuple[Plan, float]:
    seconds = []
    for _ in range(repeats):
        began_s = time.process_time()
        plan = find()
        seconds.append(time.process_time() - began_s)
    return plan, statistics.median(seconds)


def _result(row: dict[str, str], plan: PipeDreamPlan | PiperPlan, cpu_s: float, stages: str) -> Result:
    reference_s = float(row["value"])
    return Result(
        planner=row["planner"],
        model=row["model"],
        setting=row["setting"],
        reference_s=reference_s,
        autopar_s=plan.bottleneck_s,
        difference=plan.bottleneck_s / reference_s - 1,
        reference_cpu_s=float(row["cpu_s"]),
        autopar_cpu_s=round(cpu_s, 4),
        plan=stages,
    )


if __name__ == "__main__":
    main()
