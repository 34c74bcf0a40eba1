"""Work: about how long parts of a search take, in microseconds of a core: counted and not timed.

What bounds a search is a sum of these, so that the same question has the same answer on every machine.
"""

from __future__ import annotations

from autopar.planner.candidate import Candidate
from autopar.planner.options import PlanOptions

ENOUGH = 0.05
"""Gap to the lower bound at which no more work is done, unless more effort is asked for."""
EXACT_GAP = 1e-3
"""The same where the fastest plan is asked for."""
START, PACES, BEST_FIRST, CLIMB, EQUAL = 1_000_000.0, 2_000_000.0, 1_500_000.0, 3_000_000.0, 500_000.0
"""For an effort of one: even splits, paces, plans opened best first, local moves, and those that keep widths equal."""
SWEPT = 0.004
SCORED, PRICED, FITTED, SHORTENED = 5, 60, 700, 12
ACTION, WAVE, PROGRAM = 1.2, 45, 1_000
"""Of a simulation: every action, or, of many stages, those that are simulated at once."""


def least_gap(options: PlanOptions) -> float:
    """Return the gap to the lower bound at which plans are opened no more, and local moves where these go on."""
    return min(EXACT_GAP, options.gap) if options.exact else options.gap


def scored_us(stages: int) -> float:
    """Return the work of scoring a layout whose stages are known."""
    return SCORED * stages


def priced_us(stages: int) -> float:
    """Return the work of pricing a candidate's lower bound."""
    return PRICED * stages


def shortened_us(layers: int) -> float:
    """Return the work of finding how few of a stage's layers are to be recomputed for it to fit."""
    return 4 * PRICED + SHORTENED * layers * layers.bit_length()


def fitted_us(stages: int) -> float:
    """Return the work of finding what a layout may keep in flight and has to recompute."""
    return FITTED * stages


def simulated_us(candidate: Candidate) -> float:
    """Return the work of simulating a candidate."""
    count, stages = candidate.micro_batches, len(candidate.stages)
    return PROGRAM + min(ACTION * 2 * count * stages, WAVE * (count + stages))


def swept_us(stages: int) -> float:
    """Return the work of looking for a plan that keeps a pace, of so many stages in all states of the pool."""
    return SWEPT * stages
