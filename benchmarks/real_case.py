"""The case of `benchmarks/runtime.py` that computes."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from autopar.capture import load
from autopar.capture.graph import LayerGraph
from autopar.capture.layers.export import capture
from autopar.capture.model.source import UserModel
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.ownership import Shard
from autopar.profiler import local_cluster
from autopar.ranks.monitor import Watch
from autopar.ranks.pool import RankPool
from autopar.runtime.start.workspace import Workspace
from cut import cut
from emulation import free_links, predicted_s, profile_of
from race import Real, computing
from score import row, steps_s
from sleeping import Pace, graph_of, user_of

__all__ = ["rows"]

MODEL = Path(__file__).parent / "models" / "transformer.py"
RANKS, BLOCKS, MICRO_BATCHES, ROWS = 2, 12, 8, 4


class Entry(NamedTuple):
    """A contestant of autopar's."""

    schedule: str
    widths: tuple[int, ...]
    micro_batches: int
    counterpart: str | None
    chunks: int = 1
    split: bool = False
    """Whether the schedule splits the backward."""
    shard: Shard = "none"


# Replicas of all layers go forward and backward in turn, as the loops around DDP and FSDP2 do.
ENTRIES = {
    "autopar gpipe": Entry("gpipe", (1, 1), MICRO_BATCHES, "torch ScheduleGPipe"),
    "autopar 1f1b": Entry("1f1b", (1, 1), MICRO_BATCHES, "torch Schedule1F1B"),
    "autopar interleaved": Entry("interleaved", (1, 1), MICRO_BATCHES, "torch ScheduleInterleaved1F1B", 2),
    "autopar zb-h1": Entry("zb-h1", (1, 1), MICRO_BATCHES, None, split=True),
    "autopar zb-v": Entry("zb-v", (1, 1), MICRO_BATCHES, "torch ScheduleZBVZeroBubble", 2, split=True),
    "autopar data parallelism": Entry("1f1b", (2,), MICRO_BATCHES // 2, "torch DDP"),
    "autopar data parallelism, sharded": Entry("1f1b", (2,), MICRO_BATCHES // 2, "torch FSDP2", shard="parameters"),
}
PEERS = {
    "torch ScheduleGPipe": "autopar gpipe",
    "torch Schedule1F1B": "autopar 1f1b",
    "torch ScheduleInterleaved1F1B": "autopar interleaved",
    "torch ScheduleInterleavedZeroBubble": "",
    "torch ScheduleZBVZeroBubble": "autopar zb-v",
    "torch DDP": "autopar data parallelism",
    "torch FSDP2": "autopar data parallelism",
}


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Race a transformer on two ranks; ``plain`` is one process, ``copies`` is one in each rank at once."""
    words = arguments.only.split(",")
    user = load(str(MODEL))
    graph = capture(user, user.build(0))
    plans = {name: _plan(graph, user, entry) for name, entry in ENTRIES.items() if any(word in name for word in words)}
    peers = [name for name in PEERS if any(word in name for word in words)]
    alone = [] if arguments.bare else ["plain", "copies"]
    found = _race(arguments, plans, [*peers, *alone])
    laps = {name: [each["laps"][name] for each in found] for name in found[0]["laps"]}
    profiles = [[Profile.parse(text, Path("profile.json")) for text in each["profiles"]] for each in found]
    single_s = None if arguments.bare else steps_s(laps["plain"])
    ideals = {name: [_ideal_s(ENTRIES[name], step_s) for step_s in single_s or ()] or None for name in plans}
    told = []
    for name, plan in plans.items():
        expected_s = _expected_s(plan, found, profiles)
        actions = 2 * plan.micro_batches * RANKS
        told.append(row("real", name, laps, actions, ideals[name], single_s, ENTRIES[name].counterpart, expected_s))
    actions = 2 * MICRO_BATCHES * RANKS
    told += [row("real", name, laps, actions, ideals.get(PEERS[name]), single_s) for name in peers]
    return told + [row("real", name, laps, actions, None, single_s) for name in alone]


def _expected_s(plan: Plan, found: Sequence[Real], profiles: Sequence[Sequence[Profile]]) -> list[float] | None:
    """Return the predicted seconds of a step, of every round; the ranks have all measured, and the mean counts."""
    if not profiles[0]:
        return None
    links = local_cluster(found[0]["links"], profiles[0][0].device, RANKS)
    return [fmean(predicted_s(plan, one, links) for one in moment) for moment in zip(*profiles, strict=True)]


def _race(arguments: argparse.Namespace, plans: dict[str, Plan], peers: Sequence[str]) -> list[Real]:
    with tempfile.TemporaryDirectory() as folder, RankPool(RANKS) as pool:
        if plans:
            Workspace(Path(folder)).prepare(load(str(MODEL)), next(iter(plans.values())), None)
        field = computing(arguments, plans, peers, MICRO_BATCHES, ROWS, MODEL, folder)
        told: Any = pool.run(
            "race:real", field, watch=Watch(on_message=lambda rank, said: sys.stderr.write(f"real: {said}\n"))
        )
    return list(told)


def _ideal_s(entry: Entry, single_s: float) -> float:
    """Return the seconds of a step that is one process's, divided among the ranks without any loss but the bubble."""
    row_s = single_s / (MICRO_BATCHES * ROWS * BLOCKS)
    paces = [Pace(row_s / 3, 2 * row_s / 3, 1)] * BLOCKS
    batch = MICRO_BATCHES * ROWS
    rows = batch // entry.micro_batches
    plan = _plan(graph_of(paces, entry.split), user_of(batch), entry)
    return predicted_s(plan, profile_of(paces, rows, batch, 0.0, split=entry.split), free_links(RANKS))


def _plan(graph: LayerGraph, user: UserModel, entry: Entry) -> Plan:
    rows = MICRO_BATCHES * ROWS // entry.micro_batches
    placed = (entry.widths, entry.micro_batches, rows, entry.chunks)
    return cut(graph, user, entry.schedule, *placed, shard=entry.shard)
