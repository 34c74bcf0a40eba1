"""Bounds: a step time that no schedule of some stages can undercut (docs/design/bound.md), and which of its terms bind.

In: stages with their seconds. First the recursion for whole forwards and backwards.

With stages s = 1..S, one micro-batch's forward f and backward b, t = f + b, transfers c forth and c' back across the
boundary behind a stage, M micro-batches, k in flight, and a from the last backward to the end of the update:

    R(s) = t + c + c' + R(s+1)                                            one micro-batch's round trip
    U(s) = max(M t, M R(s) / k, R(s) + max((M - k) f + (M - 1) b, (M - 1) f + (M - k) b),
               t + c + c' + U(s+1),
               t + R(s+1) + max(M c + c', c + M c'))                      until the last backward of s
    V(s) = max(U(s) + a, f + c + V(s+1))                                  until everything behind s is done

When the first backward of s ends, R(s) has passed and at most k forwards have begun; when the last forward begins, at
most k backwards are left, and R(s) is yet to come.

Of a stage whose replicas split micro-batches, all numbers are those of the one that has a certain row. It sends the row
to the one of the next stage, so all of its way is known; the busiest replicas of two stages may have no row in common.
The bound is the largest over some rows: the last one, whose replica has most where shares are even, and one of every
replica that has more, or is on another kind of device. Replicas that take turns each have their own M, and k, and so
has every queue. Only tensors that the next stage reads count in c. Where none travels back, R(s) = t and U(s) has no
terms of what is behind; where none travels forth either, V(s) has none, and V(s+1) bounds the step by itself. Tied
parameters' reductions count 0.

The work bound is the step that remains if every device computes without pause.

Rank bounds are lower bounds where ranks run several stages, or backwards are in two halves. Let i be what others wait
for of a backward (all of it, or its input half), and w the weight half (0 of whole ones). A backward's way through the
stages takes i of each, so R, U and V hold with i in place of b, and w in a. Beside them, for every rank, with s its
first stage and the sums over its stages:

    way of a micro-batch's forward to s + M sum of (f + i + w) + the least of its stages' reductions + its update
    way of a micro-batch's forward to s + M sum of (f + i) + way of a backward from s to j + w_j + a_j, of any j < s
    way of a micro-batch's forward to s + R(s) + (M - k) f + (M - 1) i + M w + a, of a rank of one stage

The first holds for a rank that computes without a pause. For the second: the last but weight halves that a rank
computes is a backward of s, since those of its later stages come before one of s; it has the way to j yet to go. For
the third: when the first backward of s ends, at most k forwards have begun, and no weight half.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product, repeat
from math import lcm
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.formats.prediction import BoundPart, Term
from autopar.ownership import Replicas, Samples
from autopar.planner.candidate import Candidate, CandidateStage, Family, groups, plain, splits_backward, with_depth
from autopar.planner.costs.model import CostModel
from autopar.planner.costs.queues import Flag, Value, either, larger
from autopar.planner.costs.rank_memory import Backwards, backwards


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
    slowest_s: Value | None = None
    """Of several kinds of devices, when the slowest replica has computed and is updated; its rows may be others'."""

    @classmethod
    def from_array(cls, terms: npt.NDArray[np.floating]) -> StageTerms:
        """Read the six terms that there are always, the two of halves behind them, or the one of several kinds."""
        return cls(*terms[:6])._replace(slowest_s=terms[6]) if len(terms) == 7 else cls(*terms)


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
    busy = larger(larger(stage.work_s, stage.rate * trip), trip + stage.beside_s)
    done = _with_halves(stage, trip, busy + stage.closing_s)
    return Terms(trip, busy, done, _with_slowest(stage, done))


def fold(stage: StageTerms, link: LinkTerms, behind: Terms) -> Terms:
    """Return the terms of a stage in front of the stages ``behind``; scalars and arrays alike."""
    own = stage.forward_s + stage.backward_s
    around = own + link.forth_s + link.back_s
    trip = either(link.back, around + behind.trip_s, own)
    # What a queue takes beyond one message each way, which the round trip has.
    queued = larger(link.forth_work_s + link.back_s, link.forth_s + link.back_work_s) + own - around
    backward = larger(stage.work_s, stage.rate * trip)
    backward = larger(backward, trip + either(link.back, larger(stage.beside_s, queued), stage.beside_s))
    backward = larger(backward, either(link.back, around + behind.backward_s, 0.0))
    later = either(link.forth, stage.forward_s + link.forth_s + behind.done_s, 0.0)
    done = _with_halves(stage, trip, larger(backward + stage.closing_s, later))
    return Terms(trip, backward, done, _with_slowest(stage, larger(done, behind.step_s)))


