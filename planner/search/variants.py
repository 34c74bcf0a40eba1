"""Variants: the ways to run a stage, from the options and the kinds of devices.

A choice is how replicas divide micro-batches, what they shard and what they recompute; a way is a choice on a number of
devices, where widths that run alike are one. Of each, the messages that pass behind a stage, whatever the next one is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import lcm
from typing import NamedTuple

import numpy as np

from autopar.formats.plan import Division, Shard, shards_of, turns
from autopar.options.plan import PlanOptions
from autopar.planner.candidate import Family
from autopar.planner.constraints import limits_met
from autopar.planner.costs.activations import Counts
from autopar.planner.costs.model import CostModel

DIVISIONS: tuple[Division, ...] = ("split", "round-robin")
FEW_RANGES = 2
"""Of layers that are recomputed, on replicas that take turns, which seldom pay."""


class Fineness(NamedTuple):
    """How many stages are told apart, where not every one is."""

    ranges: int = 5
    """Of the layers of a stage that are recomputed."""
    classes: int = 64
    """Of widths, about."""
    lengths: int = 24
    """Numbers of layers up to which each is told apart; of more, those that differ by ``growth``."""
    growth: float = 1.12


FINE, ROUGH = Fineness(), Fineness(ranges=1, classes=48)
COARSE = Fineness(ranges=2, classes=16, lengths=12, growth=1.25)


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

    def recompute_range(self, layers: Counts) -> tuple[Counts, Counts]:
        """Return the fewest and the most layers of stages that are recomputed; more than the most: no such range.

        >>> low, high = Choice("split", "none", 2, 3).recompute_range(np.array([2, 3, 7]))
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
    every, alone = options.recompute == "full", options.shard not in ("auto", "none")
    parts = min((fineness or FINE).ranges, costs.layer_count)
    recomputed = options.recompute == "auto" and binding

    def of(divisions: Sequence[Division], parts: int) -> Iterator[Choice]:
        for part, division in product(range(parts + 1) if recomputed else (0,), divisions):
            for shard in shards_of(division, shards):
                yield Choice(division, shard, part, parts, every, alone=alone and shard == "none")

    if fineness is None or not recomputed:
        return list(of(divisions, parts))
    return [*of(divisions[:1], parts), *of(divisions[1:], min(FEW_RANGES, parts))]


EXACT_LAYERS, FEW_EXACT, MOST_EXACT = 4, 8, 16
"""Of widths, those that so many layers have on average are told apart in any case, within limits."""


class Variant(NamedTuple):
    """A choice, and a range of widths that it is made with."""

    kind: int
    choice: Choice
    width: int
    """The least; the plans that the search tries have this many."""
    widths: tuple[int, ...]
    """Those of the range that differ in what a replica does, ascending."""
    variant: int = 0
    """Which of the ways of taking so many devices."""


def ways_of(
    costs: CostModel, family: Family, kind: int, choices: Sequence[Choice], most: int | None = None
) -> list[Variant]:
    """Return every way to run a stage on a kind of device, whatever its layers.

    Where not all widths are told apart, but ``most``, a way stands for all whose busiest replicas have as much to do:
    more devices than the fewest of them gain next to nothing. Of more than these, neighbouring ones are taken together.
    """
    count = costs.kind_of.count(kind)
    found: list[Variant] = []
    for choice in choices:
        asked = choice.widths(family.micro_batches, family.micro_batch_size, costs.divisible)
        widths = range(asked.start, min(asked.stop - 1, count) + 1)
        classes = [(width,) for width in widths] if most is None else _classes(costs, family, choice, widths, most)
        found += [Variant(kind, choice, together[0], together) for together in classes]
    return found


def _classes(costs: CostModel, family: Family, choice: Choice, widths: range, most: int) -> list[tuple[int, ...]]:
    division = choice.division
    alike: dict[tuple[float, int, tuple[bool, ...]], list[int]] = {}
    for width in widths:
        rows = family.micro_batch_size / width if costs.divisible else -(-family.micro_batch_size // width)
        busiest = rows if division == "split" else len(turns(division, width, 0, family.micro_batches))
        # One replica makes its first gradients itself; several add to buffers. On more devices less of a shard is held.
        held = width if choice.shard != "none" or width == 1 else 0
        limits = limits_met(costs, costs.shares(family.micro_batch_size, width, division))
        alike.setdefault((busiest, held, limits), []).append(width)
    exact = min(MOST_EXACT, max(FEW_EXACT, EXACT_LAYERS * len(costs.devices) // costs.layer_count))
    ratio = (widths[-1] / widths[0]) ** (1 / most) if widths else 1.0
    merged: list[list[int]] = []
    kept: tuple[bool, ...] = ()
    for (_, _, limits), together in alike.items():
        low, high = together[0], together[-1]
        if merged and limits == kept and len(alike) > most and low > exact and high <= merged[-1][0] * ratio:
            merged[-1] += [low, high]
        else:
            merged.append([low, high])
            kept = limits
    return [tuple(sorted(set(each))) for each in merged]


def lengths_of(longest: int, fineness: Fineness | None = None) -> list[int]:
    """Return the numbers of layers of stages that are told apart, ascending from 1; without ``fineness``, all.

    >>> lengths_of(40, Fineness())[20:]
    [21, 22, 23, 24, 27, 31, 35, 40]
    """
    if fineness is None:
        return list(range(1, longest + 1))
    found = list(range(1, min(longest, fineness.lengths) + 1))
    while (after := int(found[-1] * fineness.growth) + 1) <= longest:
        found.append(after)
    return found


def queues(family: Family, width: int, division: Division, most: int) -> list[tuple[int, float]]:
    """Return (messages, rows) of queues that carry a micro-batch's last rows behind a stage of ``width`` replicas.

    No next stage, of at most ``most`` replicas, has a queue emptier than all of these, or messages of fewer rows.

    >>> queues(Family(4, 6, "1f1b"), 2, "split", 3)
    [(2, 3), (4, 2)]
    """
    rows, count = family.micro_batch_size, family.micro_batches
    share, turning = (-(-rows // width), 1) if division == "split" else (rows, width)
    pairs = {(-(-count // lcm(turning, after)), share) for after in range(2, min(most, count) + 1)}
    pairs.add((-(-count // turning), min(share, -(-rows // min(most, rows)))))
    fullest: list[tuple[int, float]] = []
    for messages, each in sorted(pairs):
        if not fullest or each < fullest[-1][1]:
            fullest.append((messages, each))
    return fullest
