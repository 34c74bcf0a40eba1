"""Dealings: which devices make up each of several pipelines that train a model together, and how each is cut.

A pipeline is cut as HetPipe does (:mod:`autopar.planner.peers.hetpipe`), with as many mini-batches in flight as fit,
and as its simulated period is least of partitions that are gone through, those of the least busy stage first. Devices
that prices cannot tell apart may change places, so pipelines of the same makeup are cut once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt

from autopar.depths import stage_depths
from autopar.options.plan import MOST_WAVE, PlanOptions
from autopar.ownership import SINGLE
from autopar.planner.candidate import Candidate, CandidateStage, Family, place
from autopar.planner.constraints import Question
from autopar.planner.costs import memoize
from autopar.planner.costs.memory import PeakTerms, peak_of
from autopar.planner.objectives.partitions import PartitionTable
from autopar.planner.objectives.unflushed import MOST_SEEN, PolicyJudge, Verdict, steady
from autopar.planner.peers.hetpipe import Makeup, Partitioner, makeup_of
from autopar.planner.peers.prices import Prices


class WavesJudge(PolicyJudge):
    """Prices, fits and simulates pipelines of a plan that has several."""

    simulated_as = "stash"

    @memoize
    def peaks_by_layers(self, kind: int, depths: tuple[int, ...], at: int) -> npt.NDArray[np.int64]:
        """Return what layers ``[first, stop]`` hold on a kind of device, as the ``at``-th stage of so deep ones."""
        costs, alone, every = self.costs, [1] * len(depths), stage_depths(self.policy, depths, 1)
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

    def __init__(self, question: Question, family: Family, stages: int) -> None:
        """Cut for pipelines the longest of which has so many stages."""
        self.question, self.family, self.costs = question, family, question.costs
        self.judge = WavesJudge(question.simulator, with_waves(question.options, stages))
        self._partitioner = Partitioner(Prices(question.costs, 1), self.judge.peaks_by_layers)
        self._known: dict[tuple[Makeup, bool], Verdict | None] = {}

    def cut(self, devices: Sequence[int], *, as_hetpipe: bool = False) -> Verdict | None:
        """Return the pipeline of least period, or the one that HetPipe has; none where none fits, or is admitted."""
        makeup, sorts = makeup_of(self.costs, devices)
        key, own = (makeup, as_hetpipe), [device for sort in sorts for device in sort]
        if key not in self._known:
            found = self._judged(self.as_hetpipe(devices))
            found = found if as_hetpipe else self._searched(own, found)
            numbers = {device: at for at, device in enumerate(own)}
            self._known[key] = found and found._replace(candidate=_on(found.candidate, numbers))
        known = self._known[key]
        return known and known._replace(candidate=_on(known.candidate, dict(enumerate(own))))

    def as_hetpipe(self, devices: Sequence[int]) -> tuple[CandidateStage, ...] | None:
        """Return the stages that HetPipe gives some devices; none where it finds that none fit."""
        makeup, sorts = makeup_of(self.costs, devices)
        for in_flight in range(self.judge.options.wave or 1, 0, -1):
            found = self._partitioner.partition(makeup, in_flight)
            if found.cuts:
                left = [iter(sort) for sort in sorts]
                order = [next(left[sort]) for sort in found.sorts]
                return place(self.family, found.cuts, [SINGLE] * len(found.cuts), order)
        return None

    def _judged(self, stages: tuple[CandidateStage, ...] | None) -> Verdict | None:
        return self.judge.judge(self.family, stages) if stages and self._is_admitted(stages, len(stages)) else None

    def _searched(self, devices: Sequence[int], best: Verdict | None) -> Verdict | None:
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
        broken = self.question.constraints.broken(stages, self.costs.kind_of)
        return not (idle or self.costs.tied_between(stages) or broken)


def _on(candidate: Candidate, devices: Mapping[int, int]) -> Candidate:
    """Return a candidate with other devices in place of its own."""
    stages = (each._replace(devices=tuple(map(devices.__getitem__, each.devices))) for each in candidate.stages)
    return candidate._replace(stages=tuple(stages))
