"""The cases of `benchmarks/runtime.py` whose layers sleep."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import DeviceKind
from autopar.profiler import local_cluster
from autopar.profiler.probe import Probe
from autopar.ranks.monitor import Watch
from autopar.ranks.pool import RankPool
from autopar.schedules import SCHEDULES
from cut import cut
from emulation import free_links, later, predicted_s, profile_of
from race import Field
from score import Laps, row
from sleeping import Pace, graph_of, user_of

__all__ = ["delayed_rows", "emulated_rows", "unequal_rows"]

RANKS, MICRO_BATCHES, ROWS = 8, 32, 4
SPEEDS = {"20/40 ms, 1 MB": (20e-3, 40e-3, 2**20), "5/10 ms, 64 KB": (5e-3, 10e-3, 2**16)}
"""Seconds of a forward and a backward of a micro-batch, and bytes that cross a boundary."""
DELAY = 0.3
"""Of a forward."""


class Entry(NamedTuple):
    """A contestant of autopar's."""

    schedule: str
    depth: str | None = None
    """One of the schedule's; None: the one that is predicted to be quickest."""
    chunks: int = 1
    split: bool = False
    """Whether its layers sleep in halves, as schedules that split the backward need them."""
    counterpart: str | None = None
    widths: tuple[int, ...] = (1,) * RANKS
    edges: tuple[int, ...] | None = None


ENTRIES = {
    "autopar gpipe": Entry("gpipe", counterpart="torch ScheduleGPipe"),
    "autopar 1f1b": Entry("1f1b", counterpart="torch Schedule1F1B"),
    "autopar 1f1b PA": Entry("1f1b", "PA", counterpart="torch Schedule1F1B"),
    "autopar interleaved": Entry("interleaved", chunks=2, counterpart="torch ScheduleInterleaved1F1B"),
    "autopar zb-h1": Entry("zb-h1", "PA", split=True),
    "autopar zb-h2": Entry("zb-h2", split=True),
    "autopar zb-v": Entry("zb-v", chunks=2, split=True, counterpart="torch ScheduleZBVZeroBubble"),
    "autopar dualpipe-v": Entry("dualpipe-v", chunks=2, split=True, counterpart="torch ScheduleDualPipeV"),
}
PEERS = {
    "torch ScheduleGPipe": "autopar gpipe",
    "torch Schedule1F1B": "autopar 1f1b",
    "torch ScheduleInterleaved1F1B": "autopar interleaved",
    "torch ScheduleInterleavedZeroBubble": "",
    "torch ScheduleZBVZeroBubble": "autopar zb-v",
    "torch ScheduleDualPipeV": "autopar dualpipe-v",
}
"""Torch's contestants, and whose ideal is theirs."""
SIDES = {"torch Schedule1F1B 2+2+2+2": (2, [1, 2, 4]), "torch Schedule1F1B 1+1+1+1+1+1": (1, [1, 2, 3, 4, 5])}
"""How many pipelines beside each other, and before which layers they are cut; of unequal widths torch has none."""
SIDE_BY_SIDE = {name: name.replace("torch Schedule1F1B", "autopar 1f1b") for name in SIDES}
DELAYED = {
    "autopar 1f1b PA": Entry("1f1b", "PA"),
    "autopar 1f1b PB": Entry("1f1b", "PB"),
    "autopar zb-h1": Entry("zb-h1", "PA", split=True),
}


def emulated_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Race eight ranks in a row, at two speeds."""
    rows = []
    for speed, numbers in SPEEDS.items():
        paces = [_pace(*numbers)] * RANKS
        rows += _rows(arguments, f"emulated {speed}", paces, ENTRIES, PEERS, 0.0)
    return rows


def delayed_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Race with messages that arrive later."""
    rows = []
    for speed, numbers in SPEEDS.items():
        paces = [_pace(*numbers)] * RANKS
        rows += _rows(arguments, f"delayed {speed}", paces, DELAYED, {}, DELAY * numbers[0])
    return rows


