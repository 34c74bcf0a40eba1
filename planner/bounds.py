"""Bounds: a step time that no schedule with whole forwards and backwards can undercut (docs/planning.md).

With stages s = 1..S, one micro-batch's forward f and backward b, t = f + b, transfers c forth and c' back across the
boundary behind a stage, M micro-batches, k in flight, and a from the last backward to the end of the update:

    R(s) = t + c + c' + R(s+1)                                            one micro-batch's round trip
    U(s) = max(M t, M R(s) / k, t + c + c' + U(s+1),
               t + R(s+1) + max(M c + c', c + M c'))                      until the last backward of s
    V(s) = max(U(s) + a, f + c + V(s+1))                                  until everything behind s is done

Of unequal replicas the fastest counts, but the busiest in M t, and the fullest queue in M c and M c'; of replicas that
take turns, each has its own M, and k, and so has every queue. Only tensors that the next stage reads count in c. Where
none travels back, R(s) = t and U(s) has no terms of what is behind; where none travels forth either, V(s) has none, and
V(s+1) bounds the step by itself. Tied parameters' reductions count 0.
"""

from __future__ import annotations

from types import EllipsisType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.candidate import Candidate, Placed
from autopar.planner.costs import CostModel
from autopar.schedules.route import routes

__all__ = ["LinkTerms", "StageTerms", "Terms", "Value", "bound", "fold", "last", "link_terms", "stage_terms"]

Value = float | npt.NDArray[np.float64]
Flag = bool | npt.NDArray[np.bool_]
Index = tuple[int | slice | EllipsisType | npt.NDArray[np.int64] | None, ...]


class StageTerms(NamedTuple):
    """One stage's seconds."""

    forward_s: Value
    backward_s: Value
    """Forward and backward of the fastest replica."""
    work_s: Value
    """Forwards and backwards of a whole step on the busiest replica."""
    closing_s: Value
    """Exposed reduction of the replica where it is least, and the update."""
    rate: Value
    """Micro-batches of a step on a replica over those in flight there at most."""

    def at(self, index: Index) -> StageTerms:
        """Return the terms at an index of all arrays."""
        return StageTerms(*(np.asarray(each)[index] for each in self))


class LinkTerms(NamedTuple):
    """The transfers across the boundary behind a stage."""

    forth: Flag
    """Whether the next stage reads a tensor of this one."""
    back: Flag
    """Whether a gradient returns."""
    forth_s: Value
    back_s: Value
    """The quickest message of each direction."""
    forth_work_s: Value
    back_work_s: Value
    """What a step's messages occupy the fullest queue."""

    def at(self, index: Index) -> LinkTerms:
        """Return the terms at an index of all arrays."""
        return LinkTerms(*(np.asarray(each)[index] for each in self))


class Terms(NamedTuple):
    """R, U and V of a suffix of stages."""

    trip_s: Value
    backward_s: Value
    done_s: Value
    step_s: Value
    """The largest V of the suffix and of all that is behind: a boundary that nothing crosses starts anew."""


def last(stage: StageTerms) -> Terms:
    """Return the terms of the last stage."""
    trip = stage.forward_s + stage.backward_s
    # Of one micro-batch after the other, at most so many as are in flight overlap.
    busy = np.maximum(stage.work_s, stage.rate * trip)
    return Terms(trip, busy, busy + stage.closing_s, busy + stage.closing_s)


def fold(stage: StageTerms, link: LinkTerms, behind: Terms) -> Terms:
    """Return the terms of a stage in front of the stages ``behind``; scalars and arrays alike."""
    own = stage.forward_s + stage.backward_s
    around = own + link.forth_s + link.back_s
    trip = np.where(link.back, around + behind.trip_s, own)
    queued = np.maximum(link.forth_work_s + link.back_s, link.forth_s + link.back_work_s)
    ahead = np.maximum(around + behind.backward_s, own + behind.trip_s + queued)
    backward = np.maximum(stage.work_s, stage.rate * trip)
    backward = np.maximum(backward, np.where(link.back, ahead, 0.0))
    later = np.where(link.forth, stage.forward_s + link.forth_s + behind.done_s, 0.0)
    done = np.maximum(backward + stage.closing_s, later)
    return Terms(trip, backward, done, np.maximum(done, behind.step_s))


def bound(costs: CostModel, candidate: Candidate) -> float:
    """Return a lower bound of a candidate's simulated seconds per step."""
    stages = candidate.stages
    terms = last(stage_terms(costs, stages[-1], candidate.micro_batches))
    for before, after in zip(stages[-2::-1], stages[:0:-1], strict=True):
        link = link_terms(costs, before, after, candidate)
        terms = fold(stage_terms(costs, before, candidate.micro_batches), link, terms)
    return costs.profile.step_overhead_s + float(terms.step_s)


def stage_terms(costs: CostModel, stage: Placed, micro_batches: int) -> StageTerms:
    """Return one stage's terms."""
    replicas = range(len(stage.devices))
    forward = [costs.forward_s(stage, replica) for replica in replicas]
    backward = [costs.backward_s(stage, replica, micro_batches) for replica in replicas]
    exposed = min(costs.replica_exposed_s(stage, replica) for replica in replicas)
    work = max((forward[at] + backward[at]) * stage.turns(at, micro_batches) for at in replicas)
    rate = stage.turns(0, micro_batches) / stage.warmup
    return StageTerms(min(forward), min(backward), work, exposed + costs.update_s(stage), rate)


def link_terms(costs: CostModel, before: Placed, after: Placed, candidate: Candidate) -> LinkTerms:
    """Return the terms of the boundary between two neighbours."""
    flow = costs.flows.between(before.first, before.stop, after.first, after.stop)
    if not flow.tensors:
        return LinkTerms(False, False, 0.0, 0.0, 0.0, 0.0)
    forth, back, counts = [], [], []
    for route in routes(before, after):
        devices = before.devices[route.sender], after.devices[route.receiver]
        sizes = (flow.bytes_per_sample, flow.gradient_bytes_per_sample)
        there, returned = (costs.message_bytes(route, candidate.micro_batch_size, size) for size in sizes)
        counts.append(route.count(candidate.micro_batches))
        forth.append(costs.message_s(there, *devices))
        back.append(costs.message_s(returned, *devices) if flow.gradients else 0.0)
    forth_work, back_work = (
        max(count * seconds for count, seconds in zip(counts, each, strict=True)) for each in (forth, back)
    )
    return LinkTerms(True, flow.gradients > 0, min(forth), min(back), forth_work, back_work)
