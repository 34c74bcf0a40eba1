"""How long does a step of 1,024 ranks take to simulate? Many actions at once, action by action, and with contention.

    python benchmarks/simulator.py --json benchmarks/results/simulator.json

Chains of lognormal stages on 128 nodes of eight H100 with 400 Gbit/s each, with as many replicas each, or drawn from
one to eight with unequal shares. `levels` takes all actions of a level at once, with what lays them out; `plain` goes
action by action, once the program is expanded. `network` is that cluster, whose nodes share a port among eight; in
`everywhere`, links inside nodes are half-duplex besides, so that every message may meet others; `overlap` adds
slow-downs of computing and communicating. Every case runs in a process of its own. Seconds are of the process' own CPU
time on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from autopar.formats.cluster import Cluster, Overlap
from autopar.formats.plan import Plan
from autopar.formats.stage import Crossing, Stage
from autopar.hardware.clusters import cluster_named
from autopar.ownership import Replicas, meetings
from autopar.planner.candidate import Candidate, Family, place, with_depths
from autopar.planner.costs.communication import LinkModel, Sharing
from autopar.planner.costs.durations import Durations
from autopar.planner.simulator.simulate import action_levels, compile_rows, run, simulate_levels
from autopar.schedules import SCHEDULES
from autopar.schedules.expand import expand

T = TypeVar("T")
ROWS = 8
FORWARD_S = 1e-3
RANKS = 1024
SHAPES = ((1, "PA"), (1, "PB"), (8, "PA"), (8, "PB"), (0, "PA"), (0, "PB"))
"""Replicas of every stage, 0 where they are drawn; and depths."""


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
    watch.record({"cases": cases}, arguments.json)


def _apart(index: int, micro_batches: int) -> dict[str, object]:
    command = [sys.executable, __file__, "--case", str(index), "--micro-batches", str(micro_batches)]
    found: dict[str, object] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    sys.stderr.write(f"{found}\n")
    return found


def _case(replicas: int, depth: str, micro_batches: int) -> dict[str, object]:
    cluster = cluster_named(f"{RANKS // 8}x8xH100:400Gbps")
    candidate = _candidate(_widths(replicas), depth, micro_batches)
    times = _durations(candidate, LinkModel(cluster, cluster.devices))
    program, expanded_s = _timed(lambda: expand(_plan(candidate)))
    rows, compiled_s = _timed(lambda: compile_rows(program, times))
    found: dict[str, object] = {"stages": len(candidate.stages), "replicas": replicas or "1 to 8", "depth": depth}
    found |= {"micro_batches": micro_batches, "actions": sum(map(len, rows))}
    found |= {"expand_s": round(expanded_s + compiled_s, 2)}
    ways: dict[str, Callable[[], float]] = {
        "levels": lambda: _at_once(candidate, times),
        "plain": lambda: run(rows, times),
    }
    for name, shared in _clusters(cluster).items():
        sharing = Sharing.of(shared, cluster.devices)
        ways[name] = lambda sharing=sharing: run(rows, times, sharing)
    for name, way in ways.items():
        step_s, seconds = _timed(way)
        found |= {f"{name}_s": round(seconds, 3), f"{name}_step_s": step_s}
    return found | {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _at_once(candidate: Candidate, times: Durations) -> float:
    levels = action_levels(candidate)
    step_s = None if levels is None else simulate_levels(candidate, times, (), levels)
    assert step_s is not None
    return step_s


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


def _widths(replicas: int) -> list[int]:
    if replicas:
        return [replicas] * (RANKS // replicas)
    rng = random.Random(0)
    found: list[int] = []
    while sum(found) < RANKS:
        found.append(min(rng.randint(1, 8), RANKS - sum(found)))
    return found


def _candidate(widths: Sequence[int], depth: str, micro_batches: int) -> Candidate:
    family = Family(micro_batches, ROWS, "1f1b")
    depths = SCHEDULES["1f1b"].warmups(len(widths), 1, micro_batches)[depth]
    return with_depths(family, place(family, range(1, len(widths) + 1), map(Replicas, widths)), depths)


def _durations(candidate: Candidate, links: LinkModel) -> Durations:
    """Lognormal stages, replicas of which take as long as their shares are large; messages as the curves say."""
    rng = random.Random(0)
    times = Durations(0.0)
    for index, stage in enumerate(candidate.stages):
        forward_s, reduced_bytes = FORWARD_S * rng.lognormvariate(0.0, 0.5), 2**20 * rng.randint(1, 64)
        level, count = links.level(stage.devices), len(stage.devices)
        # A ring's, of two rounds.
        reduce_s = links.message_s(2 * (count - 1) * reduced_bytes // count, level) if count > 1 else 0.0
        columns = (times.forward_s, times.backward_s, times.exposed_s, times.reduce_s, times.update_s)
        for share in stage.shares:
            own_s = forward_s * share / max(stage.shares)
            times.stage.append(index)
            for column, seconds in zip(columns, (own_s, 2 * own_s, reduce_s / 4, reduce_s, 1e-4), strict=True):
                column.append(seconds)
    for before, after in pairwise(candidate.stages):
        bytes_per_sample = rng.randint(4, 16) * 2**20
        for sender, receiver, samples in meetings(before, after):
            ends = before.devices[sender], after.devices[receiver]
            size_bytes = bytes_per_sample * samples.rows
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
