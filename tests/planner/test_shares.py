"""Shares of the ranks' time, against a look at every moment between two events."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from autopar.formats.cluster import Overlap
from autopar.formats.timeline import Event, Timeline, track_of
from autopar.planner.assemble import shares_of
from autopar.planner.costs.model import CostModel, durations
from autopar.planner.options import PlanOptions
from autopar.planner.simulator.simulate import skeleton, trace
from autopar.schedules.expand import expand
from drawn import random_candidate
from random_problems import random_cluster, random_profile


def _timeline(seed: int) -> Timeline:
    profile, cluster = random_profile(seed, batches=(4, 6)), random_cluster(seed, 5)
    if seed % 2:
        links = tuple(link.model_copy(update={"shared_by": 2, "duplex": "half"}) for link in cluster.links)
        overlaps = (Overlap(level="node", compute=1.2, communication=1.5),)
        cluster = cluster.model_copy(update={"links": links, "overlaps": overlaps})
    costs = CostModel(profile, cluster, PlanOptions(gpus=5))
    candidate = random_candidate(random.Random(seed), costs)
    flows = [
        (producer, consumer, flow.gradients > 0)
        for producer, sending in enumerate(candidate.stages)
        for consumer, receiving in enumerate(candidate.stages)
        if producer < consumer
        and (flow := costs.flows.between(sending.first, sending.stop, receiving.first, receiving.stop)).tensors
    ]
    tied = [holders for _, holders in costs.tied_between(candidate.stages)]
    program = expand(skeleton(candidate, flows, tied))
    return trace(program, durations(costs, candidate), costs.sharing.among(candidate.devices))


def _matches(send: Event, receive: Event) -> bool:
    kinds = {("S", "R"), ("SG", "RG")}
    ends = (send.rank, send.action.stage, send.action.peer, send.action.peer_stage)
    return (
        (send.action.kind, receive.action.kind) in kinds
        and send.action.micro_batch == receive.action.micro_batch
        and ends == (receive.action.peer, receive.action.peer_stage, receive.rank, receive.action.stage)
    )


def _looked_at(timeline: Timeline) -> dict[str, float]:
    events = list(timeline)
    spent = {"computing": 0.0, "messages": 0.0, "reduction": 0.0, "idle": 0.0}
    edges = sorted({0.0, *timeline.starts_s, *timeline.ends_s})
    for rank in range(timeline.rank_count()):
        own = [event for event in events if event.rank == rank]
        for before, after in pairwise(edges):
            now = (before + after) / 2
            under = [event for event in own if event.start_s < now < event.end_s]
            tracks = {track_of(event.action.kind) for event in under}
            moving = any(
                _matches(send, event) and send.start_s < now
                for event in under
                if track_of(event.action.kind) == "receive"
                for send in events
            )
            what = "computing" if "compute" in tracks else "reduction" if "reduce" in tracks else "idle"
            spent["messages" if what == "idle" and moving else what] += after - before
    total = sum(spent.values())
    return {name: seconds / total for name, seconds in spent.items()}


def test_shares_are_what_a_look_at_every_moment_counts() -> None:
    seen = dict.fromkeys(("computing", "messages", "reduction", "idle"), 0)
    for seed in range(80):
        timeline = _timeline(seed)
        if timeline.end_s == 0 or len(timeline) > 200:
            continue
        shares = shares_of(timeline)
        for name, expected in _looked_at(timeline).items():
            assert getattr(shares, name) == pytest.approx(expected, abs=1e-9), f"seed {seed}: {name}"
            seen[name] += expected > 0.01
    assert min(seen.values()) >= 10


def test_a_step_without_time_is_idle() -> None:
    assert shares_of(Timeline("simulated")).idle == 1
