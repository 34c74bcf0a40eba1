"""Mixed: the terms of stages on devices of several kinds, from below.

Replicas share a micro-batch by their speed (:mod:`autopar.planner.shares`). Of such a stage

- the work is that of the slowest replica, with the rows that it has;
- a micro-batch's way is at least that through the quickest replica;
- in flight is what fits on every kind.

Where rows are many, or stages are taken together, the slowest replica is bounded by the rates of all: of n replicas of
every kind, which compute p seconds at least for each row of however many, none takes less than rows / sum(n / p).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autopar.hardware.topology import Place
from autopar.ownership import Replicas
from autopar.planner.bounds import StageTerms, beside_s
from autopar.planner.candidate import CandidateStage
from autopar.planner.constraints import crossed_limit
from autopar.planner.costs import memoize_weakly
from autopar.planner.costs.activations import Counts, Numbers
from autopar.planner.costs.queues import Site
from autopar.planner.search.configs import Mixture, RecomputeRange, StageConfig
from autopar.planner.shares import most_rows, rows_by_speed

if TYPE_CHECKING:
    from autopar.planner.search.stages import StageTables

MOST_ROWS = 32
"""Of a micro-batch, up to which the rows of replicas are found for every stage."""


class _KindRows(NamedTuple):
    """The fewest and the most rows that a replica on a kind of device has, ``[first, length]``."""

    least: Counts
    most: Counts


class MixedStages:
    """Prices the stages of :class:`.stages.StageTables` on several kinds of devices."""

    def __init__(self, tables: StageTables) -> None:
        """Take what prices stages of one kind."""
        self.costs, self.family, self.limits, self._tables = tables.costs, tables.family, tables.depth_limits, tables
        self._limits = {kind: self._of_kind(kind) for kind in tables.pool.kinds}

    def _of_kind(self, kind: int) -> set[int]:
        return {self.costs.limits_bytes[device] for device in self._tables.pool.all_of(kind)}

    def terms(self, way: StageConfig, place: Place, team: Place) -> StageTerms:
        """Return the least terms of a way, where the fewest or the most of its replicas stand."""
        assert way.mixture is not None
        best, found = self.costs.links.best_place, []
        for counts in dict.fromkeys((way.mixture.fewest, way.mixture.most)):
            width = sum(counts)
            where = place if width == place.ranks else best(width, place.level)
            found.append(self._terms(way.so_wide(width), way.mixture, counts, where, team))
        return StageTerms(*(np.minimum.reduce(each) for each in zip(*(each[:6] for each in found), strict=True)))

    def _terms(
        self, way: StageConfig, mixture: Mixture, counts: tuple[int, ...], place: Place, team: Place
    ) -> StageTerms:
        replicas, recompute, count = way.replicas, way.recompute, self.family.micro_batches
        forms = tuple(self.costs.form(kind, replicas, team) for kind in mixture.kinds)
        sites = tuple(Site.of(replicas.shard, place, form) for form in forms)
        limits = tuple(max(self._limits[kind]) for kind in mixture.kinds)
        order = self.limits.layer_order(forms[0])
        low, high = recompute.of(order.counts)
        rows = self._rows(replicas, counts, sites, limits) if self._is_known(mixture, replicas.team) else None
        forward, backward, work, depths = list[Numbers](), list[Numbers](), list[Numbers](), list[Counts]()
        for at, (form, site, limit) in enumerate(zip(forms, sites, limits, strict=True)):
            most = np.ones(low.shape, dtype=np.int64) if rows is None else rows[at].most
            there, back = self._times(most, site, recompute, forms[0])
            work.append(there + back)
            depths.append(self._depth(most, replicas, recompute, form, limit, forms[0]))
            fewer = self._row_ways(form) if rows is None else self._times(rows[at].least, site, recompute, forms[0])
            forward.append(np.minimum(there, fewer[0]))
            backward.append(np.minimum(back, fewer[1]))
        depth, slowest = np.minimum.reduce(depths), np.maximum.reduce(work)
        if rows is None:
            slowest = np.maximum(slowest, self._by_rates(counts, forms))
        fits = (depth > 0) & (low <= high)
        closing = np.minimum.reduce(
            [
                self._tables.reducing(replicas.shard, most_rows(counts, self.family.micro_batch_size, at), form, place)
                for at, form in enumerate(forms)
            ]
        )
        way_s = np.minimum.reduce(forward), np.minimum.reduce(backward)
        beside = np.asarray(beside_s(*way_s, count, np.maximum(depth, 1)))
        return StageTerms(
            *way_s, np.where(fits, count * slowest, np.inf), closing, count / np.maximum(depth, 1), beside
        )

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

    def _is_known(self, mixture: Mixture, team: int) -> bool:
        """Whether the rows of replicas are found for every stage: all of a kind are alike, and rows are few."""
        alike = all(len(self._limits[kind]) == 1 for kind in mixture.kinds)
        alike = alike and (team == 1 or not self.costs.across_nodes)
        few = self.family.micro_batch_size <= MOST_ROWS
        return alike and few and self._tables.apart and not self.costs.share_limits

    @memoize_weakly
    def _rows(
        self, replicas: Replicas, counts: tuple[int, ...], sites: tuple[Site, ...], limits: tuple[int, ...]
    ) -> list[_KindRows]:
        size, every = self.family.micro_batch_size, []
        for kind, (site, limit) in enumerate(zip(sites, limits, strict=True)):
            shares = range(1, most_rows(counts, size, kind) + 1)
            every.append(np.stack([self._row_s(replicas, rows, site, limit) for rows in shares]))
        totals = rows_by_speed(every, counts, size)
        return [_KindRows(total // own, -(-total // own)) for total, own in zip(totals, counts, strict=True)]

    @memoize_weakly
    def _row_s(self, replicas: Replicas, rows: int, site: Site, limit: int) -> Numbers:
        """Return the seconds of a replica with so many rows; infinite where it cannot have them."""
        forward, backward, _ = self._tables.times(rows, 1.0, RecomputeRange(), site)
        holds = self.limits.holds(site.form, replicas, rows, limit)
        return np.where(holds, forward + backward, np.inf)

    def _times(self, rows: Counts, site: Site, recompute: RecomputeRange, leading: int) -> tuple[Numbers, Numbers]:
        """Return a forward and a backward of a replica whose rows are ``[first, length]``."""
        forward, backward = np.zeros(rows.shape), np.zeros(rows.shape)
        for own in np.unique(rows).tolist():
            there, back, _ = self._tables.times(own, 1.0, recompute, site, leading)
            forward, backward = np.where(rows == own, there, forward), np.where(rows == own, back, backward)
        return forward, backward

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

    @memoize_weakly
    def _row_ways(self, form: int) -> tuple[Numbers, Numbers]:
        """Return what a forward and a backward take at least, of one row or more, whatever a host launches ahead."""
        queues = self.costs.seconds.by_queue(1, 1.0, form, split=False)
        backward = np.minimum.reduce([self._tables.over(back) for _, back in queues])
        return self._tables.over(queues[0][0]), np.asarray(backward)

    @memoize_weakly
    def _rate_s(self, form: int) -> Numbers:
        """Return the least seconds of a forward and a backward for each of however many rows, ``[first, length]``."""
        rows = self.costs.measured_rows(form, self.family.micro_batch_size)
        every = [self.costs.seconds.by_queue(each, 1.0, form, split=False) for each in rows]
        over, queues = self._tables.over, zip(*every, strict=True)
        least = [
            np.minimum.reduce(
                [(over(there) + over(back)) / each for (there, back), each in zip(own, rows, strict=True)]
            )
            for own in queues
        ]
        return np.asarray(np.maximum.reduce(least))
