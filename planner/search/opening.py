"""Opening: good plans, and a lower bound, of a family too large to tell every stage apart."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from autopar.planner.bounds.chain import bound
from autopar.planner.bounds.work import work_s
from autopar.planner.candidate import Placed, with_depths
from autopar.planner.costs.levels import Span
from autopar.planner.options import PlanOptions
from autopar.planner.search.caps import Capped
from autopar.planner.search.depths import depth_choices, least_recomputed
from autopar.planner.search.judge import Best
from autopar.planner.search.paced import MANY_SWEPT, Chosen, Paced, Paces
from autopar.planner.search.stages import StageTables
from autopar.planner.search.states import States
from autopar.planner.search.tables import SuffixTables
from autopar.planner.search.trips import Trips
from autopar.planner.search.work import swept_us
from autopar.planner.simulator.simulate import Simulator

MANY_ELEMENTS = 5_000_000
"""Stages in all states, of those taken together; of more, plans are not looked through."""
MOST_SWEPT = 1_200_000_000
"""Of them, in all passes together, as far as a few passes are fewer."""
FEW_PASSES, PASSES = 7, 8
FEW_SWEEPS, SWEEPS = 19, 24
MOST_BOUNDED = 5_000_000_000
"""Stages in all states, in all sweeps of the bound together, as far as a few sweeps are fewer."""
FEW_CAPS, CAPS = 1, 3
"""Between a bound and the best step, each of which excludes stages that others do not."""
COARSE_STEP, FAR_STEP, FINE_STEP = 1.04, 1.3, 1.004
"""From one pace to the next; while none can be kept; and from the quickest one that is not kept to one that is."""
AHEAD = 1.36
"""Of the pace with which devices alone would suffice, the first one that is tried."""
NEAR = 1.03
"""Times the best step, up to which a plan of a pace is simulated: about how long it takes is known."""
LOWERED = 0.9525
"""Of the best step, up to which a family is bounded that is too large for tables: the lower, the quicker."""
MOST_CAP = 1000
"""Times the work's bound, above which nothing is looked for."""


class Opened(NamedTuple):
    """What is known of a family."""

    lower_bound_s: float
    """No plan of it takes less."""
    tables: SuffixTables | None
    """Of what may be better than the best plan; none where nothing fits, or where it is too much to look through."""


