"""Depths: how many micro-batches the stages of a plan keep in flight, and what they recompute for it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import ceil, log, prod
from typing import NamedTuple

from autopar.planner.bounds.chain import link_terms, round_trips
from autopar.planner.candidate import Candidate, CandidateStage, Family, with_depths
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
    """Return the candidates whose stages keep at most their ``warmup`` in flight, and fit.

    ``spans`` are, by stage, the levels of recomputation of which the least that fits is taken. With ``exact`` these are
    all candidates, unless they are too many.
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
    most = [stage.warmup for stage in stages]
    if family.schedule == "gpipe":
        return [tuple(stage.turns(0, family.micro_batches) for stage in stages)], True
    if exact and prod(most) <= MOST_VECTORS:
        return list(_all(stages, family.micro_batches, most)), True
    timed = list(_Pacing(costs, family, stages, spans).vectors())
    if not few or not timed:
        timed = [*_round_trip_depths(costs, family, stages, spans), *timed]
    steady = not timed or (len(stages) <= MANY_STAGES and not few)
    usual = _steady_depths(stages, family.micro_batches, most) if steady else []
    return list(dict.fromkeys((*usual, *timed))), prod(most) <= 1


def span_of(costs: CostModel, family: Family, options: PlanOptions, stage: CandidateStage) -> Span:
    """Return how many layers of a stage the options let be recomputed."""
    levels = costs.recompute_levels(family.micro_batch_size, costs.kind_of[stage.devices[0]])
    whole = stage.stop - stage.first
    return Span(levels, whole if options.recompute == "full" else 0, 0 if options.recompute == "none" else whole)


