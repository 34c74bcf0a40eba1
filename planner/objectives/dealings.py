"""Dealings: which devices make up each of several pipelines that train a model together, and how each is cut.

A pipeline is cut as HetPipe does (:mod:`autopar.planner.peers.hetpipe`), with as many mini-batches in flight as fit,
and as its simulated period is least of partitions that are gone through, those of the least busy stage first. Devices
that prices cannot tell apart may change places, so pipelines of the same makeup are cut once.

From HetPipe's dealings on, others are looked for: a device goes from one pipeline to another, or changes places with
one of another sort; a pipeline is divided, or joined with another. The best of those known is gone on from. What is
known of one is the slowest pipeline's simulated period, cut as HetPipe does, or what the sums of waves take of a
mini-batch where that is more, over how many pipelines there are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise, permutations, product
from math import prod
from operator import add, sub

import numpy as np
import numpy.typing as npt

from autopar.options.plan import MOST_WAVE, PlanOptions
from autopar.ownership import SINGLE
from autopar.planner.candidate import Candidate, CandidateStage, Family, place
from autopar.planner.constraints import Question
from autopar.planner.costs import memoize
from autopar.planner.costs.memory import PeakTerms, peak_of
from autopar.planner.objectives.partitions import PartitionTable
from autopar.planner.objectives.unflushed import MOST_SEEN, PolicyJudge, Verdict, steady
from autopar.planner.peers.hetpipe import Counts, Devices, Makeup, Partitioner, can_partition, makeup_of
from autopar.planner.peers.prices import Prices


class WavesJudge(PolicyJudge):
    """Prices, fits and simulates pipelines of a plan that has several."""

    simulated_as = "stash"

    @memoize
    def peaks_by_layers(self, kind: int, depths: tuple[int, ...], at: int) -> npt.NDArray[np.int64]:
        """Return what layers ``[first, stop]`` hold on a kind of device, as the ``at``-th stage of so deep ones."""
        costs, alone, every = self.costs, [1] * len(depths), self.policy.stage_depths(depths, 1)
        lead = max(0, depths[at - 1] - depths[at]) if at else 0
        patience = self.policy.lead(alone, every) + self.policy.span(alone)
        terms = PeakTerms(float(costs.batch), depths[at], depths[at] + 2, 1, lead, patience=patience)
        trained, layers = np.zeros((costs.layer_count, costs.layer_count + 1), dtype=np.int64), range(costs.layer_count)
        for first in layers:
            for stop in layers[first:]:
                trained[first, stop + 1] = self.trained_bytes(first, stop + 1, kind)
        parts = steady(costs.memory[kind].by_stop(terms.rows), self.policy.passing_buffers(every[at]) * trained)
        return np.asarray(peak_of(parts, terms)) + self.versions(every[at]) * trained


def with_waves(options: PlanOptions, stages: int) -> PlanOptions:
    """Return options with all numbers, of pipelines the longest of which has so many stages."""
    return replace(options, wave=options.wave or min(stages, MOST_WAVE), staleness=options.staleness or 0)


class Cutter:
    """Cuts the layers for devices that are to be a pipeline, of which waves have as many mini-batches."""

    def __init__(self, question: Question, family: Family, stages: int, pipelines: int) -> None:
        """Cut for so many pipelines, the longest of which has so many stages."""
        self.question, self.family, self.costs = question, family, question.costs
        self.judge = WavesJudge(question.simulator, with_waves(question.options, stages), pipelines)
        self._partitioner = Partitioner(Prices(question.costs, 1), self.judge.peaks_by_layers)
        self._known: dict[tuple[Makeup, bool], Verdict | None] = {}

    def cut(self, devices: Sequence[int], *, as_hetpipe: bool = False) -> Verdict | None:
        """Return the pipeline of least period, or the one that HetPipe has; none where none fits, or is admitted."""
        makeup, sorts = makeup_of(self.costs, devices)
        key, own = (makeup, as_hetpipe), [device for sort in sorts for device in sort]
        if key not in self._known:
            found = self._judge(self.as_hetpipe(devices))
            found = found if as_hetpipe else self._search(own, found)
            numbers = {device: at for at, device in enumerate(own)}
            self._known[key] = found and found._replace(candidate=_on(found.candidate, numbers))
        known = self._known[key]
        return known and known._replace(candidate=_on(known.candidate, dict(enumerate(own))))

    def as_hetpipe(self, devices: Sequence[int]) -> tuple[CandidateStage, ...] | None:
        """Return the stages that HetPipe gives some devices; none where it finds that none fit."""
        makeup, sorts = makeup_of(self.costs, devices)
        # Where one does not fit, more do not.
        fits = self._partitioner.partition(makeup, 1).cuts
        for in_flight in range(self.judge.options.wave or 1, 0, -1) if fits else ():
            found = self._partitioner.partition(makeup, in_flight)
            if found.cuts:
                left = [iter(sort) for sort in sorts]
                order = [next(left[sort]) for sort in found.sorts]
                return place(self.family, found.cuts, [SINGLE] * len(found.cuts), order)
        return None

    def _judge(self, stages: tuple[CandidateStage, ...] | None) -> Verdict | None:
        return self.judge.judge(self.family, stages) if stages and self._is_admitted(stages, len(stages)) else None

    def _search(self, devices: Sequence[int], best: Verdict | None) -> Verdict | None:
        """Return a pipeline, or a better one of partitions that are gone through."""
        judge, costs, family, options = self.judge, self.costs, self.family, self.judge.options
        by_kind = tuple(sorted(devices, key=lambda device: (costs.kind_of[device], device)))
        for order in dict.fromkeys((tuple(devices), by_kind, by_kind[::-1])):
            busy_s = partial(judge.busy_s, family)
            table = PartitionTable(costs, family, order, lambda width: [SINGLE] if width == 1 else [], busy_s)
            every = islice(table.in_order(options.max_stages, 1), MOST_SEEN * options.effort)
            placed = ((partition.busiest_s, table.stages(partition)) for partition in every)
            admitted = (each for each in placed if self._is_admitted(each[1], len(devices)))
            best = judge.go_through(family, admitted, best).best
        return best

    def _is_admitted(self, stages: tuple[CandidateStage, ...], devices: int) -> bool:
        idle = self.judge.options.use_all and len(stages) < devices
        broken = self.question.constraints(1).broken(stages, self.costs.kind_of)
        return not (idle or self.costs.tied_between(stages) or broken)


Dealing = tuple[Counts, ...]
"""Of every pipeline, how many devices of each sort it has; those with more of the first sorts first."""
Periods = tuple[float, ...]
MOST_PRICED, MOST_SEEN_PIPELINES = 150, 40_000
"""Pipelines that differ, and pipelines of all dealings together, behind which a search ends; times the effort."""
MOST_FOUND, MOST_FOUND_DEVICES = 24, 400
"""Dealings that are found, and devices of them all; times the effort."""
MOST_DIVIDED = 64
"""Ways to divide a pipeline above which only a few are tried."""


class DealingSearch:
    """Looks for dealings whose pipelines, each by itself, train most samples per second together."""

    def __init__(self, question: Question, family: Family) -> None:
        self._question, self._family, self._costs = question, family, question.costs
        _, self._sorts = makeup_of(self._costs, range(len(self._costs.devices)))
        self._priced = set[Counts]()

    def cutter(self, stages: int, pipelines: int) -> Cutter:
        """Return what cuts for so many pipelines, the longest of which has so many stages."""
        # What others have changed waits for eager ones only.
        return self._cutter(stages, pipelines if self._question.options.eager else 1)

    @memoize
    def _cutter(self, stages: int, pipelines: int) -> Cutter:
        return Cutter(self._question, self._family, stages, pipelines)

    def go(self, starts: Iterable[Sequence[Devices]]) -> list[tuple[Devices, ...]]:
        """Return the best dealings beside those that are given, the best first."""
        effort = self._question.options.effort
        given = {self._dealing(each) for each in starts}
        periods = {each: self._periods(each) for each in dict.fromkeys((*sorted(given), *self._simple()))}
        ahead = [(own, each) for each, own in periods.items()]
        heapify(ahead)
        seen = 0
        while ahead and len(self._priced) < MOST_PRICED * effort and seen < MOST_SEEN_PIPELINES * effort:
            for other in self._neighbours(heappop(ahead)[1]):
                if other not in periods:
                    seen += len(other)
                    periods[other] = self._periods(other)
                    heappush(ahead, (periods[other], other))
        found = sorted((own, each) for each, own in periods.items() if each not in given and own[0] < math.inf)
        most = max(1, min(MOST_FOUND, MOST_FOUND_DEVICES // len(self._costs.devices)))
        return [self._devices(each) for _, each in found[: most * effort]]

    def _periods(self, dealing: Dealing) -> Periods:
        """Return the periods of all pipelines over how many there are, the longest first; infinite where none is."""
        found = list[Verdict]()
        for counts, devices in zip(dealing, self._devices(dealing), strict=True):
            self._priced.add(counts)
            admitted = can_partition(self._costs, devices)
            cut = self.cutter(len(devices), len(dealing)).cut(devices, as_hetpipe=True) if admitted else None
            if cut is None:
                return (math.inf,)
            found.append(cut)
        wave = self._question.options.wave or min(max(map(sum, dealing)), MOST_WAVE)
        summed_s = self._summed_s([each.candidate for each in found]) / wave
        periods = sorted((each.times.period_s for each in found), reverse=True)
        return tuple(max(summed_s, each) / len(dealing) for each in periods)

    def _summed_s(self, candidates: Sequence[Candidate]) -> float:
        """Return for how long the busiest rank sums a wave's changes with those that hold its layers."""
        costs, busy_s = self._costs, Counter[int]()
        ends = sorted({stage.stop for each in candidates for stage in each.stages})
        for first, stop in pairwise((0, *ends)):
            holders = [next(s.devices[0] for s in each.stages if stop <= s.stop) for each in candidates]
            size = sum(layer.trainable_bytes for layer in costs.profile.layers[first:stop])
            seconds = costs.links.collective_s("all_reduce", size, costs.links.place(holders))
            busy_s.update(dict.fromkeys(holders, seconds))
        return max(busy_s.values())

    def _dealing(self, pipelines: Sequence[Devices]) -> Dealing:
        return _ordered(tuple(sum(each in own for each in sort) for sort in self._sorts) for own in pipelines)

    def _devices(self, dealing: Dealing) -> tuple[Devices, ...]:
        """Return the devices of every pipeline, those of a sort in cluster order."""
        left = [iter(sort) for sort in self._sorts]
        return tuple(
            tuple(sorted(next(left[sort]) for sort, count in enumerate(own) for _ in range(count))) for own in dealing
        )

    def _simple(self) -> Iterator[Dealing]:
        """Yield a pipeline on every device, and one on each half of them."""
        every = tuple(map(len, self._sorts))
        yield _ordered(unit for sort, count in enumerate(every) for unit in [_unit(sort, len(every))] * count)
        if sum(every) > 1:
            yield from _divisions((every,), 0, halves=True)

    def _neighbours(self, dealing: Dealing) -> Iterator[Dealing]:
        """Yield dealings that differ by one move."""
        units = [_unit(sort, len(self._sorts)) for sort in range(len(self._sorts))]
        for own, other in sorted(set(permutations(dealing, 2))):
            rest = list(dealing)
            rest.remove(own)
            rest.remove(other)
            if own >= other and rest:
                yield _ordered([*rest, _plus(own, other)])
            for gone in (unit for sort, unit in enumerate(units) if own[sort] and sum(own) > 1):
                yield _ordered([*rest, _minus(own, gone), _plus(other, gone)])
            for gone, come in product(units, repeat=2) if own >= other else ():
                kept, given = _minus(own, gone), _minus(other, come)
                if gone != come and min(*kept, *given) >= 0:
                    yield _ordered([*rest, _plus(kept, come), _plus(given, gone)])
        for own in sorted(set(dealing)):
            yield from _divisions(dealing, dealing.index(own))


