"""Published profiles: what autopar finds on them, beside what other planners found.

    python benchmarks/published.py --data DIR --json benchmarks/results/published.json

The folder holds ``reference_numbers.csv``, ``pipedream/*.txt``, ``piper/bert32a100.json`` and ``dapple/*.txt``:
published profiles, and results and processor seconds of PipeDream's and Piper's planners on them.

``rows`` are those planners' own objectives, PipeDream's with the asynchronous pipeline that autopar's own cost model
calls quickest beside it, within 16 GB and without memory limit. ``steps`` are synchronous pipelines of DAPPLE's models
on 16 devices, with micro-batches that divide freely and without, and DAPPLE's plan in the same simulator: the fastest
plans that were found, as DAPPLE's are, and not simpler ones that are about as fast. Times of autopar's are processor
seconds of planning alone, the median of ``--repeats``.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.profile import Profile
from autopar.interop.pipedream import pipedream_profile
from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import Candidate
from autopar.planner.costs.model import CostModel
from autopar.planner.peers import dapple
from autopar.planner.peers.prices import Prices, trial
from autopar.planner.simulator.simulate import Simulator
from machine import Watch
from reproductions.pipedream import PipeDreamPlan, pipedream_plan
from reproductions.piper import PiperPlan, piper_plan
from reproductions.piper_files import PiperProfile, piper_profile
from reproductions.plans import planned_by_pipedream

GIB = 2**30
NO_LIMIT = 2**60
Plan = TypeVar("Plan")


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
# Model, samples per micro-batch, micro-batches per step.
STEPS = (("vgg-19-pbs-32", 32, 64), ("bert-48-pbs-2", 2, 32), ("xlnet-36-pbs-1", 1, 128))
BANDWIDTHS = (3e9, 1.25e9)


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
    throughput: Throughput | None = None


class Throughput(NamedTuple):
    """The quickest asynchronous pipeline by autopar's cost model; seconds per mini-batch."""

    seconds: float
    cpu_s: float
    plan: str
    without_memory_limit_s: float
    of_pipedreams_plan_s: float
    """What PipeDream's plan takes by the same prices."""


class Step(NamedTuple):
    """One synchronous pipeline: seconds per step."""

    model: str
    micro_batches: int
    bytes_per_s: float
    divisible: bool
    lower_bound_s: float
    step_s: float
    gap: float
    cpu_s: float
    plan: str
    dapple_s: float | None
    dapple_over_autopar: float | None
    dapple_cpu_s: float
    dapple_plan: str | None


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
        throughput = result.throughput and result.throughput._asdict()
        results.append({**result._asdict(), "throughput": throughput})
    steps = []
    for step in stepped(arguments.data, arguments.repeats):
        rows, theirs_s = "freely divided" if step.divisible else "whole rows", step.dapple_s or float("inf")
        sys.stderr.write(
            f"{step.model:14} {step.bytes_per_s / 1e9:4} GB/s, {rows:14} {step.step_s:.4f} s, bound "
            f"{step.lower_bound_s:.4f} s ({step.gap:.1%}), {step.cpu_s:.2f} s of a processor; DAPPLE {theirs_s:.4f} s\n"
        )
        steps.append(step._asdict())
    watch.record({"repeats": arguments.repeats, "rows": results, "steps": steps}, arguments.json)


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
    found, cpu_s = _timed(lambda: pipedream_plan(profile, cluster), repeats)
    stages = " ".join(f"[{stage.first},{stage.stop})x{stage.replicas}" for stage in found.stages)
    return _result(row, found, cpu_s, stages)._replace(throughput=_throughput(profile, cluster, repeats))


def _throughput(profile: Profile, cluster: Cluster, repeats: int) -> Throughput:
    options = PlanOptions(objective="throughput")
    made, cpu_s = _timed(lambda: plan(profile, cluster, options), repeats)
    free = plan(profile, cluster, replace(options, memory_bytes=NO_LIMIT))
    stages, first = [], 0
    for stage in made.stages:
        turns = " in turns" if stage.division == "round-robin" else ""
        stages.append(f"[{first},{first + len(stage.layers)})x{stage.replicas}{turns}")
        first += len(stage.layers)
    theirs = planned_by_pipedream(profile, cluster, PlanOptions()).predicted.step_s
    return Throughput(made.predicted.step_s, round(cpu_s, 4), " ".join(stages), free.predicted.step_s, theirs)


