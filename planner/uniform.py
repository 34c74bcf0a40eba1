"""Uniform: the best layout of those that users of Megatron-LM choose from, found by going through all of them.

Such a layout has one number each of devices that run a replica (tensor parallelism), of replicas (data parallelism) and
of groups of devices (pipeline parallelism) with as many stages; one size of micro-batches; every layer is recomputed or
none; and replicas divide the optimizer's state or do not. It is a row beside every plan, and where plans with teams
are searched one to start from: none that is found is slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, product
from math import inf
from typing import NamedTuple

import numpy as np

from autopar.options.plan import PlanOptions
from autopar.ownership import Replicas, Shard, even_shares
from autopar.planner.bounds import least_s
from autopar.planner.candidate import (
    Candidate,
    CandidateStage,
    Family,
    Shape,
    chunk_counts,
    divisors,
    has_chunks,
    with_depths,
    within,
)
from autopar.planner.constraints import Constraints
from autopar.planner.search.judge import Best, Reference, SimulatedPlan
from autopar.planner.search.moves import balanced_shape, standing_shape
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules import SCHEDULES

_SHARDED: tuple[Shard, ...] = ("none", "optimizer")
CHUNKED = "interleaved"
"""The schedule of layouts with several stages on every device."""


def uniform_layouts(
    simulator: Simulator, families: Sequence[Family], options: PlanOptions, *, chunked: bool
) -> list[Reference]:
    """Return the best uniform layout, and one with several stages on every device if that is admitted, and faster.

    None where no teams are looked at: others stand beside every plan by other names.
    """
    if all(team.team == 1 for team in simulator.costs.teams):
        return []
    layouts, found = UniformLayouts(simulator, families, options), list[Reference]()
    names = {"best uniform layout": "1f1b"} | ({f"best uniform layout, {CHUNKED}": CHUNKED} if chunked else {})
    for name, schedule in names.items():
        best = layouts.best(schedule, min((each.step_s or inf for each in found), default=inf))
        found += [] if best is None else [Reference(name, best.candidate, best.step_s)]
    return found


class _Groups(NamedTuple):
    """Groups of devices, all alike."""

    least_s: float
    """No step of any stages on them takes less."""
    family: Family
    replicas: Replicas
    groups: int
    chunks: int
    """Stages of each."""


class UniformLayouts:
    """Goes through all uniform layouts."""

    def __init__(self, simulator: Simulator, families: Sequence[Family], options: PlanOptions) -> None:
        """Look at micro-batches of some families."""
        self._simulator, self._costs, self._options, self._families = simulator, simulator.costs, options, families
        self._rules = cache(lambda chunks: Constraints.of(self._costs, options, chunks))
        self._whole_s = cache(self._new_whole_s)
        self._is_chain = not np.isnan(self._costs.flows.crossing_bytes[1][1:-1]).any()

    def best(self, schedule: str, below_s: float = inf) -> SimulatedPlan | None:
        """Return the fastest that fits under a schedule; None where there is none below some seconds."""
        best = Best(below_s)
        for groups in sorted(self._groups(schedule)):
            if groups.least_s >= best.step_s:
                break
            every = (each for each in self._candidates(groups, self._cuts(groups)) if self._fits(each))
            for _ in best.judge_each(self._simulator, every, bound_s=least_s):
                pass
        return best.fastest

    def _groups(self, schedule: str) -> Iterator[_Groups]:
        devices, layers = len(self._costs.devices), self._costs.layer_count
        own = self._options.chunks if has_chunks(schedule) else None
        counts = chunk_counts(schedule) if own is None else (own,)
        for team, chunks, each in product(self._costs.teams, counts, self._families):
            for width in (width for width in divisors(each.micro_batch_size) if width * team.team <= devices):
                groups, replicas = devices // (width * team.team), team.so_many(width)
                whole = chunks == 1 or (groups > 1 and each.micro_batches % groups == 0)
                if groups * chunks <= layers and whole:
                    family = each._replace(schedule=schedule)
                    yield _Groups(self._least_s(family, replicas, groups), family, replicas, groups, chunks)

    def _least_s(self, family: Family, replicas: Replicas, groups: int) -> float:
        """Return what a step takes at least: the busiest group's work, and a micro-batch's way through the others."""
        whole_s, count = self._whole_s(family.micro_batch_size, replicas), family.micro_batches
        if has_chunks(family.schedule) or not self._is_chain:
            return count * whole_s / groups
        return (count - 1) * whole_s / groups + whole_s

    def _new_whole_s(self, rows: int, replicas: Replicas) -> float:
        """Return the least seconds of a forward and a backward of all layers, by the first kind of device."""
        form, shares = self._costs.form(0, replicas), self._costs.shares(rows, replicas)
        every = self._costs.seconds.by_queue(shares[0], 0.0, form, split=False)
        return max(forward[-1] + backward[-1] for forward, backward in every)

    def _cuts(self, groups: _Groups) -> tuple[int, ...]:
        """Return where stages end that take about as long, or have as many layers where rules allow no balance."""
        stages, layers = groups.groups * groups.chunks, self._costs.layer_count
        edges = self._rules(groups.chunks).edges(layers)
        if stages >= len(edges):
            return tuple(accumulate(even_shares(layers, stages)))
        replicas = (groups.replicas,) * groups.groups
        return balanced_shape(self._costs, groups.family, replicas, groups.chunks, edges).cuts

    def _candidates(self, layout: _Groups, cuts: tuple[int, ...]) -> Iterator[Candidate]:
        _, family, replicas, groups, chunks = layout
        depths = next(iter(SCHEDULES[family.schedule].warmups(groups, chunks, family.micro_batches).values()))
        for shard in _SHARDED if replicas.width > 1 else _SHARDED[:1]:
            shape, order = Shape(cuts, (replicas,) * groups), range(len(self._costs.devices))
            stages = standing_shape(self._costs, family, shape, order, shard)
            known = shard in self._options.shards or replicas.width == 1
            if known and stages is not None and self._rules(chunks).broken(stages, self._costs.kind_of) is None:
                for own in self._recomputations(family, stages):
                    yield with_depths(family, own, depths)

    def _fits(self, candidate: Candidate) -> bool:
        """Whether every stage fits; of several on a device, each by itself: whether all do is found out later."""
        plain = candidate._replace(schedule="1f1b")
        return all(self._costs.shortfall(plain, index) <= 0 for index in range(len(candidate.stages)))

    def _recomputations(self, family: Family, stages: Sequence[CandidateStage]) -> Iterator[Sequence[CandidateStage]]:
        """Yield stages that run nothing again, and those that run all again that saves memory, as is admitted."""
        every = self._costs.recompute_levels(family.micro_batch_size, self._costs.form_of(stages[0]))[-1]
        if self._options.recompute != "full":
            yield stages
        if self._options.recompute != "none":
            yield [each._replace(recompute=within(every, each.first, each.stop)) for each in stages]
