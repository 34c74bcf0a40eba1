"""Rank bounds: lower bounds where ranks run several stages, or backwards are in two halves (docs/design/bound.md).

Let i be what others wait for of a backward (all of it, or its input half), w the weight half (0 of whole ones), and
otherwise as in :mod:`autopar.planner.bounds.chain`. A backward's way through the stages takes i of each, so R, U and V
hold with i in place of b, and w in a. Beside them, for every rank, with s its first stage and the sums over its stages:

    way of a micro-batch's forward to s + M sum of (f + i + w) + the least of its stages' reductions + its update
    way of a micro-batch's forward to s + M sum of (f + i) + way of a backward from s to j + w_j + a_j, of any j < s
    way of a micro-batch's forward to s + R(s) + (M - k) f + (M - 1) i + M w + a, of a rank of one stage

The first holds for a rank that computes without a pause. For the second: the last but weight halves that a rank
computes is a backward of s, since those of its later stages come before one of s; it has the way to j yet to go. For
the third: when the first backward of s ends, at most k forwards have begun, and no weight half.

Binding: which terms a candidate's lower bound is the sum of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from autopar.formats.prediction import BoundPart, Term
from autopar.planner.bounds.chain import LinkTerms, StageTerms, Terms, beside_s, candidate_terms, link_terms, suffixes
from autopar.planner.candidate import Candidate, CandidateStage, groups, plain
from autopar.planner.costs.in_flight import Backwards, backwards
from autopar.planner.costs.model import CostModel


class RankTerms(NamedTuple):
    """What the bounds of a candidate are made of, by stage or boundary."""

    stages: list[StageTerms]
    """``backward_s``: what others wait for; ``closing_s``: of the whole rank, with the weight half."""
    links: list[LinkTerms]
    weight_s: list[float]
    """Of one micro-batch, where all backwards are in halves."""
    rest_s: list[float]
    """All weight halves of a step."""
    reduced_s: list[float]
    """From a stage's last backward to the end of its reduction."""
    update_s: list[float]
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


def rank_terms(costs: CostModel, candidate: Candidate) -> RankTerms:
    """Return the terms of stages that split micro-batches, those of the last replica."""
    found = RankTerms([], [], [], [], [], [0.0] * len(candidate.stages))
    for chunks in groups(candidate.stages):
        update_s = sum(costs.update_s(candidate.stages[stage]) for stage in chunks)
        for stage in chunks:
            found.update_s[stage] = update_s
    for placed, computed in zip(candidate.stages, backwards(candidate), strict=True):
        _add_stage(costs, found, placed, candidate.micro_batches, computed)
    found.links.extend(link_terms(costs, *ends, candidate) for ends in pairwise(candidate.stages))
    return found


def _add_stage(
    costs: CostModel, terms: RankTerms, stage: CandidateStage, count: int, stage_backwards: Backwards
) -> None:
    """Add a stage's terms; ``stage_backwards`` is how its backwards are."""
    whole, split, ends_whole = stage_backwards
    at, update_s = len(stage.devices) - 1, terms.update_s[len(terms.stages)]
    forward_s, backward_s = costs.forward_s(stage, at), costs.backward_s(stage, at, count)
    input_s, weight_s = costs.halves_s(stage, at, count) if split else (backward_s, 0.0)
    way_s = min(input_s, backward_s) if whole else input_s
    work_s = count * forward_s + whole * backward_s + split * input_s
    late_s = 0.0 if whole else weight_s
    reduced_s = costs.replica_exposed_s(stage, at, split=not ends_whole)
    beside = float(beside_s(forward_s, way_s, count, stage.warmup))
    closing_s = late_s + reduced_s + update_s
    terms.stages.append(StageTerms(forward_s, way_s, work_s, closing_s, count / stage.warmup, beside))
    terms.weight_s.append(late_s)
    terms.rest_s.append(split * weight_s)
    terms.reduced_s.append(reduced_s)


def least_s(costs: CostModel, candidate: Candidate) -> float:
    """Return a lower bound of a candidate's simulated seconds per step."""
    terms = rank_terms(costs, candidate)
    behind = list(suffixes(terms.stages, terms.links))[::-1]
    own_s = max(each.seconds for each in rank_bounds(candidate, terms, behind))
    return costs.profile.step_overhead_s + max(float(behind[0].step_s), own_s)