class Opening:
    """Looks for good plans of a family, and proves how much better others might be."""

    def __init__(self, simulator: Simulator, stages: StageTables, options: PlanOptions, best: Best) -> None:
        self.simulator, self.costs, self.stages = simulator, simulator.costs, stages
        self.options, self.best = options, best
        self.large = stages.size > MANY_ELEMENTS
        self.passes = max(FEW_PASSES, min(PASSES, MOST_SWEPT // stages.size))
        self._capped = Capped(stages, best.step_s)
        self.tables = self._below(self._capped) if stages.size <= MANY_SWEPT and self._capped.possible else None
        """Of the plans that may be better than the best one; none where there are none, or too many stages."""

    @property
    def hopeless(self) -> bool:
        """Whether no plan can be better than the best one."""
        return not self._capped.possible or (self.tables is not None and self.tables.least_s == float("inf"))

    def try_paces(self) -> float:
        """Judge plans that keep a pace; return the work of that."""
        if self._least_cap_s == float("inf"):
            return 0.0
        self._try_paces(self._least_cap_s - self.costs.profile.step_overhead_s)
        return self.passes * swept_us(self.stages.size)

    def bounded(self) -> Opened:
        """Prove a lower bound, and return tables of what may be better, unless these are too large to look through."""
        if self._least_cap_s == float("inf"):
            return Opened(float("inf"), None)
        return self._bounded(max(work_s(self.costs, self.stages.family), self._least_cap_s / COARSE_STEP))

    @cached_property
    def states(self) -> States:
        """The states of the pool."""
        return States(self.stages)

    @cached_property
    def paces(self) -> Paces:
        """What plans are made of, at any pace."""
        return Paces(self.stages, self.states, self.options)

    @cached_property
    def _least_cap_s(self) -> float:
        """A step that the devices may suffice for, were there nothing but work; infinite where nothing fits."""
        least_s = cap_s = work_s(self.costs, self.stages.family)
        while not Capped(self.stages, cap_s).possible:
            cap_s *= COARSE_STEP
            if cap_s > MOST_CAP * least_s:
                return float("inf")
        return cap_s

    def _try_paces(self, fewest_s: float) -> None:
        """Judge the plans of some paces: of the quickest that can be kept, and of slower ones with shorter trips."""
        quickest_s, low_s, passes = fewest_s * AHEAD, 0.0, 1
        while self._try(quickest_s) == float("inf") and quickest_s < MOST_CAP * fewest_s:
            # None is quick enough; a pace that is slow enough can always be kept, if anything fits.
            low_s, passes = quickest_s, passes + 1
            quickest_s *= COARSE_STEP if passes <= FEW_PASSES else FAR_STEP
        slower_s = quickest_s
        while passes < self.passes and quickest_s > low_s * FINE_STEP:
            passes += 1
            next_s = (low_s * quickest_s) ** 0.5 if low_s > 0 else quickest_s / COARSE_STEP
            if self._try(next_s) < float("inf"):
                quickest_s = next_s
            else:
                low_s = next_s
        while passes < self.passes:
            passes, slower_s = passes + 1, slower_s * COARSE_STEP
            if self._try(slower_s) >= self.best.step_s * NEAR:
                break

    def _try(self, beside_s: float) -> float:
        """Judge the plan of a pace, if it may be better; return about how long its step takes."""
        paced = Paced(self.paces, beside_s)
        if paced.step_s >= self.best.step_s * NEAR:
            return paced.step_s
        family = self.stages.family
        chosen = paced.chosen()
        frame = [self._placed(each) for each in chosen]
        if self.stages.constraints.broken(frame, self.costs.kind_of) is not None:
            # Paces do not count stages.
            return paced.step_s
        spans = [self._span(each) for each in chosen]
        depths = [each.depth for each in chosen]
        own, short = least_recomputed(self.costs, family, with_depths(family, frame, depths).stages, spans)
        candidates = [own] if short <= 0 else []
        if short > 0 or not self.large:
            found = depth_choices(self.costs, family, frame, spans, exact=False)
            candidates += found.candidates
            if found.closest is not None:
                self.best.miss(*found.closest)
        bounds = [bound(self.costs, candidate) for candidate in candidates]
        for at in sorted(range(len(bounds)), key=lambda index: bounds[index]):
            if bounds[at] < self.best.step_s:
                self.best.judge(self.simulator, candidates[at])
        return paced.step_s

    def _placed(self, chosen: Chosen) -> Placed:
        first, stop, number, state, _ = chosen
        way, family = self.stages.ways[number], self.stages.family
        devices = self.stages.pool.devices(state, way.kind, way.width, way.variant)
        shares = self.costs.shares(family.micro_batch_size, way.width, way.choice.division)
        # Depths go by what the stage was chosen to recompute, as few layers as fit may come of it.
        levels = self.costs.recompute_levels(family.micro_batch_size, way.kind)
        recompute = Span(levels, *self.stages.recomputed(number, first, stop)).within(first, stop)[0]
        stage = Placed(first, stop, devices, shares, 1, recompute, way.choice.shard, way.choice.division)
        return stage._replace(warmup=stage.turns(0, family.micro_batches))

    def _span(self, chosen: Chosen) -> Span:
        """How many layers of a stage may be recomputed: as few as fit what it comes to hold in the plan."""
        way = self.stages.ways[chosen.way]
        levels = self.costs.recompute_levels(self.stages.family.micro_batch_size, way.kind)
        if self.options.recompute == "auto":
            return Span(levels)
        return Span(levels, *self.stages.recomputed(chosen.way, chosen.first, chosen.stop))

    def _bounded(self, lower_s: float) -> Opened:
        """Prove a lower bound: what is not below a cap takes at least as long, and so does the least below it."""
        overhead_s = self.costs.profile.step_overhead_s
        # Where no plan is known yet, what is slower than any sensible one is left out.
        most_s = min(self.best.step_s, MOST_CAP * lower_s)
        if self.tables is None and self.stages.chain:
            sweeps = max(FEW_SWEEPS, min(SWEEPS, MOST_BOUNDED // self.stages.size))
            trips = Trips(self.stages, self.states, self.options)
            lower_s = trips.bound_s(most_s * LOWERED - overhead_s, sweeps, lower_s - overhead_s) + overhead_s
            return Opened(lower_s, None)
        tables = self.tables or self._below(Capped(self.stages, most_s))
        lower_s = max(lower_s, min(most_s, tables.least_s + overhead_s))
        for _ in range((FEW_CAPS if self.large else CAPS) if tables.least_s < float("inf") else 0):
            cap_s = (lower_s + most_s) / 2
            below = self._below(Capped(self.stages, cap_s))
            lower_s = max(lower_s, min(cap_s, below.least_s + overhead_s))
        return Opened(lower_s, None if self.large else tables)

    def _below(self, capped: Capped) -> SuffixTables:
        """Return the tables of plans that take less than a cap."""
        return SuffixTables(self.stages, self.options, capped, self.states, rounded=self.large)
