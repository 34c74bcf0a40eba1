"""Bounds: a step time that no schedule with whole forwards and backwards can undercut (docs/design/bound.md).

With stages s = 1..S, one micro-batch's forward f and backward b, t = f + b, transfers c forth and c' back across the
boundary behind a stage, M micro-batches, k in flight, and a from the last backward to the end of the update:

    R(s) = t + c + c' + R(s+1)                                            one micro-batch's round trip
    U(s) = max(M t, M R(s) / k, R(s) + max((M - k) f + (M - 1) b, (M - 1) f + (M - k) b),
               t + c + c' + U(s+1),
               t + R(s+1) + max(M c + c', c + M c'))                      until the last backward of s
    V(s) = max(U(s) + a, f + c + V(s+1))                                  until everything behind s is done

When the first backward of s ends, R(s) has passed and at most k forwards have begun; when the last forward begins, at
most k backwards are left, and R(s) is yet to come.

Of a stage whose replicas split micro-batches, all numbers are those of the last replica. It holds a micro-batch's last
rows, and so do the last ones of the stages beside: these rows' way is a micro-batch's shortest way of which every part
is known, and no replica has more rows. Replicas that take turns each have their own M, and k, and so has every queue.
Only tensors that the next stage reads count in c. Where none travels back, R(s) = t and U(s) has no terms of what is
behind; where none travels forth either, V(s) has none, and V(s+1) bounds the step by itself. Tied parameters'
reductions count 0.

The work bound is the step that remains if every device computes without pause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from math import lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.candidate import Candidate, CandidateStage, Family, splits_backward
from autopar.planner.costs.model import CostModel
from autopar.schedules.route import Route

Value = float | npt.NDArray[np.float64]
Flag = bool | npt.NDArray[np.bool_]


class StageTerms(NamedTuple):
    """One stage's seconds."""

    forward_s: Value
    backward_s: Value
    work_s: Value
    """Forwards and backwards of a whole step."""
    closing_s: Value
    """Exposed reduction, and the update."""
    rate: Value
    """Micro-batches of a step over those in flight at most."""
    beside_s: Value
    """What is computed at least while none of one micro-batch's round trip passes."""
    total_s: Value | None = None
    """Of backwards in halves, all that a stage does from its first forward on, wherever others wait for it."""
    rest_s: Value | None = None
    """Likewise, what of it is left when its first round trip has passed."""


class LinkTerms(NamedTuple):
    """The transfers across the boundary behind a stage."""

    forth: Flag
    """Whether the next stage reads a tensor of this one."""
    back: Flag
    """Whether a gradient returns."""
    forth_s: Value
    back_s: Value
    """A message of each direction."""
    forth_work_s: Value
    back_work_s: Value
    """What a step's messages occupy their queue."""


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
    busy = _larger(_larger(stage.work_s, stage.rate * trip), trip + stage.beside_s)
    done = _with_halves(stage, trip, busy + stage.closing_s)
    return Terms(trip, busy, done, done)


def fold(stage: StageTerms, link: LinkTerms, behind: Terms) -> Terms:
    """Return the terms of a stage in front of the stages ``behind``; scalars and arrays alike."""
    own = stage.forward_s + stage.backward_s
    around = own + link.forth_s + link.back_s
    trip = _either(link.back, around + behind.trip_s, own)
    queued = _larger(link.forth_work_s + link.back_s, link.forth_s + link.back_work_s)
    ahead = _larger(around + behind.backward_s, own + behind.trip_s + queued)
    backward = _larger(_larger(stage.work_s, stage.rate * trip), trip + stage.beside_s)
    backward = _larger(backward, _either(link.back, ahead, 0.0))
    later = _either(link.forth, stage.forward_s + link.forth_s + behind.done_s, 0.0)
    done = _with_halves(stage, trip, _larger(backward + stage.closing_s, later))
    return Terms(trip, backward, done, _larger(done, behind.step_s))


