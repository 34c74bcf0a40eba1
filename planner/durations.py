"""Durations: how long every action of a candidate takes."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.planner.candidate import Candidate
from autopar.planner.costs import CostModel
from autopar.schedules.route import routes

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


def durations(costs: CostModel, candidate: Candidate) -> Durations:
    """Return the durations of a candidate's actions."""
    found = Durations(costs.profile.step_overhead_s)
    for index, stage in enumerate(candidate.stages):
        reduce_s, update_s = costs.reduce_s(stage), costs.update_s(stage)
        for replica in range(len(stage.devices)):
            found.stage.append(index)
            found.forward_s.append(costs.forward_s(stage, replica))
            found.backward_s.append(costs.backward_s(stage, replica, candidate.micro_batches))
            found.exposed_s.append(costs.replica_exposed_s(stage, replica))
            found.reduce_s.append(reduce_s)
            found.update_s.append(update_s)
    _price_messages(costs, candidate, found)
    for tied, holders in costs.tied_between(candidate.stages):
        devices = [device for index in holders for device in candidate.stages[index].devices]
        found.tied_s.append(costs.tied_s(tied, devices))
    return found


def _price_messages(costs: CostModel, candidate: Candidate, found: Durations) -> None:
    starts = [0]
    for stage in candidate.stages:
        starts.append(starts[-1] + len(stage.devices))
    for producer, sending in enumerate(candidate.stages):
        for consumer in range(producer + 1, len(candidate.stages)):
            receiving = candidate.stages[consumer]
            flow = costs.flows.between(sending.first, sending.stop, receiving.first, receiving.stop)
            for route in routes(sending, receiving) if flow.tensors else ():
                sender, receiver = starts[producer] + route.sender, starts[consumer] + route.receiver
                devices = sending.devices[route.sender], receiving.devices[route.receiver]
                size = costs.message_bytes(route, candidate.micro_batch_size, flow.bytes_per_sample)
                found.message_s[sender, receiver] = costs.message_s(size, *devices)
                if flow.gradients:
                    size = costs.message_bytes(route, candidate.micro_batch_size, flow.gradient_bytes_per_sample)
                    found.message_s[receiver, sender] = costs.message_s(size, *devices[::-1])
