"""Bounds: a step time that no schedule with whole forwards and backwards can undercut (docs/planning.md).

With stages s = 1..S, one micro-batch's forward f and backward b, t = f + b, transfers c forth and c' back across the
boundary behind a stage, M micro-batches, k in flight, and a from the last backward to the end of the update:

    R(s) = t + c + c' + R(s+1)                                            one micro-batch's round trip
    U(s) = max(M t, M R(s) / k, t + c + c' + U(s+1),
               t + R(s+1) + max(M c + c', c + M c'))                      until the last backward of s
    V(s) = max(U(s) + a, f + c + V(s+1))                                  until everything behind s is done

Of unequal replicas the fastest counts, but the busiest in M t, and the fullest queue in M c and M c'; only tensors
that the next stage reads count in c. Where none travels back, R(s) = t and U(s) has no terms of what is behind; where
none travels forth either, V(s) has none, and V(s+1) bounds the step by itself. Tied parameters' reductions count 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.candidate import Candidate, Placed
from autopar.planner.costs import CostModel
from autopar.schedules.route import routes

__all__ = ["LinkTerms", "StageTerms", "Terms", "Value", "bound", "fold", "last"]

Value = float | npt.NDArray[np.float64]
Flag = bool | npt.NDArray[np.bool_]


class StageTerms(NamedTuple):
    """One stage's seconds."""

    forward_s: Value
    backward_s: Value
    """Forward and backward of the fastest replica."""
    busiest_s: Value
    """Forward and backward of the slowest replica."""
    closing_s: Value
    """Exposed reduction of the replica where it is least, and the update."""
    warmup: int

    def at(self, index: tuple[int | slice | None, ...]) -> StageTerms:
        """Return the terms at an index of all arrays."""
        forward, backward, busiest, closing = (np.asarray(each)[index] for each in self[:4])
        return StageTerms(forward, backward, busiest, closing, self.warmup)


class LinkTerms(NamedTuple):
    """The transfers of one micro-batch across the boundary behind a stage."""

    forth: Flag
    """Whether the next stage reads a tensor of this one."""
    back: Flag
    """Whether a gradient returns."""
    forth_s: Value
    back_s: Value
    """The quickest message of each direction."""
    forth_most_s: Value
    back_most_s: Value
    """The slowest message, which is always on the same queue."""


class Terms(NamedTuple):
    """R, U and V of a suffix of stages."""

    trip_s: Value
    backward_s: Value
    done_s: Value
    apart_s: Value
    """The largest V of what is behind a boundary that nothing crosses: it may start with the step."""

    @property
    def step_s(self) -> Value:
        """The bound, where these are the terms of all stages."""
        return np.maximum(self.done_s, self.apart_s)


def last(stage: StageTerms, micro_batches: int) -> Terms:
    """Return the terms of the last stage."""
    busy = micro_batches * stage.busiest_s
    return Terms(stage.forward_s + stage.backward_s, busy, busy + stage.closing_s, np.zeros_like(busy))


def fold(stage: StageTerms, link: LinkTerms, behind: Terms, micro_batches: int) -> Terms:
    """Return the terms of a stage in front of the stages ``behind``; scalars and arrays alike."""
    own = stage.forward_s + stage.backward_s
    around = own + link.forth_s + link.back_s
    trip = np.where(link.back, around + behind.trip_s, own)
    queued = np.maximum(
        micro_batches * link.forth_most_s + link.back_s, link.forth_s + micro_batches * link.back_most_s
    )
    ahead = np.maximum(around + behind.backward_s, own + behind.trip_s + queued)
    backward = np.maximum(micro_batches * stage.busiest_s, micro_batches / stage.warmup * trip)
    backward = np.maximum(backward, np.where(link.back, ahead, 0.0))
    later = np.where(link.forth, stage.forward_s + link.forth_s + behind.done_s, 0.0)
    apart = np.where(link.forth, behind.apart_s, behind.step_s)
    return Terms(trip, backward, np.maximum(backward + stage.closing_s, later), apart)


def bound(costs: CostModel, candidate: Candidate) -> float:
    """Return a lower bound of a candidate's simulated seconds per step."""
    stages = candidate.stages
    micro_batches = candidate.micro_batches
    terms = last(_stage_terms(costs, stages[-1], micro_batches), micro_batches)
    for before, after in zip(stages[-2::-1], stages[:0:-1], strict=True):
        link = _link_terms(costs, before, after)
        terms = fold(_stage_terms(costs, before, micro_batches), link, terms, micro_batches)
    return costs.profile.step_overhead_s + float(terms.step_s)


def _stage_terms(costs: CostModel, stage: Placed, micro_batches: int) -> StageTerms:
    ranks, level = len(stage.devices), costs.links.level(stage.devices)
    forward = [costs.forward_s(stage.first, stage.stop, rows) for rows in stage.shares]
    adding = costs.adding(micro_batches, ranks)
    backward = [costs.backward_s(stage.first, stage.stop, rows, adding) for rows in stage.shares]
    exposed = min(costs.exposed_s(stage.first, stage.stop, rows, ranks, level) for rows in stage.shares)
    busiest = max(there + back for there, back in zip(forward, backward, strict=True))
    closing = exposed + costs.update_s(stage.first, stage.stop)
    return StageTerms(min(forward), min(backward), busiest, closing, stage.warmup)


def _link_terms(costs: CostModel, before: Placed, after: Placed) -> LinkTerms:
    flow = costs.flows.between(before.first, before.stop, after.first, after.stop)
    if not flow.tensors:
        return LinkTerms(False, False, 0.0, 0.0, 0.0, 0.0)
    forth, back = [], []
    for route in routes(before.shares, after.shares):
        devices = before.devices[route.sender], after.devices[route.receiver]
        rows = route.stop - route.start
        forth.append(costs.message_s(rows * flow.bytes_per_sample, *devices))
        back.append(costs.message_s(rows * flow.gradient_bytes_per_sample, *devices) if flow.gradients else 0.0)
    return LinkTerms(True, flow.gradients > 0, min(forth), min(back), max(forth), max(back))