def rank_bounds(candidate: Candidate, terms: RankTerms, behind: Sequence[Terms]) -> Iterator[RankBound]:
    """Yield the bounds of all ranks; ``behind`` are the terms of every stage with those that follow."""
    ahead_s = _ways_forth(terms)
    for chunks in groups(candidate.stages):
        start_s = min(ahead_s[stage] for stage in chunks)
        work_s = sum(float(terms.stages[stage].work_s) for stage in chunks)
        rest_s = sum(terms.rest_s[stage] for stage in chunks)
        first, update_s = chunks[0], terms.update_s[chunks[0]]
        yield RankBound(min(terms.reduced_s[stage] for stage in chunks), update_s, work_s + rest_s, start_s, first)
        if len(chunks) == 1:
            alone, started = terms.stages[first], min(candidate.stages[first].warmup, candidate.micro_batches)
            left_s = work_s + rest_s - started * float(alone.forward_s) - float(alone.backward_s)
            once_s = start_s + float(behind[first].trip_s)
            yield RankBound(terms.reduced_s[first], update_s, left_s, once_s, first)
        if not all(link.back for link in terms.links[first : chunks[-1]]):
            continue
        back_s = 0.0
        for stage in reversed(range(first)):
            link, own = terms.links[stage], terms.stages[stage]
            if not link.back:
                break
            back_s += float(link.back_s) + float(own.backward_s)
            compute_s = work_s + terms.weight_s[stage]
            yield RankBound(terms.reduced_s[stage], terms.update_s[stage], compute_s, start_s + back_s, first)


def _ways_forth(terms: RankTerms) -> list[float]:
    """Return the least seconds before a stage's first forward; none behind a boundary that nothing crosses."""
    found = [0.0]
    for stage, link in zip(terms.stages, terms.links, strict=False):
        found.append(found[-1] + float(stage.forward_s) + float(link.forth_s) if link.forth else 0.0)
    return found


class _BoundPart(NamedTuple):
    seconds: float
    term: Term
    stage: int


class _CandidateTerms:
    """The terms of a candidate's stages and boundaries, and of all its suffixes."""

    def __init__(self, costs: CostModel, candidate: Candidate) -> None:
        terms = None if plain(candidate.schedule) else rank_terms(costs, candidate)
        if terms is None:
            self.stages, self.links = candidate_terms(costs, candidate)
            self.updates_s = [costs.update_s(stage) for stage in candidate.stages]
            self.weights_s = [0.0] * len(candidate.stages)
        else:
            self.stages, self.links = terms.stages, terms.links
            self.updates_s, self.weights_s = terms.update_s, terms.weight_s
        self.suffixes = list(suffixes(self.stages, self.links))[::-1]
        self.ranks = () if terms is None else tuple(rank_bounds(candidate, terms, self.suffixes))

    def done(self, index: int) -> list[_BoundPart]:
        """Return the parts of V(``index``)."""
        stage, filling = self.stages[index], 0.0
        while index < len(self.links) and self.links[index].forth:
            later = float(stage.forward_s + self.links[index].forth_s)
            if self.suffixes[index].backward_s + stage.closing_s >= later + self.suffixes[index + 1].done_s:
                break
            filling += later
            index += 1
            stage = self.stages[index]
        update_s, weight_s = self.updates_s[index], self.weights_s[index]
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


def binding(costs: CostModel, candidate: Candidate) -> tuple[BoundPart, ...]:
    """Return what the lower bound of a candidate is the sum of, largest first.

    It is the chain of terms that its recursion takes; of several that are as large, the one of the earliest stage.
    """
    found = _CandidateTerms(costs, candidate)
    own = max(found.ranks, key=lambda each: each.seconds, default=None)
    if own is not None and own.seconds > found.suffixes[0].step_s:
        terms: tuple[Term, ...] = "synchronisation", "update", "compute", "filling"
        chain = [_BoundPart(seconds, term, own.stage) for seconds, term in zip(own, terms, strict=False)]
    else:
        start = next(index for index, each in enumerate(found.suffixes) if each.done_s >= found.suffixes[0].step_s)
        chain = found.done(start)
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
    if stage.warmup >= stage.turns(0, candidate.micro_batches):
        return False
    deeper = stage._replace(warmup=stage.warmup + 1)
    stages = (*candidate.stages[:index], deeper, *candidate.stages[index + 1 :])
    return costs.shortfall(candidate._replace(stages=stages), index) > 0