def _with_halves(stage: StageTerms, trip: Value, done: Value) -> Value:
    """Return when all is done, the weight halves of a stage included."""
    if stage.total_s is None or stage.rest_s is None:
        return done
    return larger(done, larger(stage.total_s, trip + stage.rest_s))


def _with_slowest(stage: StageTerms, step: Value) -> Value:
    """Return when all is done, the slowest replica of a stage of several kinds included."""
    return step if stage.slowest_s is None else larger(step, stage.slowest_s)


def _rows(costs: CostModel, stages: Sequence[CandidateStage]) -> list[Sequence[int]]:
    """Return by row the replicas of all stages that have it; of those that take turns, any.

    Rows are the last, and one of every replica with more of them than the last, or on another kind of device.
    """
    found: list[Sequence[int]] = [(-1,) * len(stages)]
    for stage in (each for each in stages if len(costs.kinds) > 1 or max(each.shares) > each.shares[-1]):
        last = stage.shares[-1], costs.form_of(stage, stage.replicas.width - 1)
        for (rows, form), at in costs.unlike_replicas(stage).items():
            if stage.division == "split" and (rows > last[0] or form != last[1]):
                start = stage.samples[at].start
                found.append([bisect_right(each.samples, start, key=attrgetter("stop")) for each in stages])
    return found


def candidate_bound_s(costs: CostModel, candidate: Candidate) -> float:
    """Return a lower bound of a candidate's simulated seconds per step."""
    return costs.profile.step_overhead_s + max(each.step_s for each in _along_rows(costs, candidate))


def last_row_bound_s(costs: CostModel, candidate: Candidate) -> float:
    """Return what bounds a candidate's step along the last row of a micro-batch, and by any stage's slowest replica.

    Of stages on one kind of device each, that is :func:`candidate_bound_s`.
    """
    stages = candidate.stages
    terms = [placed_terms(costs, stage, candidate.micro_batches) for stage in stages]
    found = last(terms[-1])
    for at in reversed(range(len(stages) - 1)):
        found = fold(terms[at], link_terms(costs, stages[at], stages[at + 1], candidate), found)
    return costs.profile.step_overhead_s + float(found.step_s)


def round_trips(costs: CostModel, candidate: Candidate) -> list[float]:
    """Return the least seconds of one micro-batch's way from each stage to the last one and back."""
    every = zip(*(each.suffixes for each in _along_rows(costs, candidate)), strict=True)
    return [max(float(terms.trip_s) for terms in each) for each in every]


def stage_terms(costs: CostModel, stage: CandidateStage, micro_batches: int, replica: int = -1) -> StageTerms:
    """Return one stage's terms: of a replica of those that split micro-batches."""
    # Of replicas on one kind of device that take turns, the first has the most.
    at = [replica] if stage.division == "split" else costs.unlike_replicas(stage).values()
    counts = [len(stage.samples[each].of(micro_batches)) for each in at]
    forward = [costs.forward_s(stage, each) for each in at]
    backward = [costs.backward_s(stage, each, count) for each, count in zip(at, counts, strict=True)]
    columns = list(zip(forward, backward, counts, strict=True))
    work = max(count * (there + back) for there, back, count in columns)
    beside = max(float(beside_s(*column, stage.warmup)) for column in columns)
    closing = min(costs.replica_exposed_s(stage, each) for each in at) + costs.update_s(stage)
    return StageTerms(min(forward), min(backward), work, closing, max(counts) / stage.warmup, beside)


def placed_terms(costs: CostModel, stage: CandidateStage, micro_batches: int) -> StageTerms:
    """Return one stage's terms, and of several kinds of devices what the slowest replica takes."""
    found = stage_terms(costs, stage, micro_batches)
    if not costs.is_mixed(stage):
        return found
    every = (stage_terms(costs, stage, micro_batches, at) for at in costs.unlike_replicas(stage).values())
    return found._replace(slowest_s=max(float(each.work_s) + float(each.closing_s) for each in every))


