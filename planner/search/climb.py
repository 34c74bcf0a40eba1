"""Climb: local moves from good plans, judged by the simulator.

A move is priced by what it changes: what the stages it touches would compute with as much in flight as the stages there
have now, recomputing what then does not fit. The most promising ones are simulated. Of plans as fast as each other, one
is better whose slow stages are fewer: so several moves may follow each other before a step gets shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nsmallest
from random import Random
from typing import NamedTuple

from autopar.formats.plan import Division, shards_of
from autopar.planner.bounds.chain import bound
from autopar.planner.candidate import Candidate, Family, Placed, counts_beside
from autopar.planner.constraints import Constraints
from autopar.planner.costs.levels import Span
from autopar.planner.options import PlanOptions
from autopar.planner.search.depths import depth_choices, least_recomputed, span_of
from autopar.planner.search.judge import Best, Found
from autopar.planner.search.moves import (
    Layout,
    Manner,
    cuts_moved,
    devices_moved,
    divided,
    joined,
    layers_passed,
    manners_changed,
    stages_of,
)
from autopar.planner.search.work import fitted_us, priced_us, scored_us, simulated_us
from autopar.planner.simulator.simulate import Simulator

__all__ = ["Climb"]

MOST_EDGES = 1024
BUSY = 6
"""Stages that take devices, or are divided: those that compute longest."""
TRIES = 12
"""Moves that are simulated of those to a plan's neighbours, the most promising ones."""
NORM = 16
"""Power of the mean that stands for the slowest stage: it grows with how many are about as slow."""
SIDEWAYS = 2e-3
"""By what share a plan may be slower than the one before, if fewer of its stages are slow."""
MOST_SIDEWAYS = 6
"""Such moves, one after the other."""
KICKS, KICKED_AMONG = 3, 30
"""Moves away from a plan where no single one helps, each drawn among so many."""


class _At(NamedTuple):
    """Where a climb stands."""

    found: Found
    family: Family
    layout: Layout
    order: tuple[int, ...]
    """All devices, in the order in which stages take them."""


class _Stage(NamedTuple):
    """A stage of a layout where it stands."""

    first: int
    stop: int
    width: int
    manner: Manner
    in_flight: int
    """Micro-batches, on all replicas."""
    devices: tuple[int, ...]


