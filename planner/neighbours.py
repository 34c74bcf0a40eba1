"""Neighbours: plans that differ from the chosen one in a single respect."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from operator import lt
from typing import NamedTuple

from autopar.formats.plan import Shard
from autopar.planner.alternatives import Reference, try_stages, ways_of
from autopar.planner.bounds.chain import bound
from autopar.planner.candidate import Candidate, Family, divisors, place
from autopar.planner.closest import MOST_EDGES, MOST_WIDTHS, closest
from autopar.planner.constraints import Constraints
from autopar.planner.options import PlanOptions
from autopar.planner.search.judge import Best, Found
from autopar.planner.shortfall import explain
from autopar.planner.simulator.simulate import Simulator

__all__ = ["neighbours"]

MOST_SHAPES = 12
"""Shapes of stages that are priced by their bounds."""
TRIES = 3
"""Shapes of stages, and ways to divide and shard them, that are simulated; those of least bounds."""
MOST_TURNS = 60_000
"""Micro-batches times ranks that are simulated for one of them; of larger plans fewer are tried, or none."""
MOST_NEIGHBOURS = 5
MOST_MOVES = 4
"""To neighbours that are faster."""
MOST_TABLES = 5_000_000
"""Stages that are looked at to find the least shortfall of a number of them."""


class _Ranged(NamedTuple):
    """A stage, as far as constraints go."""

    first: int
    stop: int
    devices: tuple[int, ...]
    shares: tuple[float, ...]


class _Shape(NamedTuple):
    """Where stages end, and how many replicas each has."""

    cuts: tuple[int, ...]
    widths: tuple[int, ...]


def _shape_of(candidate: Candidate) -> _Shape:
    return _Shape(
        tuple(stage.stop for stage in candidate.stages), tuple(len(stage.devices) for stage in candidate.stages)
    )


def neighbours(simulator: Simulator, families: Sequence[Family], options: PlanOptions, best: Best) -> list[Reference]:
    """Return the best of fewer and more stages, and the chosen stages run otherwise; nearest first, at most five.

    Of one stage, of one more and of one less than chosen: the fastest that the search met, or that joining or dividing
    the chosen stages gives, or else by how much the best of that many does not fit. A neighbour that is faster takes
    the chosen plan's place in ``best``.
    """
    for _ in range(MOST_MOVES):
        assert best.found is not None
        near = _Neighbours(simulator, families, options, best, best.found.candidate).all()
        before = best.found
        for each in near:
            if each.found is not None:
                best.consider(each.found)
        if best.found is before:
            break
    return [each for each in near if each.found is None or each.found is not best.found]


def _nearness(reference: Reference) -> tuple[bool, float]:
    return reference.found is None, reference.found.step_s if reference.found else 0.0


class _Neighbours:
    def __init__(
        self, simulator: Simulator, families: Sequence[Family], options: PlanOptions, best: Best, chosen: Candidate
    ) -> None:
        self.simulator, self.costs = simulator, simulator.costs
        self.families, self.options, self.best, self.chosen = families, options, best, chosen
        self.constraints = Constraints.of(self.costs, options)
        self.family = Family(*chosen[:3])
        used = tuple(device for stage in chosen.stages for device in stage.devices)
        idle = sorted(set(range(len(self.costs.devices))) - set(used))
        self.order = (*used, *idle)
        self.tries = min(TRIES, MOST_TURNS // (chosen.micro_batches * len(used)))
        self.shards: tuple[Shard, ...] = ("none",) if options.shard == "auto" else (options.shard,)
        self.sums = self.costs.sums.forward(chosen.micro_batch_size)
        self.shape = _shape_of(chosen)

    def all(self) -> list[Reference]:
        """Return all neighbours, without those that cannot be."""
        every = list(self._numbers())
        if self.tries:
            others = [*self._fewer_devices(), *self._counts(), *self._depths(), *self._kept()]
            every += sorted(others, key=_nearness)[: MOST_NEIGHBOURS - len(every)]
        return sorted(every, key=_nearness)

    def _numbers(self) -> Iterator[Reference]:
        own, rules = len(self.chosen.stages), self.constraints
        for count in sorted({own - 1, own + 1, 1}):
            if rules.least_stages <= count <= rules.most_stages and count != own:
                reference = self._of(count)
                if reference is not None:
                    yield reference

    def _of(self, count: int) -> Reference | None:
        """Return the best of a number of stages, or why there is none."""
        name = f"{count} stage{'s' if count > 1 else ''}"
        shapes = {1: self._joined(), -1: self._divided()}.get(len(self.chosen.stages) - count, [])
        found = self._fastest(shapes, self.families)
        for other in (found, self.best.by_stages.get(count)):
            if other is not None and (found is None or other.step_s < found.step_s):
                found = other
        if found is None:
            nearest = self._closest(count)
            if nearest is None or nearest[0] > 0:
                return None if nearest is None else Reference(name, None, explain(self.costs, nearest[1]))
            found = Found(self.simulator.step_s(nearest[1]), nearest[1])
        return Reference(name, self._improved(found), None)

    def _improved(self, found: Found) -> Found:
        """Return a plan of as many stages that moving a cut or a device to the next stage makes no faster."""
        for _ in range(MOST_MOVES if self.tries else 0):
            better = self._fastest(self._moved(_shape_of(found.candidate)), self.families)
            if better is None or better.step_s >= found.step_s:
                break
            found = better
        return found

    def _closest(self, count: int) -> tuple[int, Candidate] | None:
        """Return the least shortfall of so many stages; none if there is no such plan, or too many to look at."""
        devices, edges = len(self.costs.devices), min(MOST_EDGES, self.costs.layer_count)
        size = count * devices * min(devices, MOST_WIDTHS) * edges**2
        every = self.families if size * len(self.families) <= MOST_TABLES else [self.family]
        return closest(self.costs, every, self.options, count) if size <= MOST_TABLES else None

    def _seconds(self, first: int, stop: int, width: int) -> float:
        """Return the forward seconds of layers among replicas, about: to choose what is worth to be priced."""
        return (self.sums[stop] - self.sums[first]) / width

    def _joined(self) -> list[_Shape]:
        """Return two neighbours joined, those first that have least to compute together."""
        cuts, widths = self.shape
        edges = (0, *cuts)
        found = []
        for index in range(len(cuts) - 1):
            both = widths[index] + widths[index + 1]
            shape = _Shape(cuts[:index] + cuts[index + 1 :], (*widths[:index], both, *widths[index + 2 :]))
            found.append((self._seconds(edges[index], edges[index + 2], both), shape))
        return self._first(shape for _, shape in sorted(found))

    def _divided(self) -> list[_Shape]:
        """Return a stage divided about evenly, those first that leave least for the slower part to compute."""
        cuts, widths = self.shape
        idle = len(self.costs.devices) - sum(widths)
        found = []
        for index, (first, stop) in enumerate(zip((0, *cuts[:-1]), cuts, strict=True)):
            own = widths[index] + (widths[index] == 1 and idle > 0)
            for width in sorted({1, own // 2, own - 1} - {0, own}):
                total = self._seconds(first, stop, own)
                middle = bisect_left(self.sums, self.sums[first] + total * width, first + 1, max(first + 1, stop - 1))
                for cut in range(max(first + 1, middle - 1), min(stop, middle + 1)):
                    parts = self._seconds(first, cut, width), self._seconds(cut, stop, own - width)
                    between = (*widths[:index], width, own - width, *widths[index + 1 :])
                    found.append((max(parts) - total, _Shape((*cuts[:index], cut, *cuts[index:]), between)))
        return self._first(shape for _, shape in sorted(found))

    def _moved(self, shape: _Shape) -> list[_Shape]:
        """Return shapes with a cut, or a device, moved by one; those first whose slowest stage has least to compute."""
        cuts, widths = shape
        found = []
        for index in range(len(cuts) - 1):
            for by in (-1, 1):
                moved = _Shape((*cuts[:index], cuts[index] + by, *cuts[index + 1 :]), widths)
                passed = (widths[index] + by, widths[index + 1] - by)
                found += [moved, _Shape(cuts, (*widths[:index], *passed, *widths[index + 2 :]))]
        if sum(widths) < len(self.costs.devices):
            wider = [(*widths[:index], width + 1, *widths[index + 1 :]) for index, width in enumerate(widths)]
            found += [_Shape(cuts, each) for each in wider]
        sound = [each for each in found if min(each.widths) > 0 and all(map(lt, (0, *each.cuts), each.cuts))]
        return self._first(sorted(sound, key=self._slowest))

    def _first(self, shapes: Iterable[_Shape]) -> list[_Shape]:
        """Return the first shapes that obey the constraints."""
        return list(islice(filter(self._obeys, shapes), MOST_SHAPES))

    def _obeys(self, shape: _Shape) -> bool:
        """Whether stages may be so, on devices in the order of the chosen plan's."""
        edges, taken = (0, *shape.cuts), (0, *accumulate(shape.widths))
        rows = self.chosen.micro_batch_size
        stages = [
            _Ranged(edges[at], stop, self.order[taken[at] : taken[at + 1]], self.costs.shares(rows, shape.widths[at]))
            for at, stop in enumerate(shape.cuts)
        ]
        return self.constraints.broken(stages, self.costs.kind_of) is None

    def _slowest(self, shape: _Shape) -> float:
        edges = zip((0, *shape.cuts), shape.cuts, shape.widths, strict=False)
        return max(self._seconds(first, stop, width) for first, stop, width in edges)

    def _fewer_devices(self) -> Iterator[Reference]:
        cuts, widths = self.shape
        if self.options.use_all or sum(widths) == 1:
            return
        shapes = [
            _Shape(cuts, (*widths[:index], width - 1, *widths[index + 1 :]))
            for index, width in enumerate(widths)
            if width > 1
        ]
        if not shapes and len(cuts) > self.constraints.least_stages:
            shapes = [_Shape(joined.cuts, tuple(min(1, width) for width in joined.widths)) for joined in self._joined()]
        found = self._fastest(self._first(shapes), [self.family])
        if found is not None:
            count = sum(widths) - 1
            yield Reference(f"{count} device{'s' if count > 1 else ''}", found, None)

    def _counts(self) -> Iterator[Reference]:
        if self.options.micro_batches is not None:
            return
        own = self.chosen.micro_batches
        counts = divisors(self.costs.batch)
        at = counts.index(own)
        for count in (*counts[max(0, at - 1) : at], *counts[at + 1 : at + 2]):
            family = Family(count, self.costs.batch // count, self.family.schedule)
            yield from self._run(f"{count} micro-batch{'es' if count > 1 else ''}", family, self.options)

    def _depths(self) -> Iterator[Reference]:
        count = self.chosen.micro_batches
        full = all(stage.warmup == stage.turns(0, count) for stage in self.chosen.stages)
        if self.options.schedule == "auto" and len(self.chosen.stages) > 1 and count > 1 and not full:
            yield from self._run("gpipe", self.family._replace(schedule="gpipe"), self.options)

    def _kept(self) -> Iterator[Reference]:
        if self.options.recompute == "auto" and any(stage.recompute for stage in self.chosen.stages):
            yield from self._run("no recomputation", self.family, replace(self.options, recompute="none"))

    def _run(self, name: str, family: Family, options: PlanOptions) -> Iterator[Reference]:
        """Yield the chosen stages in another family, or with other options."""
        tried = try_stages(self.simulator, [family], options, *self.shape, order=self.order, most=self.tries)
        if tried.found is not None:
            yield Reference(name, tried.found, None)
        elif tried.closest is not None:
            yield Reference(name, None, explain(self.costs, tried.closest[1]))

    def _fastest(self, shapes: Sequence[_Shape], families: Sequence[Family]) -> Found | None:
        """Return the fastest plan of the shapes, in the families, with the least bounds."""
        priced = []
        for shape in shapes if self.tries else ():
            for family in families:
                ways = [next(iter(ways_of(self.costs, family, width, self.shards)), None) for width in shape.widths]
                if None not in ways and family.micro_batches * sum(shape.widths) <= MOST_TURNS:
                    frame = place(family, *shape, ways, divisible=self.costs.divisible)  # type: ignore[arg-type]
                    priced.append((bound(self.costs, Candidate(*family, frame)), shape, family))
        best, fitting = Best(), 0
        for least_s, shape, family in sorted(priced)[: 4 * self.tries]:
            if least_s >= best.step_s or fitting == self.tries:
                break
            tried = try_stages(self.simulator, [family], self.options, *shape, order=self.order, most=1)
            if tried.found is not None:
                best.consider(tried.found)
                fitting += 1
        return best.found
