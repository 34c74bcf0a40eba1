"""Binding: which terms a candidate's lower bound is the sum of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from autopar.formats.predicted import BoundPart, Term
from autopar.planner.bounds.chain import LinkTerms, StageTerms, Terms, fold, last, link_terms, stage_terms
from autopar.planner.bounds.rank_bounds import RankBound, rank_bounds, rank_terms
from autopar.planner.candidate import Candidate
from autopar.planner.chunks import plain
from autopar.planner.costs.model import CostModel

_TERMS: tuple[Term, ...] = ("synchronisation", "update", "compute")


class _Part(NamedTuple):
    seconds: float
    term: Term
    stage: int


class _Bound:
    """The terms of a candidate's stages and boundaries, and of all its suffixes."""

    def __init__(self, costs: CostModel, candidate: Candidate) -> None:
        stages = candidate.stages
        self.stages: list[StageTerms]
        self.links: list[LinkTerms]
        self.ranks: tuple[RankBound, ...] = ()
        if plain(candidate.schedule):
            self.stages = [stage_terms(costs, stage, candidate.micro_batches) for stage in stages]
            self.links = [link_terms(costs, *ends, candidate) for ends in pairwise(stages)]
            self.updates_s, self.weights_s = [costs.update_s(stage) for stage in stages], [0.0] * len(stages)
        else:
            terms = rank_terms(costs, candidate)
            self.stages, self.links = terms.stages, terms.links
            self.updates_s, self.weights_s = terms.update_s, terms.weight_s
            self.ranks = tuple(rank_bounds(candidate, terms))
        self.suffixes: list[Terms] = [last(self.stages[-1])]
        for stage, link in zip(self.stages[-2::-1], self.links[::-1], strict=True):
            self.suffixes.insert(0, fold(stage, link, self.suffixes[0]))

    def done(self, index: int) -> list[_Part]:
        """Return the parts of V(``index``)."""
        stage, filling = self.stages[index], 0.0
        first = index
        while index < len(self.links) and self.links[index].forth:
            later = float(stage.forward_s + self.links[index].forth_s)
            if self.suffixes[index].backward_s + stage.closing_s >= later + self.suffixes[index + 1].done_s:
                break
            filling += later
            index += 1
            stage = self.stages[index]
        update_s, weight_s = self.updates_s[index], self.weights_s[index]
        parts = [
            _Part(filling, "filling", first),
            _Part(weight_s, "compute", index),
            _Part(float(stage.closing_s) - update_s - weight_s, "synchronisation", index),
            _Part(update_s, "update", index),
        ]
        return [*parts, *self.backward(index)]

    def backward(self, index: int) -> list[_Part]:
        """Return the parts of U(``index``)."""
        first, filling = index, 0.0
        while True:
            stage, until = self.stages[index], float(self.suffixes[index].backward_s)
            if stage.work_s >= until:
                return [_Part(filling, "filling", first), _Part(float(stage.work_s), "compute", index)]
            trip_s = float(stage.rate * self.suffixes[index].trip_s)
            if trip_s >= until:
                return [_Part(filling, "filling", first), _Part(trip_s, "round trip", index)]
            # The first round trip fills the stages behind; what is in flight then is all that is computed meanwhile.
            once_s = float(self.suffixes[index].trip_s)
            if once_s + stage.beside_s >= until:
                return [_Part(filling + once_s, "filling", first), _Part(float(stage.beside_s), "compute", index)]
            link, own = self.links[index], float(stage.forward_s + stage.backward_s)
            around = own + float(link.forth_s) + float(link.back_s)
            if around + self.suffixes[index + 1].backward_s < until:
                filling += own + float(self.suffixes[index + 1].trip_s)
                queued = max(link.forth_work_s + link.back_s, link.forth_s + link.back_work_s)
                return [_Part(filling, "filling", first), _Part(float(queued), "link", index)]
            filling += around
            index += 1


def binding(costs: CostModel, candidate: Candidate) -> tuple[BoundPart, ...]:
    """Return what the lower bound of a candidate is the sum of, largest first.

    It is the chain of terms that its recursion takes; of several that are as large, the one of the earliest stage.
    """
    found = _Bound(costs, candidate)
    own = max(found.ranks, key=lambda each: each.seconds, default=None)
    if own is not None and own.seconds > found.suffixes[0].step_s:
        seconds = (own.synchronisation_s, own.update_s, own.compute_s)
        chain = [_Part(each, term, own.stage) for each, term in zip(seconds, _TERMS, strict=True)]
        chain.append(_Part(own.filling_s, "filling", own.stage))
    else:
        start = next(index for index, each in enumerate(found.suffixes) if each.done_s >= found.suffixes[0].step_s)
        chain = found.done(start)
    parts = _joined([_Part(costs.profile.step_overhead_s, "overhead", 0), *chain])
    parts = sorted((part for part in parts if part.seconds > 0), key=lambda part: (-part.seconds, part.stage))
    return tuple(
        BoundPart(
            term=part.term,
            stage=part.stage,
            seconds=part.seconds,
            full=part.term == "round trip" and _full(costs, candidate, part.stage),
        )
        for part in parts
    )


def _joined(parts: Sequence[_Part]) -> list[_Part]:
    """Return parts with one of every term and stage, and the filling that of the stage that the chain ends with."""
    seconds: dict[tuple[Term, int], float] = {}
    last = next(part.stage for part in reversed(parts) if part.term != "filling")
    for part in parts:
        key = (part.term, last if part.term == "filling" else part.stage)
        seconds[key] = seconds.get(key, 0.0) + part.seconds
    return [_Part(total, *key) for key, total in seconds.items()]


def _full(costs: CostModel, candidate: Candidate, index: int) -> bool:
    """Whether a stage's memory holds no more micro-batches in flight."""
    stages = list(candidate.stages)
    stage = stages[index]
    if stage.warmup >= stage.turns(0, candidate.micro_batches):
        return False
    stages[index] = stage._replace(warmup=stage.warmup + 1)
    return costs.shortfall(candidate._replace(stages=tuple(stages)), index) > 0
