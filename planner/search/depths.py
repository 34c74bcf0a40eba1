"""Depths: how many micro-batches the stages of a plan keep in flight, and what they recompute for it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, takewhile
from math import ceil, log, prod
from typing import NamedTuple

from autopar.planner.bounds import link_terms, round_trips
from autopar.planner.candidate import Candidate, CandidateStage, Family, with_depths
from autopar.planner.costs import memoize
from autopar.planner.costs.layers import Span
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.search.depth_limits import LEAD

MANY_SETS = 32
MANY_STAGES = 32
AHEAD = (1.0, 1.5, 2.0, 3.0)
FINER = 1.02
ROUNDS = 3
ROUNDING = 1e-9
MOST_VECTORS = 20_000
SLOPES = (2.0, 3.0, 1.5, 4.0, 1.0)
"""How many more than the stage behind a stage keeps in flight; 1 and 2 are DAPPLE's PA and PB."""


class DepthChoices(NamedTuple):
    """Candidates that differ in depths."""

    candidates: list[Candidate]
    complete: bool
    """Whether no other depths are possible."""
    closest: tuple[int, Candidate] | None
    """Of the candidates that do not fit, the one that lacks least, and how many bytes."""


def depth_choices(
    costs: CostModel,
    family: Family,
    stages: Sequence[CandidateStage],
    spans: Sequence[Span],
    *,
    exact: bool,
    few: bool = False,
) -> DepthChoices:
    """Return the candidates whose stages keep at most their ``warmup`` in flight, and fit; all, if ``exact``, of few.

    ``spans`` are, by stage, the levels of recomputation of which the least that fits is taken.
    """
    vectors, complete = _vectors(costs, family, stages, spans, exact=exact, few=few)
    found: list[Candidate] = []
    closest: tuple[int, Candidate] | None = None
    least = _least(stages, family.micro_batches)
    spare = [] if family.schedule == "gpipe" or least in vectors else [least]
    for vector in (*vectors, *spare):
        if found and vector in spare:
            # What holds least is for plans that fit no other way: a stage that leads another holds more messages.
            continue
        candidate, short = least_recomputed(costs, family, with_depths(family, stages, vector).stages, spans)
        if short <= 0:
            found.append(candidate)
        elif closest is None or short < closest[0]:
            closest = (short, candidate)
    return DepthChoices(found, complete, closest)


def _vectors(
    costs: CostModel,
    family: Family,
    stages: Sequence[CandidateStage],
    spans: Sequence[Span],
    *,
    exact: bool,
    few: bool,
) -> tuple[list[tuple[int, ...]], bool]:
    """Return the depths to try, and whether no others are possible."""
    possible = prod(stage.warmup for stage in stages)
    if family.schedule == "gpipe":
        return [tuple(stage.turns(0, family.micro_batches) for stage in stages)], True
    if exact and possible <= MOST_VECTORS:
        return _all(stages, family.micro_batches), True
    pacing = _Pacing(costs, family, stages, spans)
    timed = pacing.vectors()
    if not few or not timed:
        timed = [*pacing.round_trip_vectors(), *timed]
    steady = not timed or (len(stages) <= MANY_STAGES and not few)
    usual = _steady_depths(stages, family.micro_batches) if steady else ()
    return list(dict.fromkeys((*usual, *timed))), possible <= 1


def span_of(costs: CostModel, family: Family, options: PlanOptions, stage: CandidateStage) -> Span:
    """Return how many layers of a stage the options let be recomputed."""
    levels = costs.recompute_levels(family.micro_batch_size, costs.kind_of[stage.devices[0]])
    whole = stage.stop - stage.first
    return Span(levels, whole if options.recompute == "full" else 0, 0 if options.recompute == "none" else whole)


def _all(stages: Sequence[CandidateStage], micro_batches: int) -> list[tuple[int, ...]]:
    """Every choice of depths; no stage has more in flight than the stage before, which would deadlock."""
    found: list[tuple[tuple[int, ...], int]] = [((), 0)]
    for stage in reversed(stages):
        own = [(depth, min(micro_batches, depth * stage.turning)) for depth in range(1, stage.warmup + 1)]
        found = [((depth, *others), flying) for others, behind in found for depth, flying in own if flying >= behind]
    return [vector for vector, _ in found]


