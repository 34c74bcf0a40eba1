"""Durations: how long every action of a candidate takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from autopar.planner.candidate import Candidate
from autopar.planner.costs import CostModel
from autopar.planner.links import Level
from autopar.schedules.route import Routes

__all__ = ["Durations", "durations"]


@dataclass(frozen=True)
class Durations:
    """Seconds of every action, by rank; ranks count the stages' replicas in order."""

    overhead_s: float
    stage: list[int] = field(default_factory=list)
    """Stage of every rank."""
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    """From the end of a rank's last backward to the end of its gradients' reduction."""
    reduce_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    message_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """By (sending rank, receiving rank)."""
    tied_s: list[float] = field(default_factory=list)
    """By index into the plan's shared parameters."""
    turns: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(first, period) of the micro-batches that a pair's messages carry; only where not all do."""


def durations(costs: CostModel, candidate: Candidate) -> Durations:
    """Return the durations of a candidate's actions."""
    found = Durations(costs.profile.step_overhead_s)
    for index, stage in enumerate(candidate.stages):
        reduce_s, update_s = costs.reduce_s(stage), costs.update_s(stage)
        alike: dict[tuple[float, int], tuple[float, float, float]] = {}
        for replica, key in enumerate(zip(stage.shares, map(costs.kind_of.__getitem__, stage.devices), strict=True)):
            if key not in alike:
                backward_s = costs.backward_s(stage, replica, candidate.micro_batches)
                alike[key] = costs.forward_s(stage, replica), backward_s, costs.replica_exposed_s(stage, replica)
            columns = (found.forward_s, found.backward_s, found.exposed_s)
            for column, seconds in zip(columns, alike[key], strict=True):
                column.append(seconds)
        width = len(stage.devices)
        found.stage.extend([index] * width)
        found.reduce_s.extend([reduce_s] * width)
        found.update_s.extend([update_s] * width)
    _price_messages(costs, candidate, found)
    for tied, holders in costs.tied_between(candidate.stages):
        devices = [device for index in holders for device in candidate.stages[index].devices]
        found.tied_s.append(costs.tied_s(tied, devices))
    return found


def _price_messages(costs: CostModel, candidate: Candidate, found: Durations) -> None:
    stages, known = candidate.stages, Routes()
    starts = [0, *accumulate(len(stage.devices) for stage in stages)]
    level = costs.links.topology.pair
    for producer, consumer, flow in costs.flows.exchanges([stage.stop for stage in stages]):
        sending, receiving = stages[producer], stages[consumer]
        alike: dict[tuple[float, Level], tuple[float, float]] = {}
        for route in known.between(sending, receiving):
            pair = starts[producer] + route.sender, starts[consumer] + route.receiver
            key = route.stop - route.start, level(sending.devices[route.sender], receiving.devices[route.receiver])
            if key not in alike:
                sizes = (
                    costs.message_bytes(route, candidate.micro_batch_size, each)
                    for each in (flow.bytes_per_sample, flow.gradient_bytes_per_sample)
                )
                forth_s, back_s = (costs.links.message_s(size, key[1]) for size in sizes)
                alike[key] = forth_s, back_s
            found.message_s[pair] = alike[key][0]
            if flow.gradients:
                found.message_s[pair[::-1]] = alike[key][1]
            if route.period > 1:
                found.turns[pair] = found.turns[pair[::-1]] = route.first, route.period