def stepped(folder: Path, repeats: int) -> Iterator[Step]:
    """Yield a result for every synchronous pipeline, first those whose micro-batches divide freely."""
    for divisible in (True, False):
        for name, rows, micro_batches in STEPS:
            path = folder / "dapple" / f"{name}.txt"
            profile = pipedream_profile(path.read_text(), path, rows)
            for bytes_per_s in BANDWIDTHS:
                options = PlanOptions(
                    batch=rows * micro_batches,
                    memory_bytes=NO_LIMIT,
                    bytes_per_s=bytes_per_s,
                    micro_batches=micro_batches,
                    divisible=divisible,
                    exact=True,
                )
                yield _step(name, profile, options, repeats)


def _step(name: str, profile: Profile, options: PlanOptions, repeats: int) -> Step:
    cluster = cluster_of(Topology(1, 16, 1e9, 1e9))
    made, cpu_s = _timed(lambda: plan(profile, cluster, options), repeats)
    (theirs, dapple_s), dapple_cpu_s = _timed(lambda: _dapple(profile, cluster, options), 1)
    step_s, bound_s = made.predicted.step_s, made.predicted.lower_bound_s
    stages, first = [], 0
    for stage in made.stages:
        stages.append(f"{first}-{first + len(stage.layers) - 1}:{stage.replicas}")
        first += len(stage.layers)
    return Step(
        model=name,
        micro_batches=made.micro_batches,
        bytes_per_s=options.bytes_per_s or 0.0,
        divisible=options.divisible,
        lower_bound_s=bound_s,
        step_s=step_s,
        gap=step_s / bound_s - 1,
        cpu_s=round(cpu_s, 4),
        plan=",".join(stages),
        dapple_s=dapple_s,
        dapple_over_autopar=None if dapple_s is None else dapple_s / step_s,
        dapple_cpu_s=round(dapple_cpu_s, 4),
        dapple_plan=None if theirs is None else theirs.text(),
    )


def _dapple(profile: Profile, cluster: Cluster, options: PlanOptions) -> tuple[Candidate | None, float | None]:
    """Return DAPPLE's plan, in whichever of its two depths is faster, and its simulated seconds."""
    costs = CostModel(profile, cluster, options)
    simulator, count = Simulator(costs), options.micro_batches or 1
    found = trial(simulator, "DAPPLE", "1f1b", [count], dapple.propose(Prices(costs, count)))
    return (None, None) if found.step_s is None else (found.candidate, found.step_s)


def _piper(row: dict[str, str], folder: Path, repeats: int) -> Result:
    # Its gigabytes of memory, and those per second that it was run with, are 2**30 bytes.
    devices, memory = map(int, re.findall(r"\d+", row["setting"])[:2])
    cluster = cluster_of(Topology(1, devices, 25 * GIB, 25 * GIB), memory * GIB)
    profile = _bert(folder)
    found, cpu_s = _timed(lambda: piper_plan(profile, cluster), repeats)
    stages = "".join(
        f"[{stage.stop - stage.first}n d{stage.replicas} t{stage.tensor_parallel} ar{sum(stage.recompute)}]"
        for stage in found.stages
    )
    return _result(row, found, cpu_s, stages)


def _bert(folder: Path) -> PiperProfile:
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
        found = find()
        seconds.append(time.process_time() - began_s)
    return found, statistics.median(seconds)


def _result(row: dict[str, str], found: PipeDreamPlan | PiperPlan, cpu_s: float, stages: str) -> Result:
    reference_s = float(row["value"])
    return Result(
        planner=row["planner"],
        model=row["model"],
        setting=row["setting"],
        reference_s=reference_s,
        autopar_s=found.bottleneck_s,
        difference=found.bottleneck_s / reference_s - 1,
        reference_cpu_s=float(row["cpu_s"]),
        autopar_cpu_s=round(cpu_s, 4),
        plan=stages,
    )


if __name__ == "__main__":
    main()
