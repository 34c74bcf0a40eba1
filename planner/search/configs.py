"""Configs: the ways to run a stage, from the options and the kinds of devices.

By how many replicas, how they divide micro-batches, what they shard and what they recompute; numbers of replicas that
run alike are one. Of each, the messages that pass behind a stage, whatever the next one is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise, product
from math import lcm
from typing import NamedTuple

import numpy as np

from autopar.options.plan import PlanOptions
from autopar.ownership import DIVISIONS, SINGLE, Replicas, shards_of
from autopar.planner.candidate import Family
from autopar.planner.constraints import limits_met
from autopar.planner.costs.activations import Counts
from autopar.planner.costs.model import CostModel
from autopar.planner.pool import Taken

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


class Mixture(NamedTuple):
    """How many replicas of a stage run on each of several kinds of devices."""

    kinds: tuple[int, ...]
    """Ascending."""
    fewest: tuple[int, ...]
    """Replicas by kind; the plans that the search tries have so many."""
    most: tuple[int, ...]
    """Where several numbers are taken together, the largest."""

    def taken(self, team: int) -> Taken:
        """Return (kind, devices) of all kinds, where so many devices run each replica."""
        return tuple((kind, team * count) for kind, count in zip(self.kinds, self.fewest, strict=True))


def mixtures_of(counts: Mapping[int, int], rows: int, classes: int | None) -> list[Mixture]:
    """Return the mixtures of kinds of which there are so many replicas, at most one a row; about so many classes.

    >>> [(each.fewest, each.most) for each in mixtures_of({0: 2, 1: 1}, 4, None)]
    [((1, 1), (1, 1)), ((2, 1), (2, 1))]
    >>> [(each.fewest, each.most) for each in mixtures_of({0: 1, 1: 9}, 10, 4)]
    [((1, 1), (1, 2)), ((1, 3), (1, 9))]
    """
    found = []
    for size in range(2, len(counts) + 1):
        for kinds in combinations(sorted(counts), size):
            each = None if classes is None else max(2, round(classes ** (1 / size)))
            for bands in product(*(_bands(counts[kind], each) for kind in kinds)):
                fewest, most = zip(*bands, strict=True)
                if sum(fewest) <= rows:
                    found.append(Mixture(kinds, fewest, most))
    return found


def _bands(count: int, most: int | None) -> list[tuple[int, int]]:
    """Return numbers up to ``count``, those together that differ by about a factor; None: each by itself."""
    if most is None or count <= most:
        return [(each, each) for each in range(1, count + 1)]
    growth = count ** (1 / most)
    edges = sorted({min(count, max(at + 1, round(growth**at))) for at in range(most)} | {count + 1})
    return [(low, high - 1) for low, high in pairwise(edges) if low < high]


class StageConfig(NamedTuple):
    """A way to run a stage: on some kinds of devices, by some replicas, with some layers recomputed."""

    kinds: tuple[int, ...]
    """Ascending."""
    replicas: Replicas
    """As many as the least of ``widths``; the plans that the search tries have so many."""
    recompute: RecomputeRange
    widths: tuple[int, ...] = ()
    """The numbers of replicas that it stands for, ascending: those that differ in what a replica does."""
    counts: tuple[tuple[int, ...], ...] = ()
    """The same of each kind, fewest first; of several kinds, the fewest and the most."""
    variant: int = 0
    """Which of the ways of taking so many devices."""

    @property
    def is_mixed(self) -> bool:
        """Whether it is on several kinds."""
        return len(self.kinds) > 1

    @property
    def taken(self) -> Taken:
        """(kind, devices) of all kinds, of the fewest replicas."""
        return tuple((kind, self.replicas.team * count) for kind, count in zip(self.kinds, self.counts[0], strict=True))

    def so_wide(self, width: int) -> StageConfig:
        """Return it with one of its widths in place of the least."""
        return self._replace(replicas=self.replicas._replace(width=width))


def configs_of(
    costs: CostModel,
    family: Family,
    options: PlanOptions,
    kinds: Sequence[int],
    binding: bool,
    fineness: Fineness | None = None,
    team: Replicas = SINGLE,
) -> list[StageConfig]:
    """Return every way to run a stage on some kinds of devices, whatever its layers; of equal seconds the first wins.

    Replicas are each run by as many devices as one of ``team``, and as these do. Of several kinds, all replicas split
    micro-batches: in turn, they would be as fast as the slowest kind, one turn each.

    ``binding`` tells whether memory may bind: if not, nothing is recomputed. Unless all stages are told apart, the
    ranges of layers that are recomputed are fewer for replicas that take turns, which seldom pay; and a way stands for
    all whose busiest replicas have as much to do: more devices than the fewest of them gain next to nothing. Of more
    than ``fineness.classes`` of these, neighbouring ones are taken together.
    """
    mixed, most_ranges = len(kinds) > 1, (fineness or FINE).ranges
    divisions = DIVISIONS[:1] if costs.divisible or mixed else DIVISIONS
    ranges = _ranges(costs, options, binding, FEW_RANGES if mixed and fineness else most_ranges)
    ways = [*product(ranges, divisions)]
    if fineness is not None and len(ranges) > 1:
        few = _ranges(costs, options, binding, min(FEW_RANGES, most_ranges))
        ways = [*product(ranges, divisions[:1]), *product(few, divisions[1:])]
    shards = tuple(dict.fromkeys(options.shards if mixed else ("none", *options.shards)))
    every = [
        (Replicas(0, division, shard).run_by(team), again)
        for again, division in ways
        for shard in shards_of(division, shards)
    ]
    counts, found = {kind: costs.kind_of.count(kind) // team.team for kind in kinds}, list[StageConfig]()
    for mixture in mixtures_of(counts, family.micro_batch_size, fineness and fineness.classes) if mixed else ():
        widths = tuple(sorted({sum(mixture.fewest), min(sum(mixture.most), family.micro_batch_size)}))
        ends = tuple(dict.fromkeys((mixture.fewest, mixture.most)))
        found += (
            StageConfig(mixture.kinds, how._replace(width=widths[0]), again, widths, ends) for how, again in every
        )
    for how, again in () if mixed else every:
        # Others than single ones are to be sharded.
        single = options.shard not in ("auto", "none") and how.shard == "none"
        for widths in _widths(costs, family, how, 1 if single else counts[kinds[0]], fineness):
            own = tuple(zip(widths, strict=True))
            found.append(StageConfig((kinds[0],), how._replace(width=widths[0]), again, widths, own))
    return found


def _ranges(costs: CostModel, options: PlanOptions, binding: bool, most: int) -> list[RecomputeRange]:
    """Return the ranges of layers that stages may recompute, and none; about so many, where memory may bind."""
    parts, every = min(most, costs.layer_count), options.recompute == "full"
    some = range(parts + 1) if options.recompute == "auto" and binding else range(1)
    return [RecomputeRange(part, parts, every) for part in some]


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