class Climb:
    """Moves from plan to plan; what it meets is kept in ``best``."""

    def __init__(
        self, simulator: Simulator, options: PlanOptions, best: Best, work: float, *, equal: bool = False
    ) -> None:
        """Prepare to do about so much ``work``, in microseconds of a core, by counts and not by a clock.

        With ``equal``, stages stay as wide as each other, and are run alike.
        """
        self.simulator, self.costs, self.options, self.best = simulator, simulator.costs, options, best
        self.left, self.equal = work, equal
        self.rules = Constraints.of(self.costs, options)
        self.edges = self.rules.edges(MOST_EDGES)
        self._places: dict[tuple[int, ...], tuple[object, ...] | None] = {}
        self._own_s: dict[tuple[object, ...], float | None] = {}
        self._tried: set[tuple[Family, Layout, tuple[int, ...]]] = set()

    def climb(self, found: Found, enough_s: float = 0.0) -> None:
        """Move on from a plan while that makes it faster, or its slow stages fewer, until it is fast enough."""
        at = self._at(found)
        self._tried.add((at.family, at.layout, at.order))
        sideways = 0
        while self.left > 0 and at.found.step_s > enough_s:
            after = self._next(at)
            if after is None:
                return
            sideways = 0 if after.found.step_s < at.found.step_s * (1 - 1e-6) else sideways + 1
            if sideways > MOST_SIDEWAYS:
                return
            at = after

    def kicked(self, found: Found, draw: Random) -> Found | None:
        """Return a plan some moves away, which need not be faster; None where none of those drawn fits."""
        at = self._at(found)
        for _ in range(KICKS):
            scored = {layout: self._score(at, layout) for layout in self._near(at)}
            near = nsmallest(KICKED_AMONG, scored, key=lambda each: scored[each])
            layout = draw.choice(near) if near else at.layout
            self._tried.discard((at.family, layout, at.order))
            after = self.judge(at.family, layout, at.order, float("inf"))
            if after is not None:
                at = at._replace(found=after, layout=layout)
            if self.left <= 0:
                break
        return None if at.found is found else at.found

    def judge(self, family: Family, layout: Layout, order: tuple[int, ...], below_s: float) -> Found | None:
        """Return the fastest plan of a layout, if it may take less than ``below_s``; None where none fits."""
        if (family, layout, order) in self._tried:
            return None
        self._tried.add((family, layout, order))
        return self._judged(family, layout, order, below_s)

    def deepen(self, found: Found) -> None:
        """Judge a plan's stages with more choices of what is in flight than a climb looks at."""
        at = self._at(found)
        self._judged(at.family, at.layout, at.order, found.step_s, few=False)

    def _judged(
        self, family: Family, layout: Layout, order: tuple[int, ...], below_s: float, *, few: bool = True
    ) -> Found | None:
        frame = self._frame(family, layout, order)
        self.left -= priced_us(len(layout.cuts))
        if frame is None or bound(self.costs, Candidate(*family, frame)) >= below_s:
            return None
        spans = [span_of(self.costs, family, self.options, stage) for stage in frame]
        choices = depth_choices(self.costs, family, frame, spans, exact=False, few=few)
        self.left -= fitted_us(len(frame))
        if choices.closest is not None:
            self.best.miss(*choices.closest)
        return self._fastest(choices.candidates, below_s)

    def _fastest(self, candidates: Sequence[Candidate], below_s: float) -> Found | None:
        found: Found | None = None
        priced = sorted((bound(self.costs, candidate), at) for at, candidate in enumerate(candidates))
        for least_s, at in priced:
            if least_s >= (below_s if found is None else min(below_s, found.step_s)):
                break
            candidate = candidates[at]
            step_s = self.best.judge(self.simulator, candidate)
            self.left -= simulated_us(candidate)
            if step_s is not None and (found is None or step_s < found.step_s):
                found = Found(step_s, candidate)
        return found

    def _next(self, at: _At) -> _At | None:
        """Return the first of the most promising neighbours that is faster, or as fast with fewer slow stages."""
        own_s = self._score(at, at.layout)
        untried = (each for each in self._near(at) if (at.family, each, at.order) not in self._tried)
        near = {layout: self._score(at, layout) for layout in untried}
        beside: tuple[float, _At] | None = None
        for layout in nsmallest(TRIES, near, key=lambda each: near[each]):
            if self.left <= 0 or near[layout] == float("inf"):
                break
            found = self.judge(at.family, layout, at.order, at.found.step_s * (1 + SIDEWAYS))
            if found is None:
                continue
            after = at._replace(found=found, layout=layout)
            if found.step_s < at.found.step_s * (1 - 1e-6):
                return after
            if near[layout] < min(own_s * (1 - 1e-6), float("inf") if beside is None else beside[0]):
                beside = near[layout], after
        return self._otherwise(at) or (None if beside is None else beside[1])

    def _otherwise(self, at: _At) -> _At | None:
        """Return the layout with other micro-batches, or other manners, if that is faster."""
        for family, layout in self._run_otherwise(at):
            found = self.judge(family, layout, at.order, at.found.step_s)
            if found is not None and found.step_s < at.found.step_s * (1 - 1e-6):
                return at._replace(found=found, family=family, layout=layout)
        return None

    def _run_otherwise(self, at: _At) -> Iterator[tuple[Family, Layout]]:
        for layout in manners_changed(at.layout, self.manners(), () if self.equal else self._busy(at)[:2]):
            yield at.family, layout
        if self.options.micro_batches is None:
            for count in counts_beside(self.costs.batch, at.family.micro_batches):
                yield Family(count, self.costs.batch // count, at.family.schedule), at.layout

    def _near(self, at: _At) -> Iterator[Layout]:
        layout, busy = at.layout, self._busy(at)
        some = busy[:BUSY]
        inner = range(len(layout.cuts) - 1)
        for cuts in cuts_moved(layout.cuts, self.edges, inner, 2):
            yield layout._replace(cuts=cuts)
        for cuts in layers_passed(layout.cuts, self.edges, some):
            yield layout._replace(cuts=cuts)
        if self.equal:
            return
        idle = len(at.order) - sum(layout.widths)
        for widths in devices_moved(layout.widths, idle, some, all_used=self.options.use_all):
            moved = layout
            for index, width in enumerate(widths):
                if width != layout.widths[index]:
                    moved = moved.with_width(index, width, layout.manner_near(index))
            yield moved
        yield from joined(layout, inner)
        sums = self.costs.sums.forward(at.family.micro_batch_size)
        yield from divided(layout, some, sums, idle)

    def manners(self) -> list[Manner]:
        """Return the manners in which replicas may be run."""
        shards = self.options.shards
        divisions: tuple[Division, ...] = ("split",) if self.costs.divisible else ("split", "round-robin")
        return [(division, shard) for division in divisions for shard in shards_of(division, shards)]

    def _busy(self, at: _At) -> list[int]:
        """Return the stages, those first that compute longest."""
        loads = [self._load_s(at.family, stage) for stage in at.found.candidate.stages]
        return sorted(range(len(loads)), key=lambda index: -loads[index])

    def _load_s(self, family: Family, stage: Placed) -> float:
        turns = stage.turns(0, family.micro_batches)
        own_s = self.costs.forward_s(stage, 0) + self.costs.backward_s(stage, 0, turns)
        return own_s * turns / family.micro_batches

    def _score(self, at: _At, layout: Layout) -> float:
        return self.score(at.family, layout, at.order, self._depths(at))

    def score(self, family: Family, layout: Layout, order: tuple[int, ...], depths: Sequence[int]) -> float:
        """Return about how long a step takes, more where many stages are slow; infinite where one does not fit.

        ``depths`` are how many micro-batches are in flight, by layer.
        """
        self.left -= scored_us(len(layout.cuts))
        loads, trip_s, begin = [], 0.0, 0
        before: _Stage | None = None
        for first, stop, width, manner in stages_of(layout):
            stage = _Stage(first, stop, width, manner, depths[first], order[begin : begin + width])
            load_s = self._fitted_s(family, before, stage)
            if load_s is None:
                return float("inf")
            loads.append(load_s)
            turning = width if manner[0] == "round-robin" else 1
            trip_s += load_s * turning
            before, begin = stage, begin + width
        slowest = max(loads)
        if slowest <= 0:
            return 0.0
        mean: float = (sum((load / slowest) ** NORM for load in loads) / len(loads)) ** (1 / NORM) * slowest
        return (family.micro_batches - 1) * mean + trip_s

    def _depths(self, at: _At) -> list[int]:
        """Return how many micro-batches are in flight, by layer."""
        return [stage.in_flight for stage in at.found.candidate.stages for _ in range(stage.first, stage.stop)]

    def _fitted_s(self, family: Family, before: _Stage | None, stage: _Stage) -> float | None:
        """Return a stage's load with so many in flight, recomputing as little as fits; None where nothing fits."""
        where = self._where(stage.devices)
        lead = None if before is None else (before.in_flight, before.width if before.manner[0] == "round-robin" else 1)
        key = family, *stage[:5], lead, where
        if key not in self._own_s:
            self.left -= priced_us(4)
            self._own_s[key] = None if where is None else self._least_s(family, before, stage)
        return self._own_s[key]

    def _least_s(self, family: Family, before: _Stage | None, stage: _Stage) -> float | None:
        near = [self._placed(family, each) for each in (before, stage) if each is not None]
        if None in near:
            return None
        spans = [span_of(self.costs, family, self.options, each) for each in near]  # type: ignore[arg-type]
        # The stage before is there for what it leads by.
        spans[:-1] = [Span(each.levels, 0, 0) for each in spans[:-1]]
        candidate, _ = least_recomputed(self.costs, family, near, spans)  # type: ignore[arg-type]
        if self.costs.shortfall(candidate, len(near) - 1) > 0:
            return None
        return self._load_s(family, candidate.stages[-1])

    def _placed(self, family: Family, stage: _Stage) -> Placed | None:
        """Return a stage with as much in flight as is said; None where a replica would have nothing to do."""
        first, stop, width, (division, shard), in_flight, devices = stage
        rows, count = family.micro_batch_size, family.micro_batches
        if width > (count if division == "round-robin" else 2**31 if self.costs.divisible else rows):
            return None
        shares = self.costs.shares(rows, width, division)
        placed = Placed(first, stop, devices, shares, 1, (), shard, division)
        turns = placed.turns(0, count)
        return placed._replace(warmup=min(turns, max(1, -(-in_flight // placed.turning))))

    def _where(self, devices: tuple[int, ...]) -> tuple[object, ...] | None:
        """Return what of its devices a stage's price depends on; None where they are of several kinds."""
        if devices not in self._places:
            kinds = {self.costs.kind_of[device] for device in devices}
            place = min(kinds), self.costs.limit_bytes(devices), self.costs.links.level(devices)
            self._places[devices] = place if len(kinds) == 1 else None
        return self._places[devices]

    def _at(self, found: Found) -> _At:
        candidate = found.candidate
        used = tuple(device for stage in candidate.stages for device in stage.devices)
        idle = sorted(set(range(len(self.costs.devices))) - set(used))
        return _At(found, Family(*candidate[:3]), Layout.of(candidate), (*used, *idle))

    def _frame(self, family: Family, layout: Layout, order: tuple[int, ...]) -> tuple[Placed, ...] | None:
        """Return the stages of a layout, with all in flight and nothing recomputed; None where it cannot be."""
        begin, stages = 0, []
        if self.options.use_all and sum(layout.widths) < len(order):
            return None
        for first, stop, width, manner in stages_of(layout):
            devices = order[begin : begin + width]
            stage = self._placed(family, _Stage(first, stop, width, manner, 2**31, devices))
            if stage is None or len(devices) < width or self._where(devices) is None:
                return None
            stages.append(stage)
            begin += width
        return None if self.rules.broken(stages, self.costs.kind_of) is not None else tuple(stages)