def _with_halves(stage: StageTerms, trip: Value, done: Value) -> Value:
    """Return when all is done, the weight halves of a stage included."""
    if stage.total_s is None or stage.rest_s is None:
        return done
    return _larger(done, _larger(stage.total_s, trip + stage.rest_s))


def _larger(one: Value, other: Value) -> Value:
    """The larger of two numbers, or of each two; of numbers, comparing takes a tenth of what numpy does."""
    if isinstance(one, float) and isinstance(other, float):
        return one if one >= other else other
    return np.maximum(one, other)


def _either(flag: Flag, one: Value, other: Value) -> Value:
    """The first where the flag holds, else the second."""
    if isinstance(flag, bool) and isinstance(one, float) and isinstance(other, float):
        return one if flag else other
    return np.where(flag, one, other)


def fold_chain(stage: StageTerms, link: LinkTerms, behind: Terms) -> Terms:
    """Return :func:`fold` where tensors travel forth and back; overwrites the arrays ``behind``."""
    trip, backward, done = (np.asarray(each) for each in behind[:3])
    own = stage.forward_s + stage.backward_s
    around = own + link.forth_s + link.back_s
    queued = np.maximum(link.forth_work_s + link.back_s, link.forth_s + link.back_work_s) + own - around
    trip += around
    backward += around
    np.maximum(backward, stage.work_s, out=backward)
    np.maximum(backward, stage.rate * trip, out=backward)
    np.maximum(backward, trip + np.maximum(stage.beside_s, queued), out=backward)
    done += stage.forward_s + link.forth_s
    np.maximum(done, _with_halves(stage, trip, backward + stage.closing_s), out=done)
    return Terms(trip, backward, done, np.maximum(done, behind.step_s))


def suffixes(stages: Sequence[StageTerms], links: Sequence[LinkTerms]) -> Iterator[Terms]:
    """Return the terms of the last stage, the last two, and so on."""
    ahead = zip(stages[-2::-1], links[::-1], strict=True)
    return accumulate(ahead, lambda behind, each: fold(each[0], each[1], behind), initial=last(stages[-1]))


def candidate_terms(costs: CostModel, candidate: Candidate) -> tuple[list[StageTerms], list[LinkTerms]]:
    """Return the terms of a candidate's stages and boundaries."""
    stages = candidate.stages
    links = [link_terms(costs, before, after, candidate) for before, after in pairwise(stages)]
    return [stage_terms(costs, stage, candidate.micro_batches) for stage in stages], links


def candidate_bound_s(costs: CostModel, candidate: Candidate) -> float:
    """Return a lower bound of a candidate's simulated seconds per step."""
    *_, whole = suffixes(*candidate_terms(costs, candidate))
    return costs.profile.step_overhead_s + float(whole.step_s)


def round_trips(costs: CostModel, candidate: Candidate) -> list[float]:
    """Return the least seconds of one micro-batch's way from each stage to the last one and back."""
    return [float(terms.trip_s) for terms in suffixes(*candidate_terms(costs, candidate))][::-1]


def stage_terms(costs: CostModel, stage: CandidateStage, micro_batches: int) -> StageTerms:
    """Return one stage's terms."""
    at = [len(stage.devices) - 1]
    if stage.division == "round-robin":
        # Of replicas on one kind of device, the first has the most turns.
        at = list({costs.kind_of[device]: index for index, device in reversed([*enumerate(stage.devices)])}.values())
    counts = [stage.turns(each, micro_batches) for each in at]
    forward = [costs.forward_s(stage, each) for each in at]
    backward = [costs.backward_s(stage, each, count) for each, count in zip(at, counts, strict=True)]
    columns = list(zip(forward, backward, counts, strict=True))
    work = max(count * (there + back) for there, back, count in columns)
    beside = max(float(beside_s(*column, stage.warmup)) for column in columns)
    closing = min(costs.replica_exposed_s(stage, each) for each in at) + costs.update_s(stage)
    return StageTerms(min(forward), min(backward), work, closing, max(counts) / stage.warmup, beside)


