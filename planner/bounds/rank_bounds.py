"""Rank bounds: lower bounds where ranks run several stages, or backwards are in two halves (docs/planning.md).

Let i be what others wait for of a backward (all of it, or its input half), w the weight half (0 of whole ones), and
otherwise as in :mod:`autopar.planner.bounds.chain`. A backward's way through the stages takes i of each, so R, U and V
hold with i in place of b, and w in a. Beside them, for every rank, with s its first stage and the sums over its stages:

    way of a micro-batch's forward to s + M sum of (f + i + w) + the least of its stages' reductions + its update
    way of a micro-batch's forward to s + M sum of (f + i) + way of a backward from s to k + w_k + a_k, of any k < s

The first holds for a rank that computes without a pause. For the second: the last but weight halves that a rank
computes is a backward of s, since those of its later stages come before one of s; it has the way to k yet to go.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from autopar.planner.bounds.chain import LinkTerms, StageTerms, beside_s, fold, last, link_terms
from autopar.planner.candidate import Candidate, Placed
from autopar.planner.chunks import groups
from autopar.planner.costs.model import CostModel
from autopar.planner.costs.moments import Backwards, backwards


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

    filling_s: float
    compute_s: float
    synchronisation_s: float
    update_s: float
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


def _add_stage(costs: CostModel, found: RankTerms, stage: Placed, count: int, computed: Backwards) -> None:
    """Add a stage's terms; ``computed`` is how its backwards are."""
    whole, split, ends_whole = computed
    at, update_s = len(stage.devices) - 1, found.update_s[len(found.stages)]
    forward_s, backward_s = costs.forward_s(stage, at), costs.backward_s(stage, at, count)
    input_s, weight_s = costs.halves_s(stage, at, count) if split else (backward_s, 0.0)
    way_s = min(input_s, backward_s) if whole else input_s
    work_s = count * forward_s + whole * backward_s + split * input_s
    late_s = 0.0 if whole else weight_s
    reduced_s = costs.replica_exposed_s(stage, at, split=not ends_whole)
    beside = float(beside_s(forward_s, way_s, count, stage.warmup))
    closing_s = late_s + reduced_s + update_s
    found.stages.append(StageTerms(forward_s, way_s, work_s, closing_s, count / stage.warmup, beside))
    found.weight_s.append(late_s)
    found.rest_s.append(split * weight_s)
    found.reduced_s.append(reduced_s)


def least_s(costs: CostModel, candidate: Candidate) -> float:
    """Return a lower bound of a candidate's simulated seconds per step."""
    terms = rank_terms(costs, candidate)
    found = last(terms.stages[-1])
    for stage, link in zip(terms.stages[-2::-1], terms.links[::-1], strict=True):
        found = fold(stage, link, found)
    own_s = max(each.seconds for each in rank_bounds(candidate, terms))
    return costs.profile.step_overhead_s + max(float(found.step_s), own_s)


def rank_bounds(candidate: Candidate, terms: RankTerms) -> Iterator[RankBound]:
    """Yield the bounds of all ranks."""
    ahead_s = _ways_forth(terms)
    for chunks in groups(candidate.stages):
        start_s = min(ahead_s[stage] for stage in chunks)
        work_s = sum(float(terms.stages[stage].work_s) for stage in chunks)
        rest_s = sum(terms.rest_s[stage] for stage in chunks)
        first, update_s = chunks[0], terms.update_s[chunks[0]]
        yield RankBound(start_s, work_s + rest_s, min(terms.reduced_s[stage] for stage in chunks), update_s, first)
        if not all(link.back for link in terms.links[first : chunks[-1]]):
            continue
        back_s = 0.0
        for stage in reversed(range(first)):
            link, own = terms.links[stage], terms.stages[stage]
            if not link.back:
                break
            back_s += float(link.back_s) + float(own.backward_s)
            compute_s = work_s + terms.weight_s[stage]
            yield RankBound(start_s + back_s, compute_s, terms.reduced_s[stage], terms.update_s[stage], first)


def _ways_forth(terms: RankTerms) -> list[float]:
    """Return the least seconds before a stage's first forward; none behind a boundary that nothing crosses."""
    found = [0.0]
    for stage, link in zip(terms.stages, terms.links, strict=False):
        found.append(found[-1] + float(stage.forward_s) + float(link.forth_s) if link.forth else 0.0)
    return found