def beside_s(forward_s: Value, backward_s: Value, micro_batches: Value, depth: Value) -> Value:
    """Return what a replica computes before its last forward, or behind its first backward, whichever is more."""
    plain = isinstance(depth, int) and isinstance(micro_batches, int)
    idle = micro_batches - (min(depth, micro_batches) if plain else np.minimum(depth, micro_batches))
    most = micro_batches - 1
    return larger(idle * forward_s + most * backward_s, most * forward_s + idle * backward_s)


def link_terms(
    costs: CostModel, before: CandidateStage, after: CandidateStage, candidate: Candidate, row: Sequence[int] = (-1, -1)
) -> LinkTerms:
    """Return the terms of the boundary between two neighbours, for a row."""
    flow = costs.flows.between(before.first, before.stop, after.first, after.stop)
    if not flow.tensors:
        return LinkTerms(False, False, 0.0, 0.0, 0.0, 0.0)
    # What both have of a micro-batch; of replicas that take turns, the nearest.
    own, other = before.samples[row[0]], after.samples[row[1]]
    samples = Samples(max(own.start, other.start), min(own.stop, other.stop))
    count = len(range(0, candidate.micro_batches, lcm(before.period, after.period)))
    sizes, lanes = (flow.bytes_per_sample, flow.gradient_bytes_per_sample), max(before.team, after.team)
    there, returned = (costs.message_bytes(samples, candidate.micro_batch_size, size) / lanes for size in sizes)
    ends = list(product(_ends(costs, before, row[0]), _ends(costs, after, row[1])))
    forth = min(costs.message_s(there, one, other) if one != other else 0.0 for one, other in ends)
    back = min(costs.message_s(returned, other, one) if one != other else 0.0 for one, other in ends)
    back = back if flow.gradients else 0.0
    return LinkTerms(True, flow.gradients > 0, forth, back, count * forth, count * back)


def _ends(costs: CostModel, stage: CandidateStage, replica: int) -> list[int]:
    """Devices that a row of a micro-batch may be on, one of every node."""
    if stage.division == "split":
        return [stage.firsts[replica]]
    topology = costs.links.topology
    return list({(topology.racks[each], topology.nodes[each]): each for each in stage.firsts}.values())


ROUNDING = 1e-12


def work_s(costs: CostModel, family: Family) -> float:
    """Return a lower bound of all plans of a family: every layer on the kind of device, and divided, as suits it best.

    Replicas that take turns, sharding and recomputation only add to a layer's work. At any price of a device's second,
    a step of all devices costs no less than all layers, each where it costs least. Prices are the same for all kinds;
    or such that all layers together cost the same on each, so that slow devices do not count as fast ones.
    """
    kinds = sorted(set(costs.kind_of))
    works = np.stack([layers_work_s(costs, family, kind) for kind in kinds])
    counts, totals = np.array([costs.kind_of.count(kind) for kind in kinds]), works.sum(axis=2)
    alike = np.where(np.isfinite(totals), 1 / np.maximum(totals, np.finfo(float).tiny), 0.0)
    found = 0.0
    for prices in (np.ones(totals.shape), alike)[: len(kinds)]:
        priced = works * np.where(prices > 0, prices, 1.0)[:, :, None]
        found = max(found, float((priced.min(axis=0).sum(axis=1) / (counts @ prices)).max()))
    return costs.profile.step_overhead_s + found


def stages_work_s(costs: CostModel, candidate: Candidate) -> float:
    """Return a lower bound of stages that are given, as they are replicated: their work, divided by their devices."""
    total_s = 0.0
    for stage in candidate.stages:
        for replica, samples in enumerate(stage.samples):
            count = len(samples.of(candidate.micro_batches))
            back_s = costs.backward_s(stage, replica, candidate.micro_batches)
            if splits_backward(candidate.schedule):
                back_s = min(back_s, sum(costs.halves_s(stage, replica, candidate.micro_batches)))
            total_s += stage.team * count * (costs.forward_s(stage, replica) + back_s)
    return costs.profile.step_overhead_s + (1 - ROUNDING) * total_s / len(set(candidate.devices))


