"""Choices: how a stage may be run on its devices, apart from how many micro-batches are in flight."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from autopar.formats.plan import Division, Shard
from autopar.planner.costs import CostModel
from autopar.planner.options import PlanOptions

__all__ = ["DIVISIONS", "SHARDS", "Choice", "choices"]

DIVISIONS: tuple[Division, ...] = ("split", "round-robin")
SHARDS: tuple[Shard, ...] = ("none", "optimizer", "gradients", "parameters")
MOST_GROUPS = 5


class Choice(NamedTuple):
    """Division, sharding, and a range of recomputation levels (:meth:`CostModel.recompute_levels`).

    More recomputation only ever takes longer, so that a stage takes the first level that fits. The search prices a
    range by the times of its first level and the memory of its last one.
    """

    division: Division
    shard: Shard
    first_level: int
    last_level: int
    alone: bool = False
    """Whether this is for single replicas only, because others are to be sharded."""

    def widths(self, micro_batches: int, rows: int, divisible: bool) -> range:
        """Return the numbers of replicas that this may be chosen with."""
        least = 2 if self.shard != "none" or self.division == "round-robin" else 1
        most = micro_batches if self.division == "round-robin" else rows
        return range(least, (1 if self.alone else 2**31 if divisible else most) + 1)


def choices(costs: CostModel, options: PlanOptions, rows: int, kind: int, binding: bool) -> list[Choice]:
    """Return every choice for stages on a kind of device; fewest seconds first, so that these win ties.

    ``binding`` tells whether memory may bind: if not, nothing is recomputed.
    """
    shards = SHARDS if options.shard == "auto" else tuple(dict.fromkeys(("none", options.shard)))
    divisions: tuple[Division, ...] = DIVISIONS[:1] if costs.divisible else DIVISIONS
    ranges = _ranges(len(costs.recompute_levels(rows, kind)), options, binding)
    alone = options.shard not in ("auto", "none")
    return [
        Choice(division, shard, *levels, alone=alone and shard == "none")
        for levels in ranges
        for division in divisions
        for shard in shards
    ]


def _ranges(levels: int, options: PlanOptions, binding: bool) -> list[tuple[int, int]]:
    if options.recompute == "full":
        return [(levels - 1, levels - 1)]
    if options.recompute == "none" or not binding or levels == 1:
        return [(0, 0)]
    groups = min(MOST_GROUPS, levels) - 1
    edges = [1 + round(index * (levels - 1) / groups) for index in range(groups + 1)]
    return [(0, 0), *((start, stop - 1) for start, stop in pairwise(edges))]
