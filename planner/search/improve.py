"""Improve: good plans from several starts, and local moves from the best of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace, nsmallest
from itertools import accumulate
from random import Random

import numpy as np
import numpy.typing as npt

from autopar.formats.plan import Division
from autopar.planner.candidate import Family
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.search.climb import FEW_TRIES, TRIES, Climb
from autopar.planner.search.judge import Best
from autopar.planner.search.moves import SINGLE, Layout, stages_of
from autopar.planner.search.work import CLIMB, ENOUGH, EQUAL, START, least_gap
from autopar.planner.shapes import balanced
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules.route import even_shares

SEEDS = 4
"""Plans that local moves begin with: the fastest ones, of different numbers of stages, or whose replicas take turns."""
FAR, NEAR = 1.5, 1.02
"""Of the best step: slower plans are no seeds, and slower ones are not looked at more closely in the end."""
FEW_STAGES = 16
"""Numbers of stages of which every one is tried; of more, those that are about a sixteenth apart."""
FEW_JUDGED, JUDGED = 4, 32
"""Even splits that are simulated, the most promising ones; few where that takes long."""


def started(simulator: Simulator, families: Sequence[Family], options: PlanOptions, best: Best) -> None:
    """Judge even splits: every number of stages, as equal as can be, on equal widths or all devices, sharded alike."""
    climb = Climb(simulator, options, best, START * options.effort)
    order = tuple(range(len(simulator.costs.devices)))
    layouts = list(even_layouts(simulator, max(families)))
    manners = climb.manners()
    quick = sorted(
        (quickly.step_s(layout), at, family, division)
        for family in families
        for division in dict.fromkeys(each for each, _ in manners)
        for quickly in (_Quick(simulator, family, division),)
        for at, layout in enumerate(layouts)
        if division == "split" or max(layout.widths) > 1
    )
    priced: list[tuple[float, int, Family, Layout]] = []
    for quick_s, at, family, division in quick:
        if climb.left <= START * options.effort / 2 or quick_s >= FAR * best.step_s:
            break
        own = [manner for manner in manners if manner[0] == division]
        for manner in own if max(layouts[at].widths) > 1 else own[:1]:
            layout = layouts[at].run(manner)
            score = climb.score(family, layout, order, _depths(family, layout))
            priced.append((score, len(priced), family, layout))
    # Of every number of stages, widths and division first the most promising one: local moves change these slowly.
    known: Counter[object] = Counter()
    ranked = []
    for score, at, family, layout in sorted(priced):
        alike = layout.widths, tuple(division for division, _ in layout.manners)
        ranked.append((known[alike], score, at, family, layout))
        known[alike] += 1
    for at, (_, score, _, family, layout) in enumerate(nsmallest(JUDGED * options.effort, ranked)):
        if score < FAR * best.step_s and (climb.left > 0 or at < FEW_JUDGED):
            climb.judge(family, layout, order, float("inf"))


def even_layouts(simulator: Simulator, family: Family) -> Iterator[Layout]:
    """Yield splits into stages that take about as long, or have as many layers, on equal widths, or on all devices.

    On all devices, widths are as equal as can be, or go by the time that stages take.
    """
    costs, devices = simulator.costs, len(simulator.costs.devices)
    edges = list(range(costs.layer_count + 1))
    running = _sums_s(costs, family.micro_batch_size)
    for count in stage_counts(min(costs.layer_count, devices)):
        # Replicas that take turns wait for each other at every change of width, of which one is best.
        ascending = tuple(sorted(even_shares(devices, count)))
        widths = [(devices // count,) * count, ascending, ascending[::-1]]
        layers = even_shares(costs.layer_count, count)
        alike = [tuple(accumulate(each)) for each in (layers, layers[::-1])]
        every = {
            each: dict.fromkeys((balanced(costs, family, each, 1, edges).cuts, *alike))
            for each in dict.fromkeys(widths)
        }
        for each, own in every.items():
            for cuts in own:
                yield Layout(cuts, each, (SINGLE,) * count)
        for cuts in every[widths[0]]:
            seconds = np.diff(running[[0, *cuts]]).tolist()
            yield Layout(cuts, widths_by_time(seconds, devices), (SINGLE,) * count)


def widths_by_time(seconds: Sequence[float], devices: int) -> tuple[int, ...]:
    """Return how many devices stages get that take so long on one, so that the slowest is about as quick as can be.

    >>> widths_by_time([1.0, 3.0, 2.0], 12), widths_by_time([1.0, 1.0], 5)
    ((2, 6, 4), (3, 2))
    """
    total, more = sum(seconds), devices - len(seconds)
    widths = [1 + int(more * each / total) if total > 0 else 1 for each in seconds]
    slowest = [(-each / width, at) for at, (each, width) in enumerate(zip(seconds, widths, strict=True))]
    heapify(slowest)
    for _ in range(devices - sum(widths)):
        at = slowest[0][1]
        widths[at] += 1
        heapreplace(slowest, (-seconds[at] / widths[at], at))
    return tuple(widths)


def _sums_s(costs: CostModel, rows: float) -> npt.NDArray[np.float64]:
    """Return the seconds of the layers up to every one."""
    found: npt.NDArray[np.float64] = np.array(costs.sums.forward(rows)) + np.array(costs.sums.backward(rows, 1.0))
    return found


class _Quick:
    """About how long steps take in which replicas divide micro-batches in a way, were there no limit of memory."""

    def __init__(self, simulator: Simulator, family: Family, division: Division) -> None:
        self._costs, self._family, self._division = simulator.costs, family, division
        self._sums: dict[int, npt.NDArray[np.float64]] = {}
        """By width, the seconds of the layers up to every one."""

    def step_s(self, layout: Layout) -> float:
        """Return the seconds of a layout; infinite where it cannot be."""
        count, stops, widths = self._family.micro_batches, np.array(layout.cuts), np.array(layout.widths)
        most = self._family.micro_batch_size if self._division == "split" else count
        if widths.max() > most and not self._costs.divisible:
            return float("inf")
        own_s = np.zeros(len(stops))
        firsts = np.append(0, stops[:-1])
        for width in set(layout.widths):
            some, sums = widths == width, self._of_width(width)
            own_s[some] = sums[stops[some]] - sums[firsts[some]]
        turns = 1.0 if self._division == "split" else -(-count // widths) / count
        return float((count - 1) * (own_s * turns).max() + own_s.sum())

    def _of_width(self, width: int) -> npt.NDArray[np.float64]:
        if width not in self._sums:
            rows = max(self._costs.shares(self._family.micro_batch_size, width, self._division))
            self._sums[width] = _sums_s(self._costs, rows)
        return self._sums[width]


def _depths(family: Family, layout: Layout) -> list[int]:
    """Return how many micro-batches `1f1b` keeps in flight at least not to wait, by layer."""
    count = len(layout.cuts)
    return [
        min(family.micro_batches, count - at)
        for at, (first, stop, _, _) in enumerate(stages_of(layout))
        for _ in range(first, stop)
    ]


def stage_counts(most: int) -> list[int]:
    """Return numbers of stages to try: all, but of many those that are about a sixteenth apart.

    >>> stage_counts(5), stage_counts(40)[29:]
    ([1, 2, 3, 4, 5], [30, 31, 32, 34, 36, 38, 40])
    """
    found = [1]
    while found[-1] < most:
        found.append(min(most, found[-1] + max(1, found[-1] // FEW_STAGES)))
    return found


def _seed(best: Best, done: set[tuple[int, bool]]) -> tuple[int, bool] | None:
    """Return of which number of stages, with turns or without, the fastest plan is the best one that is not done."""
    seeds = sorted(best.by_manner.items(), key=lambda each: (each[1].step_s, each[0]))[:SEEDS]
    return next((manner for manner, each in seeds if manner not in done and each.step_s < FAR * best.step_s), None)


def climbed(simulator: Simulator, options: PlanOptions, best: Best, lower_bound_s: float) -> None:
    """Make local moves from the best plans, until one is close enough to the lower bound or the work is done.

    From the best one of equal widths, too, which stay equal.
    """
    if best.found is None:
        return
    gap = least_gap(options) if options.effort > 1 or options.exact else max(ENOUGH, options.gap)
    enough_s = lower_bound_s * (1 + gap)
    if best.equal is not None:
        Climb(simulator, options, best, EQUAL * options.effort, equal=True).climb(best.equal, enough_s)
    if options.equal_widths:
        return
    climb = Climb(simulator, options, best, CLIMB * options.effort)
    for tries in (FEW_TRIES, TRIES):
        done: set[tuple[int, bool]] = set()
        while climb.left > 0 and best.step_s > enough_s:
            manner = _seed(best, done)
            if manner is None:
                break
            done.add(manner)
            climb.climb(best.by_manner[manner], enough_s, tries)
    draw = Random(0)
    while climb.left > 0 and best.step_s > enough_s:
        kicked = climb.kicked(best.found, draw)
        if kicked is None:
            break
        climb.climb(kicked, enough_s)
    for each in nsmallest(SEEDS, best.by_manner.values(), key=lambda each: each.step_s):
        if each.step_s < NEAR * best.step_s:
            climb.deepen(each)