def layers_work_s(costs: CostModel, family: Family, kind: int) -> npt.NDArray[np.float64]:
    """Return the least work of a step, ``[queue, layer]``, on any number of one kind of device, together.

    The queues are the device's and the host's (:mod:`autopar.planner.costs.queues`); one that is not known is taken to
    be as long as the device's. No plan takes less than all layers in either.
    """
    halved = splits_backward(family.schedule)
    forms = ((team, costs.form(kind, team)) for team in costs.teams)
    every = (
        _divided_work_s(costs, family, form, Replicas(width).run_by(team))
        for team, form in forms
        if costs.layers[form].has_halves or not halved
        for width in range(1, _most_splitting(costs, family, kind, team) + 1)
    )
    mixed = [(team, costs.form(kind, team)) for team in costs.teams] if costs.mixes else []
    shared = (_shared_work_s(costs, family, form, team) for team, form in mixed)
    least = np.minimum.reduce([*every, *shared], initial=np.inf)
    return np.broadcast_to(least, (2, costs.layer_count)) * family.micro_batches * (1 - ROUNDING)


def _most_splitting(costs: CostModel, family: Family, kind: int, team: Replicas) -> int:
    """Return the most replicas of a kind of device that have rows of every micro-batch."""
    count = costs.kind_of.count(kind) // team.team
    return count if costs.divisible else min(count, family.micro_batch_size)


def _divided_work_s(costs: CostModel, family: Family, form: int, replicas: Replicas) -> npt.NDArray[np.float64]:
    """Return the work of a micro-batch that is divided among replicas, on all of their devices, ``[queue, layer]``."""
    totals = np.zeros((2, costs.layer_count))
    adding = costs.adding(family.micro_batches, replicas.width)
    for rows, count in Counter(costs.shares(family.micro_batch_size, replicas)).items():
        queues = costs.seconds.by_queue(rows, adding, form, split=splits_backward(family.schedule))
        for total, (forward, *ways) in zip(totals, (queues[0], queues[-1]), strict=True):
            total += count * replicas.team * np.diff(forward)
            total += count * replicas.team * _backwards_s(*ways)
    return totals


def _shared_work_s(costs: CostModel, family: Family, form: int, one: Replicas) -> npt.NDArray[np.float64]:
    """Return the least work of a micro-batch's rows where each is on a replica of however many, ``[queue, layer]``."""
    found = []
    for rows in costs.measured_rows(form, family.micro_batch_size):
        queues = costs.seconds.by_queue(rows, 1.0, form, split=splits_backward(family.schedule))
        each = [np.diff(forward) + _backwards_s(*ways) for forward, *ways in (queues[0], queues[-1])]
        found.append(np.stack(each) * one.team * family.micro_batch_size / rows)
    return np.asarray(np.minimum.reduce(found))


