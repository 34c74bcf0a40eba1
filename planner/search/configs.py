"""Configs: the ways to run a stage, from the options and the kinds of devices.

By how many replicas, how they divide micro-batches, what they shard and what they recompute; numbers of replicas that
run alike are one. Of each, the messages that pass behind a stage, whatever the next one is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import lcm
from typing import NamedTuple

import numpy as np

from autopar.options.plan import PlanOptions
from autopar.ownership import DIVISIONS, SINGLE, Division, Replicas, shards_of
from autopar.planner.candidate import Family
from autopar.planner.constraints import limits_met
from autopar.planner.costs.activations import Counts
from autopar.planner.costs.model import CostModel

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


class RecomputeRange(NamedTuple):
    """How many of its own layers a stage recomputes (:meth:`CostModel.recompute_levels`).

    More recomputation only ever takes longer, so that a stage recomputes as few layers of a range as fit. The search
    prices a range by the times of the fewest and the memory of the most.
    """

    part: int = 0
    """Among ``parts`` about equal ones from the first layer on; 0: none is recomputed."""
    parts: int = 1
    every: bool = False
    """Whether all layers are to be recomputed."""

    @property
    def recomputes(self) -> bool:
        """Whether any layer may be recomputed."""
        return self.every or self.part > 0

    def of(self, layers: Counts) -> tuple[Counts, Counts]:
        """Return the fewest and the most layers of stages that are recomputed; more than the most: no such range.

        >>> low, high = RecomputeRange(2, 3).of(np.array([2, 3, 7]))
        >>> low.tolist(), high.tolist()
        ([2, 2, 3], [1, 2, 5])
        """
        if self.every:
            return layers, layers
        if self.part == 0:
            return 0 * layers, 0 * layers
        high = np.rint(layers * self.part / self.parts).astype(np.int64)
        return np.rint(layers * (self.part - 1) / self.parts).astype(np.int64) + 1, high


class StageConfig(NamedTuple):
    """A way to run a stage: on a kind of device, by some replicas, with some layers recomputed."""

    kind: int
    replicas: Replicas
    """As many as the least of ``widths``; the plans that the search tries have so many."""
    recompute: RecomputeRange
    widths: tuple[int, ...] = ()
    """The numbers of replicas that it stands for, ascending: those that differ in what a replica does."""
    variant: int = 0
    """Which of the ways of taking so many devices."""

    def so_wide(self, width: int) -> StageConfig:
        """Return it with one of its widths in place of the least."""
        return self._replace(replicas=self.replicas._replace(width=width))


def configs_of(
    costs: CostModel,
    family: Family,
    options: PlanOptions,
    kind: int,
    binding: bool,
    fineness: Fineness | None = None,
    team: Replicas = SINGLE,
) -> list[StageConfig]:
    """Return every way to run a stage on a kind of device, whatever its layers; of equal seconds the first ones win.

    Replicas are each run by as many devices as one of ``team``, and as these do.

    ``binding`` tells whether memory may bind: if not, nothing is recomputed. Unless all stages are told apart, the
    ranges of layers that are recomputed are fewer for replicas that take turns, which seldom pay; and a way stands for
    all whose busiest replicas have as much to do: more devices than the fewest of them gain next to nothing. Of more
    than ``fineness.classes`` of these, neighbouring ones are taken together.
    """
    shards = tuple(dict.fromkeys(("none", *options.shards)))
    every, sharded = options.recompute == "full", options.shard not in ("auto", "none")
    parts = min((fineness or FINE).ranges, costs.layer_count)
    recomputed = options.recompute == "auto" and binding
    found: list[StageConfig] = []

    def add(divisions: Sequence[Division], parts: int) -> None:
        for part, division in product(range(parts + 1) if recomputed else (0,), divisions):
            for shard in shards_of(division, shards):
                # Others than single ones are to be sharded.
                most = 1 if sharded and shard == "none" else costs.kind_of.count(kind) // team.team
                how, again = Replicas(0, division, shard).run_by(team), RecomputeRange(part, parts, every)
                widths = _widths(costs, family, how, most, fineness)
                found.extend(StageConfig(kind, how._replace(width=each[0]), again, each) for each in widths)

    divisions = DIVISIONS[:1] if costs.divisible else DIVISIONS
    if fineness is None or not recomputed:
        add(divisions, parts)
    else:
        add(divisions[:1], parts)
        add(divisions[1:], min(FEW_RANGES, parts))
    return found


def _widths(
    costs: CostModel, family: Family, how: Replicas, most: int, fineness: Fineness | None
) -> list[tuple[int, ...]]:
    """Return the numbers of replicas, at most so many, that may be run in a way, those together that run alike."""
    least = 2 if how.shard != "none" or how.division == "round-robin" else 1
    busy = family.micro_batches if how.division == "round-robin" else family.micro_batch_size
    widths = range(least, min(most, most if costs.divisible else busy) + 1)
    return (
        [(width,) for width in widths] if fineness is None else _classes(costs, family, how, widths, fineness.classes)
    )


EXACT_LAYERS, FEW_EXACT, MOST_EXACT = 4, 8, 16
"""Of widths, those that so many layers have on average are told apart in any case, within limits."""


def _classes(costs: CostModel, family: Family, how: Replicas, widths: range, most: int) -> list[tuple[int, ...]]:
    alike: dict[tuple[float, int, tuple[bool, ...]], list[int]] = {}
    for width in widths:
        replicas = how._replace(width=width)
        shares = costs.shares(family.micro_batch_size, replicas)
        busiest = max(shares) if replicas.period == 1 else replicas.most(family.micro_batches)
        # One replica makes its first gradients itself; several add to buffers. On more devices less of a shard is held.
        held = width if how.shard != "none" or width == 1 else 0
        limits = limits_met(costs, shares)
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


def queues(family: Family, replicas: Replicas, most: int) -> list[tuple[int, float]]:
    """Return (messages, rows) of queues that carry a micro-batch's last rows behind a stage of some replicas.

    No next stage, of at most ``most`` replicas, has a queue emptier than all of these, or messages of fewer rows.

    >>> queues(Family(4, 6, "1f1b"), Replicas(2), 3)
    [(2, 3), (4, 2)]
    """
    rows, count, period = family.micro_batch_size, family.micro_batches, replicas.period
    share = replicas.shares(rows)[-1]
    pairs = {(-(-count // lcm(period, after)), share) for after in range(2, min(most, count) + 1)}
    pairs.add((-(-count // period), min(share, -(-rows // min(most, rows)))))
    fullest: list[tuple[int, float]] = []
    for messages, each in sorted(pairs):
        if not fullest or each < fullest[-1][1]:
            fullest.append((messages, each))
    return fullest