def _ordered(pipelines: Iterable[Counts]) -> Dealing:
    return tuple(sorted(pipelines, reverse=True))


def _unit(sort: int, sorts: int) -> Counts:
    return tuple(int(each == sort) for each in range(sorts))


def _plus(one: Counts, other: Counts) -> Counts:
    return tuple(map(add, one, other))


def _minus(one: Counts, other: Counts) -> Counts:
    return tuple(map(sub, one, other))


def _divisions(dealing: Dealing, at: int, *, halves: bool = False) -> Iterator[Dealing]:
    """Yield dealings of which one pipeline is two: in every way, or of many by halves and by sorts."""
    own = dealing[at]
    ways: Iterable[Counts] = product(*(range(count + 1) for count in own))
    if halves or prod(count + 1 for count in own) > MOST_DIVIDED:
        by_sort = (tuple(count * (each == sort) for each, count in enumerate(own)) for sort in range(len(own)))
        ways = [tuple(count // 2 for count in own), tuple(-(-count // 2) for count in own), *by_sort]
    for part in ways:
        if 0 < sum(part) < sum(own):
            yield _ordered([*dealing[:at], *dealing[at + 1 :], part, _minus(own, part)])


def _on(candidate: Candidate, devices: Mapping[int, int]) -> Candidate:
    """Return a candidate with other devices in place of its own."""
    stages = (each._replace(devices=tuple(map(devices.__getitem__, each.devices))) for each in candidate.stages)
    return candidate._replace(stages=tuple(stages))