def _all(stages: Sequence[CandidateStage], micro_batches: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every choice of depths; no stage has more in flight than the stage before, which would deadlock."""
    if not stages:
        yield ()
        return
    for others in _all(stages[1:], micro_batches, most[1:]):
        behind = 0
        if others:
            behind = min(micro_batches, stages[1]._replace(warmup=others[0]).in_flight)
        for depth in range(1, most[0] + 1):
            if min(micro_batches, stages[0]._replace(warmup=depth).in_flight) >= behind:
                yield (depth, *others)


def _steady_depths(stages: Sequence[CandidateStage], micro_batches: int, most: Sequence[int]) -> list[tuple[int, ...]]:
    """Depths that grow steadily from the last stage to the first, as far as they fit; and as deep as fits."""
    found = []
    for slope in (*SLOPES, float(micro_batches)):
        vector: list[int] = []
        allowed = micro_batches
        for index, stage in enumerate(stages):
            wanted = min(allowed, 1 + int(slope * (len(stages) - 1 - index)))
            if slope == micro_batches:
                wanted = allowed
            # Replicas that take turns keep as many between them as one that does not.
            depth = max(1, min(most[index], -(-wanted // stage.turning)))
            while depth > 1 and min(micro_batches, depth * stage.turning) > allowed:
                depth -= 1
            if min(micro_batches, depth * stage.turning) > allowed:
                # Replicas that take turns have one each in flight at least: more than the stage before has.
                break
            vector.append(depth)
            allowed = min(allowed, depth * stage.turning)
        if len(vector) == len(stages) and tuple(vector) not in found:
            found.append(tuple(vector))
    return found


def _round_trip_depths(
    costs: CostModel, family: Family, stages: Sequence[CandidateStage], spans: Sequence[Span]
) -> list[tuple[int, ...]]:
    """Depths for which stages do not wait: as many in flight as the busiest stage runs in a micro-batch's round trip.

    More are in flight where that helps against uneven stages. Where they do not fit, the stages' pace is taken as much
    slower as it must be: with so many in flight they cannot keep the quicker one anyway.
    """
    trips = round_trips(costs, Candidate(*family, tuple(stages)))
    turns = [stage.turns(0, family.micro_batches) for stage in stages]
    pairs = zip(stages, turns, strict=True)
    alone = [costs.forward_s(stage, 0) + costs.backward_s(stage, 0, count) for stage, count in pairs]
    pace_s = max(own_s * count for own_s, count in zip(alone, turns, strict=True)) / family.micro_batches
    if pace_s <= 0:
        return []
    last = (span.within(stage.first, stage.stop)[-1] for stage, span in zip(stages, spans, strict=True))
    least = [stage._replace(recompute=recompute) for stage, recompute in zip(stages, last, strict=True)]
    depths_at = partial(_pace_depths, family, stages, trips, alone)

    def fitting(at_s: float) -> bool:
        vector = depths_at(at_s)
        if vector is None:
            return False
        candidate = with_depths(family, least, vector)
        return all(costs.shortfall(candidate, index) <= 0 for index in range(len(least)))

    paces: list[float] = []
    for more in AHEAD:
        if not fitting(pace_s / more):
            slower_s = _quickest(pace_s / more, trips[0] * more / pace_s, fitting)
            paces += [] if slower_s is None else [slower_s]
            break
        paces.append(pace_s / more)
    return [vector for each in paces if (vector := depths_at(each)) is not None]


def _quickest(pace_s: float, slowdown: float, keeps: Callable[[float], bool]) -> float | None:
    """Return the quickest pace that is kept, from one to another so many times as slow; None where none is."""
    paces = [pace_s * FINER**power for power in range(2 + int(log(slowdown, FINER)))]
    at = bisect_left(paces, True, key=keeps)
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


def _pace_depths(
    family: Family, stages: Sequence[CandidateStage], trips: Sequence[float], alone: Sequence[float], pace_s: float
) -> tuple[int, ...] | None:
    """Depths with which stages keep a pace, or None where a stage cannot have so many in flight."""
    vector: list[int] = []
    behind = _Behind()
    for stage, trip_s, own_s in zip(reversed(stages), reversed(trips), reversed(alone), strict=True):
        depth = behind.depth(family, stage, trip_s / pace_s)
        if depth > stage.warmup:
            return None
        vector.append(depth)
        behind = behind.before(family, stage, depth, (own_s - trip_s) / pace_s)
    return tuple(vector[::-1])


class _Pacing:
    """Stages that keep a pace: each has as many in flight as the pace needs, and recomputes as little as fits that."""

    def __init__(
        self, costs: CostModel, family: Family, stages: Sequence[CandidateStage], spans: Sequence[Span]
    ) -> None:
        self.costs, self.family, self.stages, self.spans = costs, family, stages, spans
        self.turns = [stage.turns(0, family.micro_batches) for stage in stages]
        self.links_s = _links_s(costs, Candidate(*family, tuple(stages)))
        self._stage_s: dict[tuple[int, int], float | None] = {}

    def vectors(self) -> Iterator[tuple[int, ...]]:
        """Yield the depths of the quickest pace that can be kept, then deeper ones that still keep it."""
        pace_s = self._quickest_s()
        for more in AHEAD if pace_s is not None else ():
            assert pace_s is not None
            found = self._keeping(pace_s / more, pace_s)
            if found is None:
                return
            yield found

    def _quickest_s(self) -> float | None:
        """Return the quickest pace that can be kept; None where no depths fit."""
        free_s = [self._own_s(index, stage) for index, stage in enumerate(self.stages)]
        low_s = max(self._paced_s(index, own_s) for index, own_s in enumerate(free_s))
        if low_s <= 0:
            return None
        slowest_s = sum(free_s) + sum(link_s or 0.0 for link_s in self.links_s)
        # Slower than one micro-batch after the other, with everything recomputed, is no pace.
        slowdown = max(1.0, 4 * slowest_s / low_s)
        return _quickest(low_s, slowdown, lambda pace_s: self._keeping(pace_s, pace_s) is not None)

    def _keeping(self, pace_s: float, most_s: float) -> tuple[int, ...] | None:
        """Return depths with which stages keep a pace, each computing no longer than ``most_s``; None: they cannot."""
        vector: list[int] = []
        behind, trip_s = _Behind(), 0.0
        for index in reversed(range(len(self.stages))):
            stage, link_s = self.stages[index], self.links_s[index]
            around_s = 0.0 if link_s is None else link_s + trip_s
            # How long the stage takes depends on what it recomputes, and that on its depth: a few rounds settle it.
            own_s = self._own_s(index, stage)
            for _ in range(ROUNDS):
                depth = behind.depth(self.family, stage, (own_s + around_s) / pace_s)
                fitted = self._fitting(index, depth)
                if fitted is None or self._paced_s(index, fitted) > most_s * (1 + ROUNDING):
                    return None
                if fitted <= own_s:
                    break
                own_s = fitted
            vector.append(depth)
            trip_s = own_s + around_s
            behind = behind.before(self.family, stage, depth, (own_s - trip_s) / pace_s)
        return tuple(vector[::-1])

    def _fitting(self, index: int, depth: int) -> float | None:
        """Return a stage's seconds with so many in flight, recomputing as little as fits; None where nothing fits."""
        if depth > self.stages[index].warmup:
            return None
        key = index, depth
        if key not in self._stage_s:
            self._stage_s[key] = self._least_s(index, depth)
        return self._stage_s[key]

    def _least_s(self, index: int, depth: int) -> float | None:
        stage = self.stages[index]._replace(warmup=depth)
        near = list(self.stages)
        if index:
            # How much the stage before leads is not known yet.
            most = min(self.turns[index - 1], -(-(stage.in_flight + LEAD) // near[index - 1].turning))
            near[index - 1] = near[index - 1]._replace(warmup=max(1, most))
        sets = self.spans[index].within(stage.first, stage.stop)

        def short(at: int) -> int:
            near[index] = stage._replace(recompute=sets[at])
            return self.costs.shortfall(Candidate(*self.family, tuple(near)), index)

        return self._own_s(index, near[index]) if _first_fitting(short, len(sets)) <= 0 else None

    def _own_s(self, index: int, stage: CandidateStage) -> float:
        return self.costs.forward_s(stage, 0) + self.costs.backward_s(stage, 0, self.turns[index])

    def _paced_s(self, index: int, own_s: float) -> float:
        return own_s * self.turns[index] / self.family.micro_batches


def _links_s(costs: CostModel, candidate: Candidate) -> list[float | None]:
    """Return the least seconds forth and back over the boundary behind each stage; None where no gradient returns."""
    found: list[float | None] = []
    for before, after in pairwise(candidate.stages):
        link = link_terms(costs, before, after, candidate)
        found.append(float(link.forth_s + link.back_s) if link.back else None)
    return [*found, None]


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
    worst = -(2**62)
    chosen = list(stages)
    for index, stage in enumerate(stages):
        sets = spans[index].within(stage.first, stage.stop)

        def short(at: int, index: int = index, sets: Sequence[tuple[int, ...]] = sets) -> int:
            chosen[index] = chosen[index]._replace(recompute=sets[at])
            return costs.shortfall(Candidate(*family, tuple(chosen)), index)

        worst = max(worst, _first_fitting(short, len(sets)))
    return Candidate(*family, tuple(chosen)), worst


def _first_fitting(short: Callable[[int], int], count: int) -> int:
    """Return the shortfall of the first of some sets that fits, or of the last; leave that one chosen."""
    if count > MANY_SETS:
        # Larger sets hold less, or next to nothing more.
        at = bisect_left(range(count - 1), True, key=lambda each: short(each) <= 0)
        return short(at)
    for at in range(count):
        found = short(at)
        if found <= 0:
            break
    return found
