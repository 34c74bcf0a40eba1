"""Best: candidates judged by memory and simulation, and the best of them by several traits.

What bounds a search is a sum of about how long its parts take, in microseconds of a core, counted and not timed: so the
same question has the same answer on every machine.

Why: docs/design/decisions.md, "Search: A count ends the search".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from autopar.formats.plan import SHARDS
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.constraints import crossed_limit
from autopar.planner.options import PlanOptions
from autopar.planner.simulator.simulate import Simulator

NEAR, MOST_NEAR = 0.01, 10_000
"""Of the best step, how much longer one takes that is about as fast; and how many such are kept before some go."""
Key = TypeVar("Key")
Trait = tuple[str, int]
EQUAL_WIDTHS: Trait = ("equal widths", 1)


class SimulatedPlan(NamedTuple):
    """A simulated candidate."""

    step_s: float
    candidate: Candidate


class Best:
    """The best candidates simulated so far, at large and by traits, for alternatives; the first of equals stays."""

    def __init__(self, cap_s: float = float("inf")) -> None:
        """Begin with no candidate; only those quicker than ``cap_s`` are of interest."""
        self._cap_s = cap_s
        self.fastest: SimulatedPlan | None = None
        self.by_stages: dict[int, SimulatedPlan] = {}
        self.by_manner: dict[tuple[int, bool], SimulatedPlan] = {}
        """By the number of stages, and whether replicas take turns."""
        self.by_trait: dict[Trait, SimulatedPlan] = {}
        self.near: dict[Candidate, float] = {}
        """Candidates about as fast as the best one was, and their seconds, or lower bounds of these."""
        self.closest: tuple[int, Candidate] | None = None
        """The least shortfall of memory among candidates that do not fit."""

    @property
    def step_s(self) -> float:
        """Seconds of the best candidate, or of the cap while there is none."""
        return self.fastest.step_s if self.fastest else self._cap_s

    def judge(self, simulator: Simulator, candidate: Candidate) -> float | None:
        """Simulate a candidate; return its seconds per step, or None where it does not fit, or breaks a share limit.

        Of one that is not the best of its number of stages, the seconds may be a lower bound.
        """
        if crossed_limit(simulator.costs, candidate.stages) is not None:
            return None
        short = max(simulator.costs.shortfalls(candidate))
        if short > 0:
            self.miss((short, candidate))
            return None
        rival = self.by_stages.get(len(candidate.stages))
        found = SimulatedPlan(simulator.step_s(candidate, math.inf if rival is None else rival.step_s), candidate)
        self.consider(found)
        return found.step_s

    def miss(self, closest: tuple[int, Candidate] | None) -> None:
        """Note a candidate that does not fit, and how many bytes it lacks, if there is one."""
        if closest is not None and (self.closest is None or closest[0] < self.closest[0]):
            self.closest = closest

    def consider(self, simulated_plan: SimulatedPlan) -> None:
        """Keep a simulated candidate if it is the best in any respect, or about as fast as the best one."""
        stages = simulated_plan.candidate.stages
        _keep(self.by_stages, len(stages), simulated_plan)
        _keep(self.by_manner, (len(stages), any(stage.turning > 1 for stage in stages)), simulated_plan)
        for trait in traits_of(simulated_plan.candidate):
            _keep(self.by_trait, trait, simulated_plan)
        if simulated_plan.step_s < self.step_s:
            self.fastest = simulated_plan
        if simulated_plan.step_s <= self.step_s * (1 + NEAR):
            self.near.setdefault(simulated_plan.candidate, simulated_plan.step_s)
            if len(self.near) > MOST_NEAR:
                self.near = {each: step_s for each, step_s in self.near.items() if step_s <= self.step_s * (1 + NEAR)}

    @property
    def equal(self) -> SimulatedPlan | None:
        """The best candidate whose stages have as many replicas each, which run and shard alike."""
        return self.by_trait.get(EQUAL_WIDTHS)


def _keep(best: dict[Key, SimulatedPlan], key: Key, simulated_plan: SimulatedPlan) -> None:
    """Keep a candidate if it is the first of its kind, or faster than the one that was."""
    if key not in best or simulated_plan.step_s < best[key].step_s:
        best[key] = simulated_plan


def traits_of(candidate: Candidate) -> list[Trait]:
    """Return what tells a candidate from others, beside the number of its stages."""
    stages = candidate.stages
    found: list[Trait] = [
        ("micro_batches", candidate.micro_batches),
        ("devices", len(set(candidate.devices))),
        ("recompute", any(stage.recompute for stage in stages)),
        ("shard", max(SHARDS.index(stage.shard) for stage in stages)),
    ]
    return [*found, EQUAL_WIDTHS] if equal_widths(stages) else found


def equal_widths(stages: Sequence[CandidateStage]) -> bool:
    """Whether all stages have as many replicas, with equal shares, that run and shard alike.

    >>> from autopar.planner.candidate import Family, place
    >>> [equal_widths(place(Family(2, 4, "1f1b"), (3, 5), widths)) for widths in ((2, 2), (2, 1), (3, 3))]
    [True, False, False]
    """
    first = stages[0]
    alike = {(len(stage.devices), stage.division, stage.shard, *stage.shares) for stage in stages}
    return len(alike) == 1 and len(set(first.shares)) == 1


ENOUGH = 0.05
"""Gap to the lower bound at which no more work is done, unless more effort is asked for."""
EXACT_GAP = 1e-3
"""The same where the fastest plan is asked for."""
START, PACES, BEST_FIRST, CLIMB, EQUAL = 1_000_000.0, 2_000_000.0, 1_500_000.0, 3_000_000.0, 500_000.0
"""For an effort of one: even splits, paces, plans opened best first, local moves, and those that keep widths equal."""
MOST_CLIMB = 5_000_000.0
"""Local moves where each takes long to simulate."""
WHEN_EXACT = 2
"""Times as many local moves where the fastest plan is asked for."""
SCORED, PRICED, FITTED = 5, 60, 700
"""Of every stage of a layout: a score, a candidate's lower bound, and what may be in flight and must be recomputed."""
TABLES = 20_000_000.0
"""For an effort of one: tables of families."""
TABLED, TABLED_APART = 0.08, 0.24
"""Of every stage in all states of the pool, in a table; the second where not all tensors pass from stage to stage."""
MOST_TABLED = 5_000_000.0
"""Of one table, above which a family of such graphs is bounded by its work alone."""
SWEPT = 0.004
"""Of every stage in all states of the pool, in the search for one that keeps a pace."""
SHORTENED = 12
ACTION, LEVEL, PROGRAM = 1.2, 45, 1_000
"""Of a simulation: every action, or, of many stages, those that are simulated at once."""


def least_gap(options: PlanOptions) -> float:
    """Return the gap to the lower bound at which plans are opened no more, and local moves where these go on."""
    return min(EXACT_GAP, options.gap) if options.exact else options.gap


def shortened_us(layers: int) -> float:
    """Return the work of finding how few of a stage's layers are to be recomputed for it to fit."""
    return 4 * PRICED + SHORTENED * layers * layers.bit_length()


def simulated_us(candidate: Candidate) -> float:
    """Return the work of simulating a candidate."""
    count, stages = candidate.micro_batches, len(candidate.stages)
    return PROGRAM + min(ACTION * 2 * count * stages, LEVEL * (count + stages))