def _backwards_s(whole_sums: Sequence[float], *halves_sums: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the seconds of every layer's backward; where some may be whole and some in halves, the fewest."""
    whole: npt.NDArray[np.float64] = np.diff(np.array(whole_sums))
    if not halves_sums:
        return whole
    both: npt.NDArray[np.float64] = np.diff(np.array(halves_sums)).sum(axis=0)
    return np.minimum(whole, both)


class RankTerms(NamedTuple):
    """What the bound of a rank has of one of its stages."""

    stage: StageTerms
    """``backward_s``: what others wait for; ``closing_s``: of the whole rank, with the weight half."""
    weight_s: float
    """Of one micro-batch, where all backwards are in halves."""
    rest_s: float
    """All weight halves of a step."""
    reduced_s: float
    """From the last backward to the end of the reduction."""
    update_s: float
    """Of the whole rank."""


class RankBound(NamedTuple):
    """A lower bound of a step, without what precedes it."""

    synchronisation_s: float
    update_s: float
    compute_s: float
    filling_s: float
    stage: int

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.filling_s + self.compute_s + self.synchronisation_s + self.update_s


def _updates_s(costs: CostModel, candidate: Candidate) -> list[float]:
    """Return by stage the seconds of its rank's updates."""
    found: dict[int, float] = {}
    for chunks in groups(candidate.stages):
        found |= dict.fromkeys(chunks, sum(costs.update_s(candidate.stages[at]) for at in chunks))
    return [found[at] for at in range(len(found))]


def _rank_terms(
    costs: CostModel, stage: CandidateStage, at: int, count: int, computed: Backwards, update_s: float
) -> RankTerms:
    """Return the terms of a stage's replica ``at``; ``computed`` is how its backwards are."""
    whole, split, ends_whole = computed
    forward_s, backward_s = costs.forward_s(stage, at), costs.backward_s(stage, at, count)
    input_s, weight_s = costs.halves_s(stage, at, count) if split else (backward_s, 0.0)
    way_s = min(input_s, backward_s) if whole else input_s
    work_s = count * forward_s + whole * backward_s + split * input_s
    late_s = 0.0 if whole else weight_s
    reduced_s = costs.replica_exposed_s(stage, at, split=not ends_whole)
    beside = float(beside_s(forward_s, way_s, count, stage.warmup))
    closing_s = late_s + reduced_s + update_s
    terms = StageTerms(forward_s, way_s, work_s, closing_s, count / stage.warmup, beside)
    return RankTerms(terms, late_s, split * weight_s, reduced_s, update_s)


def least_s(costs: CostModel, candidate: Candidate) -> float:
    """Return a lower bound of a candidate's simulated seconds per step."""
    return costs.profile.step_overhead_s + max(each.step_s for each in _along_rows(costs, candidate, by_rank=True))


def rank_bounds(
    candidate: Candidate, every: Sequence[RankTerms], links: Sequence[LinkTerms], behind: Sequence[Terms]
) -> Iterator[RankBound]:
    """Yield the bounds of all ranks; ``behind`` are the terms of every stage with those that follow."""
    # The least seconds before a stage's first forward; none behind a boundary that nothing crosses.
    ahead_s = [0.0]
    for terms, link in zip(every, links, strict=False):
        ahead_s.append(ahead_s[-1] + float(terms.stage.forward_s) + float(link.forth_s) if link.forth else 0.0)
    for chunks in groups(candidate.stages):
        own, first = [every[at] for at in chunks], chunks[0]
        start_s = min(ahead_s[at] for at in chunks)
        work_s = sum(float(each.stage.work_s) for each in own)
        rest_s, update_s = sum(each.rest_s for each in own), own[0].update_s
        yield RankBound(min(each.reduced_s for each in own), update_s, work_s + rest_s, start_s, first)
        if len(chunks) == 1:
            single, started = own[0].stage, min(candidate.stages[first].warmup, candidate.micro_batches)
            left_s = work_s + rest_s - started * float(single.forward_s) - float(single.backward_s)
            once_s = start_s + float(behind[first].trip_s)
            yield RankBound(own[0].reduced_s, update_s, left_s, once_s, first)
        if not all(link.back for link in links[first : chunks[-1]]):
            continue
        back_s = 0.0
        for terms, link in zip(every[first - 1 :: -1], links[first - 1 :: -1], strict=True) if first else ():
            if not link.back:
                break
            back_s += float(link.back_s) + float(terms.stage.backward_s)
            yield RankBound(terms.reduced_s, terms.update_s, work_s + terms.weight_s, start_s + back_s, first)


class _BoundPart(NamedTuple):
    seconds: float
    term: Term
    stage: int


class _CandidateTerms:
    """The terms of a candidate's stages and boundaries along a row, and of all its suffixes."""

    def __init__(self, costs: CostModel, candidate: Candidate, row: Sequence[int], *, by_rank: bool) -> None:
        stages, count = candidate.stages, candidate.micro_batches
        ends = zip(pairwise(stages), pairwise(row), strict=True)
        self.links = [link_terms(costs, *pair, candidate, at) for pair, at in ends]
        ranks: list[RankTerms] = []
        if by_rank:
            every = zip(stages, row, repeat(count), backwards(candidate), _updates_s(costs, candidate), strict=False)
            ranks = [_rank_terms(costs, *each) for each in every]
            self.stages, self.weights_s = [each.stage for each in ranks], [each.weight_s for each in ranks]
        else:
            self.stages = [stage_terms(costs, stage, count, at) for stage, at in zip(stages, row, strict=True)]
            self.weights_s = [0.0] * len(row)
        ahead = zip(self.stages[-2::-1], self.links[::-1], strict=True)
        found = accumulate(ahead, lambda behind, each: fold(each[0], each[1], behind), initial=last(self.stages[-1]))
        self.suffixes = list(found)[::-1]
        bounds = rank_bounds(candidate, ranks, self.links, self.suffixes) if by_rank else ()
        self.rank = max(bounds, key=lambda each: each.seconds, default=None)
        self.step_s = max(float(self.suffixes[0].step_s), self.rank.seconds if self.rank else 0.0)

    def done(self, index: int, updates_s: Sequence[float]) -> list[_BoundPart]:
        """Return the parts of V(``index``), of which ``updates_s`` are by stage."""
        stage, filling = self.stages[index], 0.0
        while index < len(self.links) and self.links[index].forth:
            later = float(stage.forward_s + self.links[index].forth_s)
            if self.suffixes[index].backward_s + stage.closing_s >= later + self.suffixes[index + 1].done_s:
                break
            filling += later
            index += 1
            stage = self.stages[index]
        update_s, weight_s = updates_s[index], self.weights_s[index]
        further, bound = self.backward(index)
        return [
            _BoundPart(filling + further, "filling", bound.stage),
            _BoundPart(weight_s, "compute", index),
            _BoundPart(float(stage.closing_s) - update_s - weight_s, "synchronisation", index),
            _BoundPart(update_s, "update", index),
            bound,
        ]

    def backward(self, index: int) -> tuple[float, _BoundPart]:
        """Return the parts of U(``index``): seconds of filling, and what binds behind them."""
        filling = 0.0
        while True:
            stage, until = self.stages[index], float(self.suffixes[index].backward_s)
            if stage.work_s >= until:
                return filling, _BoundPart(float(stage.work_s), "compute", index)
            trip_s = float(stage.rate * self.suffixes[index].trip_s)
            if trip_s >= until:
                return filling, _BoundPart(trip_s, "round trip", index)
            # The first round trip fills the stages behind; what is in flight then is all that is computed meanwhile.
            once_s = float(self.suffixes[index].trip_s)
            if once_s + stage.beside_s >= until:
                return filling + once_s, _BoundPart(float(stage.beside_s), "compute", index)
            link, own = self.links[index], float(stage.forward_s + stage.backward_s)
            around = own + float(link.forth_s) + float(link.back_s)
            if around + self.suffixes[index + 1].backward_s < until:
                filling += own + float(self.suffixes[index + 1].trip_s)
                queued = max(link.forth_work_s + link.back_s, link.forth_s + link.back_work_s)
                return filling, _BoundPart(float(queued), "link", index)
            filling += around
            index += 1


def _along_rows(costs: CostModel, candidate: Candidate, *, by_rank: bool = False) -> list[_CandidateTerms]:
    """Return the terms of a candidate along every row that bounds it."""
    return [_CandidateTerms(costs, candidate, row, by_rank=by_rank) for row in _rows(costs, candidate.stages)]


def binding(costs: CostModel, candidate: Candidate) -> tuple[BoundPart, ...]:
    """Return what the lower bound of a candidate is the sum of, largest first.

    It is the chain of terms that its recursion takes; of several that are as large, the one of the earliest stage.
    """
    every = _along_rows(costs, candidate, by_rank=not plain(candidate.schedule))
    found = max(every, key=lambda each: each.step_s)
    own = found.rank
    if own is not None and own.seconds > found.suffixes[0].step_s:
        terms: tuple[Term, ...] = "synchronisation", "update", "compute", "filling"
        chain = [_BoundPart(seconds, term, own.stage) for seconds, term in zip(own, terms, strict=False)]
    else:
        start = next(index for index, each in enumerate(found.suffixes) if each.done_s >= found.suffixes[0].step_s)
        chain = found.done(start, _updates_s(costs, candidate))
    totals: dict[tuple[Term, int], float] = {("overhead", 0): costs.profile.step_overhead_s}
    for part in chain:
        totals[part.term, part.stage] = totals.get((part.term, part.stage), 0.0) + part.seconds
    ranked = sorted(totals.items(), key=lambda each: (-each[1], each[0][1]))
    return tuple(
        BoundPart(term=term, stage=stage, seconds=seconds, full=term == "round trip" and _full(costs, candidate, stage))
        for (term, stage), seconds in ranked
        if seconds > 0
    )


def _full(costs: CostModel, candidate: Candidate, index: int) -> bool:
    """Whether a stage's memory holds no more micro-batches in flight."""
    stage = candidate.stages[index]
    if stage.warmup >= stage.replicas.most(candidate.micro_batches):
        return False
    return costs.shortfall(with_depth(candidate, index, stage.warmup + 1), index) > 0
