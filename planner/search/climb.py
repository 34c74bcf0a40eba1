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
from autopar.planner.bounds.chain import bound, link_terms
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
from autopar.planner.search.work import fitted_us, priced_us, scored_us, shortened_us, simulated_us
from autopar.planner.simulator.simulate import Simulator

MOST_EDGES = 1024
BUSY = 6
"""Stages that take devices, or are divided: those that compute longest."""
FEW_TRIES, TRIES = 12, 96
"""Moves that are simulated of those to a plan's neighbours, the most promising ones; more where few led on."""
NORM = 16
"""Power of the mean that stands for the slowest stage: it grows with how many are about as slow."""
SIDEWAYS = 2e-3
"""By what share a plan may be slower than the one before, if fewer of its stages are slow."""
MOST_SIDEWAYS, TRIES_BESIDE = 12, 3
"""Such moves, one after the other; and further ones that are simulated where one is known."""
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


class _Price(NamedTuple):
    """What a stage, or the boundary before it, adds to a step."""

    load_s: float
    """Per micro-batch, how long it is occupied."""
    forward_s: float
    backward_s: float
    """One micro-batch's way through it, and back."""
    closing_s: float
    """Reduction that is left after the last backward, and the update."""


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
        self._prices: dict[tuple[object, ...], _Price | None] = {}
        self._links: dict[tuple[object, ...], _Price] = {}
        self._tried: set[tuple[Family, Layout, tuple[int, ...]]] = set()

    def climb(self, found: Found, enough_s: float = 0.0, tries: int = FEW_TRIES) -> None:
        """Move on from a plan while that makes it faster, or its slow stages fewer, until it is fast enough.

        Of the moves from every plan, ``tries`` are simulated.
        """
        at = self._at(found)
        self._tried.add((at.family, at.layout, at.order))
        sideways = 0
        while self.left > 0 and at.found.step_s > enough_s:
            after = self._next(at, tries)
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

    def _next(self, at: _At, tries: int) -> _At | None:
        """Return the first of the most promising neighbours that is faster, or as fast with fewer slow stages."""
        own_s = self._score(at, at.layout)
        untried = (each for each in self._near(at) if (at.family, each, at.order) not in self._tried)
        near = {layout: self._score(at, layout) for layout in untried}
        beside: _At | None = None
        further = tries
        for layout in nsmallest(tries, near, key=lambda each: near[each]):
            if self.left <= 0 or further == 0 or near[layout] == float("inf"):
                break
            further -= 1
            found = self.judge(at.family, layout, at.order, at.found.step_s * (1 + SIDEWAYS))
            if found is None:
                continue
            after = at._replace(found=found, layout=layout)
            if found.step_s < at.found.step_s * (1 - 1e-6):
                return after
            if beside is None and near[layout] < own_s * (1 - 1e-6):
                beside, further = after, min(further, TRIES_BESIDE)
        return self._otherwise(at) or beside

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
        loads = [self._price_of(at.family, stage).load_s for stage in at.found.candidate.stages]
        return sorted(range(len(loads)), key=lambda index: -loads[index])

    def _price_of(self, family: Family, stage: Placed) -> _Price:
        turns = stage.turns(0, family.micro_batches)
        forward_s, backward_s = self.costs.forward_s(stage, 0), self.costs.backward_s(stage, 0, turns)
        load_s = (forward_s + backward_s) * turns / family.micro_batches
        closing_s = self.costs.replica_exposed_s(stage, 0) + self.costs.update_s(stage)
        return _Price(load_s, forward_s, backward_s, closing_s)

    def _score(self, at: _At, layout: Layout) -> float:
        return self.score(at.family, layout, at.order, self._depths(at))

    def score(self, family: Family, layout: Layout, order: tuple[int, ...], depths: Sequence[int]) -> float:
        """Return about how long a step takes, more where many stages are slow; infinite where one does not fit.

        ``depths`` are how many micro-batches are in flight, by layer.
        """
        self.left -= scored_us(len(layout.cuts))
        loads, trip_s, back_s, closing_s, begin = [], 0.0, 0.0, 0.0, 0
        before: _Stage | None = None
        for first, stop, width, manner in stages_of(layout):
            stage = _Stage(first, stop, width, manner, depths[first], order[begin : begin + width])
            price = self._price(family, before, stage)
            if price is None:
                return float("inf")
            if before is not None:
                sent = self._sent(family, before, stage)
                loads.append(sent.load_s)
                trip_s += sent.forward_s + sent.backward_s
                back_s += sent.backward_s
            loads.append(price.load_s)
            trip_s += price.forward_s + price.backward_s
            # Behind a stage's last backward are those of the stages before it, beside which it reduces and updates.
            closing_s = max(closing_s, price.closing_s - back_s)
            back_s += price.backward_s
            before, begin = stage, begin + width
        slowest = max(loads)
        if slowest <= 0:
            return 0.0
        mean: float = (sum((load / slowest) ** NORM for load in loads) / len(loads)) ** (1 / NORM) * slowest
        return (family.micro_batches - 1) * mean + trip_s + closing_s

    def _sent(self, family: Family, before: _Stage, stage: _Stage) -> _Price:
        """Return the price of the tensors of a boundary, which occupy a queue each way."""
        level = self.costs.links.level((before.devices[-1], stage.devices[-1]))
        key = family, *before[:4], *stage[:4], level
        if key not in self._links:
            self.left -= priced_us(1)
            sender, receiver = self._placed(family, before), self._placed(family, stage)
            assert sender is not None
            assert receiver is not None
            link = link_terms(self.costs, sender, receiver, Candidate(*family, (sender, receiver)))
            work_s = max(float(link.forth_work_s), float(link.back_work_s))
            self._links[key] = _Price(work_s / family.micro_batches, float(link.forth_s), float(link.back_s), 0.0)
        return self._links[key]

    def _depths(self, at: _At) -> list[int]:
        """Return how many micro-batches are in flight, by layer."""
        return [stage.in_flight for stage in at.found.candidate.stages for _ in range(stage.first, stage.stop)]

    def _price(self, family: Family, before: _Stage | None, stage: _Stage) -> _Price | None:
        """Return a stage's price with so many in flight, recomputing as little as fits; None where nothing fits."""
        where = self._where(stage.devices)
        lead = None if before is None else (before.in_flight, before.width if before.manner[0] == "round-robin" else 1)
        key = family, *stage[:5], lead, where
        if key not in self._prices:
            self.left -= shortened_us(stage.stop - stage.first)
            self._prices[key] = None if where is None else self._least(family, before, stage)
        return self._prices[key]

    def _least(self, family: Family, before: _Stage | None, stage: _Stage) -> _Price | None:
        near = [self._placed(family, each) for each in (before, stage) if each is not None]
        if None in near:
            return None
        spans = [span_of(self.costs, family, self.options, each) for each in near]  # type: ignore[arg-type]
        # The stage before is there for what it leads by.
        spans[:-1] = [Span(each.levels, 0, 0) for each in spans[:-1]]
        candidate, _ = least_recomputed(self.costs, family, near, spans)  # type: ignore[arg-type]
        if self.costs.shortfall(candidate, len(near) - 1) > 0:
            return None
        return self._price_of(family, candidate.stages[-1])

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
