"""Workers: virtual workers as one plan where they cut the layers alike, and their price where they do not.

A plan is one pipeline. Virtual workers that cut alike are one whose replicas take turns. Others are priced so: each
worker's own pipeline is simulated with its share of the step's micro-batches; layers that no worker cuts are reduced
together, among the devices that hold them, from the last layers to the first, as soon as these have done their last
backward; then every device updates. That the pipelines share links is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from autopar.formats.plan import Division, Plan, Stage
from autopar.formats.program import BACKWARD, REDUCE_TIED
from autopar.planner.assemble import crossings, shared
from autopar.planner.bounds.chain import bound
from autopar.planner.candidate import Candidate, Placed
from autopar.planner.costs.durations import Durations, durations
from autopar.planner.costs.memory import Held
from autopar.planner.costs.model import CostModel
from autopar.planner.costs.sharing import Traffic
from autopar.planner.peers.allocation import Policy
from autopar.planner.peers.partition import Pipelined, depths
from autopar.planner.simulator.simulate import trace
from autopar.schedules.expand import expand


class Worker(NamedTuple):
    """A pipeline: stages that end before the layers ``cuts``, on one device each."""

    cuts: tuple[int, ...]
    devices: tuple[int, ...]


class Workers(NamedTuple):
    """Virtual workers that share the micro-batches of a step."""

    policy: Policy
    micro_batches: int
    rows: int
    pipelined: Pipelined
    workers: tuple[Worker, ...]

    def turns(self, worker: int) -> int:
        """Return how many of the step's micro-batches a worker is given; the first ones take what is left over."""
        each, more = divmod(self.micro_batches, len(self.workers))
        return each + (worker < more)


def candidate_of(found: Workers) -> Candidate | None:
    """Return workers as one plan whose replicas take turns; none where they cut the layers differently."""
    if len({worker.cuts for worker in found.workers}) > 1:
        return None
    count, cuts = len(found.workers), found.workers[0].cuts
    division: Division = "round-robin" if count > 1 else "split"
    stages = []
    for at, ((first, stop), depth) in enumerate(zip(_spans(cuts), depths(len(cuts), found.pipelined), strict=True)):
        devices = tuple(worker.devices[at] for worker in found.workers)
        stages.append(Placed(first, stop, devices, (found.rows,) * count, depth, division=division))
    return Candidate(found.micro_batches, found.rows, "1f1b", tuple(stages))


def _spans(cuts: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise((0, *cuts)))


def peaks(costs: CostModel, found: Workers, worker: int) -> list[int]:
    """Return the peak of every stage of a worker, its gradients kept for the reduction among all."""
    cuts = found.workers[worker].cuts
    deep = depths(len(cuts), found.pipelined)
    result = []
    for at, (first, stop) in enumerate(_spans(cuts)):
        lead = deep[at - 1] - deep[at] if at else 0
        held = Held(found.rows, deep[at], found.pipelined.turns, len(found.workers), lead)
        kind = costs.kind_of[found.workers[worker].devices[at]]
        result.append(costs.memory[kind].peak(first, stop, held, cuts[at + 1 :]))
    return result


def bound_s(costs: CostModel, found: Workers) -> float:
    """Return a lower bound of :func:`step_s`."""
    return max(bound(costs, own) for own in _pipelines(found))


def step_s(costs: CostModel, found: Workers) -> float:
    """Return the seconds of a step of workers that cut the layers each in its own way."""
    ready: dict[int, float] = {}
    update_s: dict[int, float] = {}
    for own in _pipelines(found):
        times = _durations(costs, own, len(found.workers))
        for stage, done_s, length in zip(own.stages, _ready(costs, own, times), times.update_s, strict=True):
            ready[stage.devices[0]], update_s[stage.devices[0]] = done_s, length
    for holders, size in _segments(costs, found):
        start = max(ready[device] for device in holders)
        level = costs.links.level(holders)
        end = start + costs.links.collective_s("all_reduce", size, len(holders), level)
        ready |= dict.fromkeys(holders, end)
    return max(ready[device] + update_s[device] for device in ready)


def _pipelines(found: Workers) -> Iterator[Candidate]:
    """Yield every worker's own pipeline."""
    for at, worker in enumerate(found.workers):
        turns, deep = found.turns(at), depths(len(worker.cuts), found.pipelined)
        stages = tuple(
            Placed(first, stop, (device,), (found.rows,), min(depth, turns))
            for (first, stop), device, depth in zip(_spans(worker.cuts), worker.devices, deep, strict=True)
        )
        yield Candidate(turns, found.rows, "1f1b", stages)


def _durations(costs: CostModel, own: Candidate, workers: int) -> Durations:
    """Return a pipeline's durations; with other workers, its gradients are there from the first backward on."""
    times = durations(costs, own)
    backward = []
    for stage in own.stages:
        adding = costs.adding(own.micro_batches, workers)
        sums = costs.sums.backward(own.micro_batch_size, adding, kind=costs.kind_of[stage.devices[0]])
        backward.append(sums[stage.stop] - sums[stage.first])
    return replace(times, backward_s=backward)


def _ready(costs: CostModel, own: Candidate, times: Durations) -> list[float]:
    """Return when each stage's gradients are there."""
    plan = Plan.model_construct(
        schedule=own.schedule,
        micro_batches=own.micro_batches,
        micro_batch_size=own.micro_batch_size,
        stages=tuple(
            Stage.model_construct(
                devices=stage.devices, shares=stage.shares, warmup=stage.warmup, division=stage.division
            )
            for stage in own.stages
        ),
        tensors=crossings(costs, own),
        tied=shared(costs, own),
    )
    devices = tuple(stage.devices[0] for stage in own.stages)
    found = [0.0] * len(devices)
    for event in trace(expand(plan), times, Traffic(costs.sharing, devices) if costs.sharing else None):
        if event.action.kind in (BACKWARD, REDUCE_TIED):
            found[event.rank] = max(found[event.rank], event.end_s)
    return found


def _segments(costs: CostModel, found: Workers) -> Iterator[tuple[Sequence[int], int]]:
    """Yield the devices that hold the same layers and these layers' gradients in bytes, from the last layers on."""
    ends = sorted({cut for worker in found.workers for cut in worker.cuts})
    for first, stop in reversed(_spans(ends)):
        holders = [
            next(device for cut, device in zip(worker.cuts, worker.devices, strict=True) if stop <= cut)
            for worker in found.workers
        ]
        size = sum(layer.trainable_bytes for layer in costs.profile.layers[first:stop])
        for tied in costs.flows.tied:
            if tied.trainable:
                # Summed within a worker first; among workers, its first layer stands for it.
                size -= tied.bytes * sum(first <= layer < stop for layer in tied.layers[1:])
        yield holders, max(0, size)