def _steady_depths(stages: Sequence[CandidateStage], micro_batches: int) -> Iterator[tuple[int, ...]]:
    """Depths that grow steadily from the last stage to the first, as far as they fit; and as deep as fits."""
    for slope in (*SLOPES, float(micro_batches)):
        vector: list[int] = []
        allowed = micro_batches
        for behind, stage in zip(reversed(range(len(stages))), stages, strict=True):
            wanted = allowed if slope == micro_batches else min(allowed, 1 + int(slope * behind))
            # Replicas that take turns keep as many between them as one that does not.
            depth = min(stage.warmup, -(-wanted // stage.turning))
            if min(micro_batches, depth * stage.turning) > allowed:
                depth = allowed // stage.turning
            if depth == 0:
                # Replicas that take turns have one each in flight at least: more than the stage before has.
                break
            vector.append(depth)
            allowed = min(allowed, depth * stage.turning)
        else:
            yield tuple(vector)


def _quickest(pace_s: float, slowdown: float, keeping: Callable[[float], tuple[int, ...]]) -> float | None:
    """Return the quickest pace that is kept, from one to another so many times as slow; None where none is."""
    paces = [pace_s * FINER**power for power in range(2 + int(log(slowdown, FINER)))]
    at = bisect_left(paces, True, key=lambda each: bool(keeping(each)))
    return None if at == len(paces) else paces[at]


class _Behind(NamedTuple):
    """What the stages behind ask of the depth of the next one before them.

    From stage a, of k in flight, to stage b, of l: b begins the backward of a micro-batch behind the forward of the one
    that is l - 1 later, which a has sent behind the backward of the one that is k earlier. A micro-batch's way from a
    to b and back hence takes no more than k - l + 1 micro-batches' time.
    """

    in_flight: int = 1
    ahead: float = 0.0

    def depth(self, family: Family, stage: CandidateStage, trips: float) -> int:
        """Return with how many in flight a stage keeps the pace, of which its round trip takes so many times."""
        wanted = max(self.in_flight, min(family.micro_batches, ceil((trips + self.ahead) * (1 - ROUNDING))))
        return min(-(-wanted // stage.turning), stage.turns(0, family.micro_batches))

    def before(self, family: Family, stage: CandidateStage, depth: int, waiting: float) -> _Behind:
        """Return what a stage asks, too, which waits for those behind as many paces as ``waiting`` is below 0."""
        in_flight = min(family.micro_batches, depth * stage.turning)
        return _Behind(in_flight, max(self.ahead, in_flight - 1 + waiting))


class _Pacing:
    """Depths with which stages keep a pace; none, (), where they cannot."""

    def __init__(
        self, costs: CostModel, family: Family, stages: Sequence[CandidateStage], spans: Sequence[Span]
    ) -> None:
        self.costs, self.family, self.stages, self.spans = costs, family, stages, spans
        self.frame = Candidate(*family, tuple(stages))
        self.turns = [stage.turns(0, family.micro_batches) for stage in stages]
        self.free_s = [self._own_s(index, stage) for index, stage in enumerate(stages)]
        """What each stage computes of a micro-batch with nothing recomputed."""
        self.pace_s = max(self._paced_s(index, own_s) for index, own_s in enumerate(self.free_s))
        """The busiest stage's."""

    def round_trip_vectors(self) -> list[tuple[int, ...]]:
        """Depths for which stages do not wait: as many in flight as the busiest one runs in a micro-batch's round trip.

        More are in flight where that helps against uneven stages. Where they do not fit, the stages' pace is taken as
        much slower as it must be: with so many in flight they cannot keep the quicker one anyway.
        """
        if self.pace_s <= 0:
            return []
        trips = round_trips(self.costs, self.frame)
        most = [span.within(each.first, each.stop)[-1] for each, span in zip(self.stages, self.spans, strict=True)]
        least = [stage._replace(recompute=each) for stage, each in zip(self.stages, most, strict=True)]
        keeping = partial(self._trip_depths, trips, least)
        paces = [self.pace_s / more for more in AHEAD]
        found = [*takewhile(bool, map(keeping, paces))]
        if len(found) < len(paces):
            slower_s = _quickest(paces[len(found)], trips[0] / paces[len(found)], keeping)
            found += [] if slower_s is None else [keeping(slower_s)]
        return found

    def _trip_depths(self, trips: Sequence[float], least: Sequence[CandidateStage], pace_s: float) -> tuple[int, ...]:
        """Return depths for round trips, with which the stages fit that hold ``least``."""
        vector: list[int] = []
        behind = _Behind()
        for stage, trip_s, own_s in zip(reversed(self.stages), reversed(trips), reversed(self.free_s), strict=True):
            depth = behind.depth(self.family, stage, trip_s / pace_s)
            if depth > stage.warmup:
                return ()
            vector.insert(0, depth)
            behind = behind.before(self.family, stage, depth, (own_s - trip_s) / pace_s)
        candidate = with_depths(self.family, least, vector)
        fits = all(self.costs.shortfall(candidate, index) <= 0 for index in range(len(least)))
        return tuple(vector) if fits else ()

    def vectors(self) -> list[tuple[int, ...]]:
        """Return the depths of the quickest pace that can be kept, then deeper ones that still keep it.

        Each stage has as many in flight as the pace needs, and recomputes as little as fits that.
        """
        if self.pace_s <= 0:
            return []
        links = [link_terms(self.costs, *pair, self.frame) for pair in pairwise(self.stages)]
        links_s = [*(float(each.forth_s + each.back_s) if each.back else None for each in links), None]
        # Slower than one micro-batch after the other, with everything recomputed, is no pace.
        slowest_s = sum(self.free_s) + sum(link_s or 0.0 for link_s in links_s)
        keeping = partial(self._keeping, links_s)
        pace_s = _quickest(self.pace_s, max(1.0, 4 * slowest_s / self.pace_s), lambda each: keeping(each, each))
        if pace_s is None:
            return []
        return [*takewhile(bool, (keeping(pace_s / more, pace_s) for more in AHEAD))]

    def _keeping(self, links_s: Sequence[float | None], pace_s: float, most_s: float) -> tuple[int, ...]:
        """Return depths with which stages keep a pace, each computing no longer than ``most_s``.

        ``links_s`` are over the boundary behind each, forth and back; None where no gradient returns.
        """
        vector: list[int] = []
        behind, trip_s = _Behind(), 0.0
        for index in reversed(range(len(self.stages))):
            stage, link_s = self.stages[index], links_s[index]
            around_s = 0.0 if link_s is None else link_s + trip_s
            # How long the stage takes depends on what it recomputes, and that on its depth: a few rounds settle it.
            own_s = self.free_s[index]
            for _ in range(ROUNDS):
                depth = behind.depth(self.family, stage, (own_s + around_s) / pace_s)
                fitted_s = self._fitted_s(index, depth)
                if fitted_s is None or self._paced_s(index, fitted_s) > most_s * (1 + ROUNDING):
                    return ()
                if fitted_s <= own_s:
                    break
                own_s = fitted_s
            vector.insert(0, depth)
            trip_s = own_s + around_s
            behind = behind.before(self.family, stage, depth, (own_s - trip_s) / pace_s)
        return tuple(vector)

    @memoize
    def _fitted_s(self, index: int, depth: int) -> float | None:
        """Return a stage's seconds with so many in flight, recomputing as little as fits; None where nothing fits."""
        near = list(self.stages)
        if depth > near[index].warmup:
            return None
        near[index] = near[index]._replace(warmup=depth)
        if index:
            # How much the stage before leads is not known yet.
            most = -(-(near[index].in_flight + LEAD) // near[index - 1].turning)
            near[index - 1] = near[index - 1]._replace(warmup=min(self.turns[index - 1], most))
        short = _recompute_least(self.costs, self.family, near, index, self.spans[index])
        return self._own_s(index, near[index]) if short <= 0 else None

    def _own_s(self, index: int, stage: CandidateStage) -> float:
        return self.costs.forward_s(stage, 0) + self.costs.backward_s(stage, 0, self.turns[index])

    def _paced_s(self, index: int, own_s: float) -> float:
        return own_s * self.turns[index] / self.family.micro_batches


def _least(stages: Sequence[CandidateStage], micro_batches: int) -> tuple[int, ...]:
    """Return the least depths that do not deadlock."""
    vector: list[int] = []
    behind = 1
    for stage in reversed(stages):
        vector.insert(0, -(-behind // stage.turning))
        behind = min(micro_batches, vector[0] * stage.turning)
    return tuple(vector)


def least_recomputed(
    costs: CostModel, family: Family, stages: Sequence[CandidateStage], spans: Sequence[Span]
) -> tuple[Candidate, int]:
    """Return the candidate that recomputes least, and by how many bytes it does not fit."""
    chosen = list(stages)
    short = [_recompute_least(costs, family, chosen, index, span) for index, span in enumerate(spans)]
    return Candidate(*family, tuple(chosen)), max(short)


def _recompute_least(costs: CostModel, family: Family, stages: list[CandidateStage], index: int, span: Span) -> int:
    """Have a stage recompute the least that fits, or else the most; return by how many bytes it does not fit."""
    stage = stages[index]
    sets = span.within(stage.first, stage.stop)

    def short(at: int) -> int:
        stages[index] = stage._replace(recompute=sets[at])
        return costs.shortfall(Candidate(*family, tuple(stages)), index)

    if len(sets) > MANY_SETS:
        # Larger sets hold less, or next to nothing more.
        return short(bisect_left(range(len(sets) - 1), True, key=lambda at: short(at) <= 0))
    for at in range(len(sets)):
        if (found := short(at)) <= 0:
            break
    return found
