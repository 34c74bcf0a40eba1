"""Mixed: the terms of stages on devices of several kinds, from below.

Replicas share a micro-batch by their speed (:mod:`autopar.planner.shares`). Of such a stage

- the last replica has most rows, the last one of every stage's: what it takes is that of the quickest kind whose
  replicas have as many. A message of these rows goes from a last replica to the next;
- the slowest replica, whose rows others may take less for, bounds a step by its own work;
- in flight is what fits on every kind.

Where rows are many, or stages are taken together, the last replica has as many as an even share at least, on whichever
kind; and the slowest one is bounded by the rates of all: of n replicas of every kind, which compute p seconds at least
for each row of however many, none takes less than rows / sum(n / p). Where nothing but speed decides on rows, the last
replica would take as long with one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autopar.hardware.topology import Place
from autopar.ownership import Replicas
from autopar.planner.bounds import StageTerms, beside_s
from autopar.planner.candidate import CandidateStage
from autopar.planner.constraints import crossed_limit
from autopar.planner.costs import memoize_weakly
from autopar.planner.costs.activations import Counts, Numbers
from autopar.planner.costs.layers import Site
from autopar.planner.search.configs import RecomputeRange, StageConfig
from autopar.planner.shares import most_rows, rows_by_speed

if TYPE_CHECKING:
    from autopar.planner.search.stages import StageTables

MOST_ROWS = 32
"""Of a micro-batch, up to which the rows of replicas are found for every stage."""


class _Computing(NamedTuple):
    """What replicas compute of a micro-batch, ``[first, length]``."""

    forward_s: Numbers
    """Of the last one."""
    backward_s: Numbers
    """What others wait for."""
    both_s: Numbers
    """Its forward and that together."""
    whole_s: Numbers
    """Its forward and a whole backward."""
    slowest_s: Numbers
    """Likewise, of the slowest one."""


_Times = tuple[Numbers, Numbers, Numbers]
"""A forward, what others wait for of a backward, and a whole one, ``[first, length]``."""


def _of_rows(rows: Sequence[Counts], every: Sequence[_Times]) -> _Computing:
    """Return what replicas take that have so many rows at most, and take so long with them, by kind."""
    most = np.maximum.reduce(rows)
    last = [
        tuple(np.where(own == most, each, np.inf) for each in (there, back, there + back, there + whole))
        for own, (there, back, whole) in zip(rows, every, strict=True)
    ]
    forward, backward, both, longest = (np.minimum.reduce(each) for each in zip(*last, strict=True))
    return _Computing(forward, backward, both, longest, np.maximum.reduce([there + whole for there, _, whole in every]))


class MixedStages:
    """Prices the stages of :class:`.stages.StageTables` on several kinds of devices."""

    def __init__(self, tables: StageTables) -> None:
        """Take what prices stages of one kind."""
        self.costs, self.family, self.limits, self._tables = tables.costs, tables.family, tables.depth_limits, tables
        pool, own = tables.pool, tables.costs.limits_bytes
        self._limits = {kind: {own[device] for device in pool.all_of(kind)} for kind in pool.kinds}

    def terms(self, way: StageConfig, counts: tuple[int, ...], place: Place, team: Place) -> StageTerms:
        """Return the terms of a way, of so many replicas on each kind, which stand at a place."""
        replicas, recompute, count = way.replicas, way.recompute, self.family.micro_batches
        forms = tuple(self.costs.form(kind, replicas, team) for kind in way.kinds)
        sites = tuple(Site.of(replicas.shard, place, form) for form in forms)
        limits = tuple(max(self._limits[kind]) for kind in way.kinds)
        order = self.limits.layer_order(forms[0])
        low, high = recompute.of(order.counts)
        rows = self._rows(replicas, counts, sites, limits) if self._is_known(way) else None
        ones = np.ones(low.shape, dtype=np.int64)
        shares = [ones] * len(forms) if rows is None else rows
        depth = np.minimum.reduce(
            [
                self._depth(own, replicas, recompute, form, limit, forms[0])
                for own, form, limit in zip(shares, forms, limits, strict=True)
            ]
        )
        every = [self._times(own, site, recompute, forms[0]) for own, site in zip(shares, sites, strict=True)]
        own = _of_rows(rows, every) if rows else self._of_any_rows(way, counts, forms, every)
        closing = np.minimum.reduce(
            [
                self._tables.reducing(replicas.shard, most_rows(counts, self.family.micro_batch_size, at), form, place)
                for at, form in enumerate(forms)
            ]
        )
        deep, fits = np.maximum(depth, 1), (depth > 0) & (low <= high)
        found = StageTerms(
            own.forward_s,
            own.backward_s,
            np.where(fits, count * own.both_s, np.inf),
            closing,
            count / deep,
            np.asarray(beside_s(own.forward_s, own.backward_s, count, deep)),
            slowest_s=count * own.slowest_s + closing,
        )
        if not self._tables.has_halves:
            return found
        total = count * own.whole_s + closing
        return found._replace(total_s=total, rest_s=total - np.minimum(deep, count) * own.forward_s - own.backward_s)

    def _of_any_rows(
        self, way: StageConfig, counts: tuple[int, ...], forms: tuple[int, ...], every: Sequence[_Times]
    ) -> _Computing:
        """Return the least that replicas take, of which only the numbers are known, and by kind what one row takes."""
        by_rates = self._by_rates(counts, forms)
        even = -(-self.family.micro_batch_size // sum(counts))
        last = [self._least_ways(form, even) for form in forms]
        both = np.minimum.reduce([there + back for there, back, _ in last])
        whole = np.minimum.reduce([there + back for there, _, back in last])
        if self._takes_any(way, counts, forms) and not self._tables.has_halves:
            both = np.maximum(both, by_rates - np.maximum.reduce([self._row_s_at_most(form) for form in forms]))
            whole = both
        slowest = np.maximum.reduce([by_rates, *(there + back for there, _, back in every)])
        forward, backward, _ = (np.minimum.reduce(each) for each in zip(*last, strict=True))
        return _Computing(forward, backward, both, whole, slowest)

    def deepest(self, stage: CandidateStage, recompute: RecomputeRange, column: int) -> CandidateStage:
        """Return a stage with as much in flight as fits on every kind; 0 where nothing does, or shares may not be."""
        if crossed_limit(self.costs, [stage]) is not None:
            return stage._replace(warmup=0)
        leading, found = self.costs.leading_form(stage), []
        for rows, form in self.costs.unlike_replicas(stage):
            limit = self.costs.limit_of(stage, form)
            depths = self.limits.depth_of_rows(form, stage.replicas, recompute, limit, int(rows), leading)
            found.append(int(depths[stage.first, column]))
        return stage._replace(warmup=min(found))

    def _is_known(self, way: StageConfig) -> bool:
        """Whether the rows of replicas are found for every stage: all of a kind are alike, and rows are few."""
        alike = all(len(self._limits[kind]) == 1 for kind in way.kinds)
        alike = alike and (way.replicas.team == 1 or not self.costs.across_nodes)
        few = self.family.micro_batch_size <= MOST_ROWS
        return alike and few and self._tables.apart and not self.costs.share_limits

    @memoize_weakly
    def _rows(
        self, replicas: Replicas, counts: tuple[int, ...], sites: tuple[Site, ...], limits: tuple[int, ...]
    ) -> list[Counts]:
        """Return the most rows of a replica on every kind, ``[first, length]``."""
        size, every = self.family.micro_batch_size, []
        for kind, (site, limit) in enumerate(zip(sites, limits, strict=True)):
            shares = range(1, most_rows(counts, size, kind) + 1)
            every.append(np.stack([self._row_s(replicas, rows, site, limit) for rows in shares]))
        totals = rows_by_speed(every, counts, size)
        return [-(-total // own) for total, own in zip(totals, counts, strict=True)]

    @memoize_weakly
    def _row_s(self, replicas: Replicas, rows: int, site: Site, limit: int) -> Numbers:
        """Return the seconds of a replica with so many rows; infinite where it cannot have them."""
        forward, backward = self._tables.plain_times(rows, 1.0, site)
        holds = self.limits.holds(site.form, replicas, rows, limit)
        return np.where(holds, forward + backward, np.inf)

    def _times(self, rows: Counts, site: Site, recompute: RecomputeRange, leading: int) -> _Times:
        """Return what a replica takes whose rows are ``[first, length]``."""
        found = tuple(np.zeros(rows.shape) for _ in range(3))
        for own in np.unique(rows).tolist():
            every = self._tables.times(own, 1.0, recompute, site, leading)
            found = tuple(np.where(rows == own, *pair) for pair in zip(every, found, strict=True))
        forward, backward, whole = found
        return forward, backward, whole

    def _depth(
        self, rows: Counts, replicas: Replicas, recompute: RecomputeRange, form: int, limit: int, leading: int
    ) -> Counts:
        found = np.zeros(rows.shape, dtype=np.int64)
        for own in np.unique(rows).tolist():
            depth = self.limits.depth_of_rows(form, replicas, recompute, limit, own, leading)
            found = np.where(rows == own, depth, found)
        return found

    def _by_rates(self, counts: tuple[int, ...], forms: tuple[int, ...]) -> Numbers:
        """Return what the slowest replica takes at least, by the rates of all."""
        least = np.finfo(float).tiny
        speeds = [count / np.maximum(self._rate_s(form), least) for count, form in zip(counts, forms, strict=True)]
        return np.asarray(self.family.micro_batch_size / np.add.reduce(speeds))

    def _takes_any(self, way: StageConfig, counts: tuple[int, ...], forms: tuple[int, ...]) -> bool:
        """Whether a replica of any kind may have all rows but one of each other, so that speed alone decides."""
        size = self.family.micro_batch_size
        return not self.costs.share_limits and all(
            np.all(self.limits.holds(form, way.replicas, most_rows(counts, size, at), min(self._limits[kind])))
            for at, (kind, form) in enumerate(zip(way.kinds, forms, strict=True))
        )

    @memoize_weakly
    def _row_s_at_most(self, form: int) -> Numbers:
        """Return what a row more adds at most to a forward and a backward, ``[first, length]``."""
        rows = self.costs.measured_rows(form, self.family.micro_batch_size)
        every = [self.costs.seconds.by_queue(each, 1.0, form, split=False) for each in rows]
        over = partial(self._tables.over, lengths=self._tables.ends)

        def steepest(sums: Sequence[Sequence[Sequence[float]]]) -> Numbers:
            grown = [
                (over(more) - over(fewer)) / (after - before)
                for (before, queues), (after, others) in pairwise(zip(rows, sums, strict=True))
                for fewer, more in zip(queues, others, strict=True)
            ]
            return np.maximum.reduce(grown, initial=0.0) if grown else np.zeros(over(sums[0][0]).shape)

        return steepest([[there for there, _ in own] for own in every]) + steepest(
            [[back for _, back in own] for own in every]
        )

    @memoize_weakly
    def _least_ways(self, form: int, least: int) -> _Times:
        """Return the least times of so many rows or more, whatever is launched ahead."""
        rows = {least, *self.costs.measured_rows(form, self.family.micro_batch_size)}
        every = [self._by_queue(each, form) for each in rows if each >= least]
        forward = np.minimum.reduce([queues[0][0] for queues in every])
        backward, whole = (np.minimum.reduce([each[at] for queues in every for each in queues]) for at in (1, 2))
        return forward, backward, whole

    def _by_queue(self, rows: float, form: int) -> list[_Times]:
        """Return the times of so many rows in either queue; of backwards that may be whole or halves, the least."""
        over, found = self._tables.over, list[_Times]()
        for there, back, *halves in self.costs.seconds.by_queue(rows, 1.0, form, split=self._tables.has_halves):
            first = whole = over(back)
            if halves:
                first, whole = (np.minimum(whole, each) for each in (over(halves[0]), sum(map(over, halves))))
            found.append((over(there), first, whole))
        return found

    @memoize_weakly
    def _rate_s(self, form: int) -> Numbers:
        """Return the least seconds of a forward and a backward for each of however many rows, ``[first, length]``."""
        rows = self.costs.measured_rows(form, self.family.micro_batch_size)
        every = [self._by_queue(each, form) for each in rows]
        least = [
            np.minimum.reduce([(there + back) / each for (there, _, back), each in zip(own, rows, strict=True)])
            for own in zip(*every, strict=True)
        ]
        return np.asarray(np.maximum.reduce(least))