def unequal_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Race six layers, two of them twice as long: on stages of one and two replicas, and as equal stages do."""
    usual = _pace(20e-3, 40e-3, 2**20)
    paces = [usual, usual.times(2), usual, usual, usual.times(2), usual]
    entries = {
        "autopar 1f1b 1+2+1+1+2+1": Entry("1f1b", widths=(1, 2, 1, 1, 2, 1)),
        "autopar 1f1b 2+2+2+2": Entry(
            "1f1b", widths=(2, 2, 2, 2), edges=(1, 2, 4), counterpart="torch Schedule1F1B 2+2+2+2"
        ),
        "autopar 1f1b 1+1+1+1+1+1": Entry("1f1b", widths=(1,) * 6, counterpart="torch Schedule1F1B 1+1+1+1+1+1"),
    }
    return _rows(arguments, "unequal", paces, entries, SIDE_BY_SIDE, 0.0)


def _pace(forward_s: float, backward_s: float, boundary_bytes: int) -> Pace:
    return Pace(forward_s / ROWS, backward_s / ROWS, boundary_bytes // ROWS // 4)


def _rows(
    arguments: argparse.Namespace,
    case: str,
    paces: Sequence[Pace],
    entries: Mapping[str, Entry],
    peers: Mapping[str, str],
    delay_s: float,
) -> list[dict[str, Any]]:
    words = arguments.only.split(",")
    entries = {name: entry for name, entry in entries.items() if any(word in name for word in words)}
    field: Field = {
        "plans": {},
        "peers": [name for name in peers if any(word in name for word in words)],
        "sides": {name: side for name, side in SIDES.items() if name in peers},
        "micro_batches": MICRO_BATCHES,
        "rows": ROWS,
        "steps": arguments.steps,
        "warm_up": arguments.warm_up,
        "paces": [list(pace) for pace in paces],
        "chunks": {name: entry.chunks for name, entry in entries.items()},
        "split": [name for name, entry in entries.items() if entry.split],
        "delay_s": delay_s,
        "model": "",
        "workspace": "",
    }
    with RankPool(RANKS) as pool:
        measured: Any = pool.run("autopar.profiler.probe:measure", asdict(Probe(quick=True)))[0]
        kind = DeviceKind(type="cpu", name="cpu", memory_bytes=2**40)
        links = later(local_cluster(measured, kind, RANKS), delay_s)
        plans = {name: _planned(entry, paces, links) for name, entry in entries.items()}
        field["plans"] = {name: plan.dumps() for name, plan in plans.items()}
        told = pool.run(
            "race:emulated", field, watch=Watch(on_message=lambda rank, said: sys.stderr.write(f"{case}: {said}\n"))
        )
    results: list[Any] = list(told)
    laps: Laps = {name: [result[name] for result in results] for name in results[0]}
    return _scored(case, paces, entries, plans, {peer: peers[peer] for peer in field["peers"]}, laps, links)


def _planned(entry: Entry, paces: Sequence[Pace], links: Cluster) -> Plan:
    """Return the entry's plan, or of those that differ in depth the first of the quickest."""
    depths = SCHEDULES[entry.schedule].warmups(len(entry.widths), entry.chunks, MICRO_BATCHES)
    plans = [_plan(entry, paces, depth) for depth in ([entry.depth] if entry.depth else depths)]
    return min(plans, key=lambda plan: _predicted_s(entry, plan, paces, 0.0, links))


def _plan(entry: Entry, paces: Sequence[Pace], depth: str) -> Plan:
    graph = graph_of(_paces(entry, paces), entry.split)
    user = user_of(MICRO_BATCHES * ROWS)
    cuts = (graph, user, entry.schedule, entry.widths, MICRO_BATCHES, ROWS)
    return cut(*cuts, chunks=entry.chunks, depth=depth, edges=entry.edges)


def _predicted_s(entry: Entry, plan: Plan, paces: Sequence[Pace], overshoot_s: float, cluster: Cluster) -> float:
    profile = profile_of(_paces(entry, paces), ROWS, plan.batch, overshoot_s, split=entry.split)
    return predicted_s(plan, profile, cluster)


def _paces(entry: Entry, paces: Sequence[Pace]) -> list[Pace]:
    return [pace.times(1 / entry.chunks) for _ in range(entry.chunks) for pace in paces]


def _scored(
    case: str,
    paces: Sequence[Pace],
    entries: Mapping[str, Entry],
    plans: Mapping[str, Plan],
    peers: Mapping[str, str],
    laps: Laps,
    links: Cluster,
) -> list[dict[str, Any]]:
    overshoots_s = _overshoots_s(paces, laps["sleeps"], 2)
    # What the planner is told was measured as training does it.
    measured_s = {False: _overshoots_s(paces, laps["alone"], 2)}
    if "split alone" in laps:
        measured_s[True] = _overshoots_s(paces, laps["split alone"], 3)
    rows = []

    def step_s(name: str, overshoot_s: float, cluster: Cluster) -> float:
        return _predicted_s(entries[name], plans[name], paces, overshoot_s, cluster)

    ideals = {name: [step_s(name, overshoot_s, free_links(RANKS)) for overshoot_s in overshoots_s] for name in entries}
    for name, entry in entries.items():
        expected_s = [step_s(name, overshoot_s, links) for overshoot_s in measured_s[entry.split]]
        actions = 2 * MICRO_BATCHES * sum(entry.widths)
        rows.append(row(case, name, laps, actions, ideals[name], None, entry.counterpart, expected_s))
    actions = 2 * MICRO_BATCHES * RANKS
    rows += [row(case, name, laps, actions, ideals.get(whose), None) for name, whose in peers.items()]
    return [*rows, row(case, "sleeps", laps, actions), row(case, "alone", laps, actions)]


def _overshoots_s(paces: Sequence[Pace], laps: Sequence[Sequence[Any]], sleeps: int) -> list[float]:
    """Return, for every round, by how much a sleep takes longer than it should, the median over the ranks.

    ``sleeps`` is how many a micro-batch has.
    """
    found = []
    for moment in zip(*laps, strict=True):
        each = []
        for rank, (start_s, end_s, _) in enumerate(moment):
            pace = paces[rank % len(paces)]
            pair_s = (end_s - start_s) / MICRO_BATCHES
            each.append((pair_s - ROWS * (pace.forward_s + pace.backward_s)) / sleeps)
        found.append(median(each))
    return found