def beside_s(forward_s: Value, backward_s: Value, micro_batches: Value, depth: Value) -> Value:
    """Return what a replica computes before its last forward, or behind its first backward, whichever is more."""
    plain = isinstance(depth, int) and isinstance(micro_batches, int)
    idle = micro_batches - (min(depth, micro_batches) if plain else np.minimum(depth, micro_batches))
    most = micro_batches - 1
    return _larger(idle * forward_s + most * backward_s, most * forward_s + idle * backward_s)


def link_terms(costs: CostModel, before: CandidateStage, after: CandidateStage, candidate: Candidate) -> LinkTerms:
    """Return the terms of the boundary between two neighbours."""
    flow = costs.flows.between(before.first, before.stop, after.first, after.stop)
    if not flow.tensors:
        return LinkTerms(False, False, 0.0, 0.0, 0.0, 0.0)
    # The rows of a micro-batch that both hold; of replicas that take turns, the nearest.
    rows = min(before.shares[-1], after.shares[-1])
    count = len(range(0, candidate.micro_batches, lcm(before.turning, after.turning)))
    route = Route(0, 0, 0, rows)
    sizes = (flow.bytes_per_sample, flow.gradient_bytes_per_sample)
    there, returned = (costs.message_bytes(route, candidate.micro_batch_size, size) for size in sizes)
    ends = list(product(_ends(costs, before), _ends(costs, after)))
    forth = min(costs.message_s(there, one, other) if one != other else 0.0 for one, other in ends)
    back = min(costs.message_s(returned, other, one) if one != other else 0.0 for one, other in ends)
    back = back if flow.gradients else 0.0
    return LinkTerms(True, flow.gradients > 0, forth, back, count * forth, count * back)


def _ends(costs: CostModel, stage: CandidateStage) -> list[int]:
    """Devices that a micro-batch's last rows may be on, one of every node."""
    if stage.division == "split":
        return [stage.devices[-1]]
    topology = costs.links.topology
    return list({(topology.racks[each], topology.nodes[each]): each for each in stage.devices}.values())


ROUNDING = 1e-12


def work_s(costs: CostModel, family: Family) -> float:
    """Return a lower bound of all plans of a family: every layer on the kind of device, and divided, as suits it best.

    Replicas that take turns, sharding and recomputation only add to a layer's work.
    """
    least = np.minimum.reduce([layers_work_s(costs, family, kind) for kind in sorted(set(costs.kind_of))])
    return costs.profile.step_overhead_s + float(least.sum()) / len(costs.devices)


def layers_work_s(costs: CostModel, family: Family, kind: int) -> npt.NDArray[np.float64]:
    """Return the least work of a step, by layer, on any number of one kind of device, together."""
    least = np.full(costs.layer_count, np.inf)
    count = costs.kind_of.count(kind)
    most = count if costs.divisible else min(count, family.micro_batch_size)
    for width in range(1, most + 1):
        total = np.zeros(costs.layer_count)
        adding = costs.adding(family.micro_batches, width)
        for rows, replicas in Counter(costs.shares(family.micro_batch_size, width)).items():
            total += replicas * np.diff(costs.sums.forward(rows, kind=kind))
            total += replicas * _backwards_s(costs, family, rows, adding, kind)
        least = np.minimum(least, total)
    return least * family.micro_batches * (1 - ROUNDING)


def _backwards_s(costs: CostModel, family: Family, rows: float, adding: float, kind: int) -> npt.NDArray[np.float64]:
    """Return the seconds of every layer's backward; where some may be whole and some in halves, the fewest."""
    whole: npt.NDArray[np.float64] = np.diff(np.array(costs.sums.backward(rows, adding, kind=kind)))
    if not splits_backward(family.schedule):
        return whole
    both: npt.NDArray[np.float64] = np.diff(np.array(costs.sums.halves(rows, adding, kind=kind))).sum(axis=0)
    return np.minimum(whole, both)
