"""Choices: how a stage may be run on its devices, apart from how many micro-batches are in flight."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.formats.plan import Division, Shard, shards_of
from autopar.planner.costs.areas import Counts
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions

DIVISIONS: tuple[Division, ...] = ("split", "round-robin")
FEW_RANGES = 2
"""Of layers that are recomputed, on replicas that take turns, which seldom pay."""


class Fineness(NamedTuple):
    """How many stages are told apart, where not every one is."""

    ranges: int = 5
    """Of the layers of a stage that are recomputed."""
    classes: int = 48
    """Of widths, about."""
    lengths: int = 24
    """Numbers of layers up to which each is told apart; of more, those that differ by ``growth``."""
    growth: float = 1.12


FINE, ROUGH = Fineness(), Fineness(ranges=1)


class Choice(NamedTuple):
    """Division, sharding, and how many of its own layers a stage recomputes (:meth:`CostModel.recompute_levels`).

    More recomputation only ever takes longer, so that a stage recomputes as few layers of a range as fit. The search
    prices a range by the times of the fewest and the memory of the most.
    """

    division: Division
    shard: Shard
    part: int = 0
    """Of the range, among ``parts`` about equal ones from the first layer on; 0: none is recomputed."""
    parts: int = 1
    every: bool = False
    """Whether all layers are to be recomputed."""
    alone: bool = False
    """Whether this is for single replicas only, because others are to be sharded."""

    def widths(self, micro_batches: int, rows: int, divisible: bool) -> range:
        """Return the numbers of replicas that this may be chosen with."""
        least = 2 if self.shard != "none" or self.division == "round-robin" else 1
        most = micro_batches if self.division == "round-robin" else rows
        return range(least, (1 if self.alone else 2**31 if divisible else most) + 1)

    @property
    def recomputes(self) -> bool:
        """Whether any layer may be recomputed."""
        return self.every or self.part > 0

    def recomputed(self, layers: Counts) -> tuple[Counts, Counts]:
        """Return the fewest and the most layers of stages that are recomputed; more than the most: no such range.

        >>> low, high = Choice("split", "none", 2, 3).recomputed(np.array([2, 3, 7]))
        >>> low.tolist(), high.tolist()
        ([2, 2, 3], [1, 2, 5])
        """
        if self.every:
            return layers, layers
        if self.part == 0:
            return 0 * layers, 0 * layers
        high = np.rint(layers * self.part / self.parts).astype(np.int64)
        return np.rint(layers * (self.part - 1) / self.parts).astype(np.int64) + 1, high


def choices(costs: CostModel, options: PlanOptions, binding: bool, fineness: Fineness | None = None) -> list[Choice]:
    """Return every choice for stages on a kind of device; fewest seconds first, so that these win ties.

    ``binding`` tells whether memory may bind: if not, nothing is recomputed. Unless all stages are told apart,
    the ranges of layers that are recomputed are fewer for replicas that take turns, which seldom pay.
    """
    shards = tuple(dict.fromkeys(("none", *options.shards)))
    divisions: tuple[Division, ...] = DIVISIONS[:1] if costs.divisible else DIVISIONS
    every = options.recompute == "full"
    parts = min((fineness or FINE).ranges, costs.layer_count)
    recomputed = range(parts + 1) if options.recompute == "auto" and binding else range(1)
    alone = options.shard not in ("auto", "none")
    found = [
        Choice(division, shard, part, parts, every, alone=alone and shard == "none")
        for part in recomputed
        for division in divisions
        for shard in shards_of(division, shards)
    ]
    if fineness is None or len(recomputed) == 1:
        return found
    few = min(FEW_RANGES, parts)
    turning = [choice._replace(parts=few) for choice in found if choice.division != "split" and choice.part <= few]
    return [*(choice for choice in found if choice.division == "split"), *turning]
