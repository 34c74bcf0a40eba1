"""How long does a step of 1,024 ranks take to simulate? All stages at once, action by action, and with contention.

    python benchmarks/simulator.py --json benchmarks/results/simulator.json

Chains of lognormal stages on 128 nodes of eight H100 with 400 Gbit/s each. `network` is that cluster, whose nodes share
a port among eight; in `everywhere`, links inside nodes are half-duplex besides, so that every message may meet others;
`overlap` adds slow-downs of computing and communicating. Every case runs in a process of its own. Seconds are of the
process' own CPU time on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from autopar.formats.cluster import Cluster, Overlap
from autopar.formats.plan import Crossing, Plan, Stage
from autopar.hardware.clusters import cluster_named
from autopar.planner.candidate import Candidate, Placed
from autopar.planner.durations import Durations
from autopar.planner.links import LinkModel
from autopar.planner.sharing import Sharing, Traffic
from autopar.planner.simulate import compile_rows, run
from autopar.planner.wave import ride, wave_of
from autopar.schedules import SCHEDULES
from autopar.schedules.expand import expand
from autopar.schedules.route import even_shares

T = TypeVar("T")
ROWS = 8
FORWARD_S = 1e-3
SHAPES = ((1024, 1, "PA"), (1024, 1, "PB"), (128, 8, "PA"), (128, 8, "PB"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--micro-batches", type=int, default=512)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        sys.stdout.write(json.dumps(_case(*SHAPES[arguments.case], arguments.micro_batches)))
        return
    # Imports torch, which a case's memory should not count.
    from machine import Watch

    watch = Watch()
    cases = [_apart(index, arguments.micro_batches) for index in range(len(SHAPES))]
    text = json.dumps({**watch.describe(), "cases": cases}, indent=1)
    sys.stdout.write(text + "\n")
    if arguments.json:
        arguments.json.write_text(text + "\n")


def _apart(index: int, micro_batches: int) -> dict[str, object]:
    command = [sys.executable, __file__, "--case", str(index), "--micro-batches", str(micro_batches)]
    found: dict[str, object] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    sys.stderr.write(f"{found}\n")
    return found


def _case(stages: int, replicas: int, depth: str, micro_batches: int) -> dict[str, object]:
    cluster = cluster_named(f"{stages * replicas // 8}x8xH100:400Gbps")
    candidate = _candidate(stages, replicas, depth, micro_batches)
    times = _durations(candidate, LinkModel(cluster, cluster.devices))
    program, expanded_s = _timed(lambda: expand(_plan(candidate)))
    rows, compiled_s = _timed(lambda: compile_rows(program))
    wave = wave_of(candidate, times, [])
    assert wave is not None
    found: dict[str, object] = {"stages": stages, "replicas": replicas, "depth": depth, "micro_batches": micro_batches}
    found |= {"actions": sum(map(len, rows)), "expand_s": round(expanded_s + compiled_s, 2)}
    devices = tuple(range(stages * replicas))
    ways: dict[str, Callable[[], float]] = {"wave": lambda: ride(wave), "plain": lambda: run(rows, times)}
    for name, shared in _clusters(cluster).items():
        traffic = Traffic(Sharing.of(shared, cluster.devices), devices)
        ways[name] = lambda traffic=traffic: run(rows, times, traffic)
    for name, way in ways.items():
        step_s, seconds = _timed(way)
        found |= {f"{name}_s": round(seconds, 3), f"{name}_step_s": step_s}
    return found | {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    begun = time.process_time()
    found = call()
    return found, time.process_time() - begun


def _clusters(cluster: Cluster) -> dict[str, Cluster]:
    links = tuple(
        link.model_copy(update={"duplex": "half"}) if link.level == "node" else link for link in cluster.links
    )
    overlaps = tuple(Overlap(level=link.level, compute=1.1, communication=1.2) for link in links)
    everywhere = cluster.model_copy(update={"links": links})
    overlapping = cluster.model_copy(update={"overlaps": overlaps})
    return {"network": cluster, "everywhere": everywhere, "overlap": overlapping}


def _candidate(stages: int, replicas: int, depth: str, micro_batches: int) -> Candidate:
    depths = SCHEDULES["1f1b"].warmups(stages, micro_batches)[depth]
    placed = tuple(
        Placed(
            index, index + 1, tuple(range(index * replicas, (index + 1) * replicas)), even_shares(ROWS, replicas), each
        )
        for index, each in enumerate(depths)
    )
    return Candidate(micro_batches, ROWS, "1f1b", placed)


def _durations(candidate: Candidate, links: LinkModel) -> Durations:
    """Lognormal stages, all replicas of which take as long; messages as the cluster's curves say."""
    rng = random.Random(0)
    times = Durations(0.0)
    for index, stage in enumerate(candidate.stages):
        forward_s, reduced_bytes = FORWARD_S * rng.lognormvariate(0.0, 0.5), 2**20 * rng.randint(1, 64)
        level, count = links.level(stage.devices), len(stage.devices)
        # A ring's, of two rounds.
        reduce_s = links.message_s(2 * (count - 1) * reduced_bytes // count, level) if count > 1 else 0.0
        columns = (times.stage, times.forward_s, times.backward_s, times.exposed_s, times.reduce_s, times.update_s)
        for column, value in zip(columns, (index, forward_s, 2 * forward_s, reduce_s / 4, reduce_s, 1e-4), strict=True):
            column.extend([value] * count)  # type: ignore[list-item]
    for before, after in pairwise(candidate.stages):
        size_bytes = rng.randint(4, 16) * 2**20 * ROWS // len(before.devices)
        for ends in zip(before.devices, after.devices, strict=True):
            times.message_s[ends] = times.message_s[ends[::-1]] = links.message_s(size_bytes, links.level(ends))
    return times


def _plan(candidate: Candidate) -> Plan:
    """What a program is expanded from; a plan's other fields do not matter to it."""
    return Plan.model_construct(
        schedule=candidate.schedule,
        micro_batches=candidate.micro_batches,
        micro_batch_size=candidate.micro_batch_size,
        stages=tuple(
            Stage.model_construct(devices=stage.devices, shares=stage.shares, warmup=stage.warmup)
            for stage in candidate.stages
        ),
        tensors=tuple(
            Crossing.model_construct(producer=stage, consumers=(stage + 1,), gradient=True)
            for stage in range(len(candidate.stages) - 1)
        ),
        tied=(),
    )


if __name__ == "__main__":
    main()
