"""What the search finds, and what the oracle."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions
from autopar.planner.candidate import Candidate, Family
from autopar.planner.constraints import runnable
from autopar.planner.costs.model import CostModel
from autopar.planner.infeasible import closest
from autopar.planner.search.best_first import SearchResult, search
from autopar.planner.search.judge import Best
from autopar.planner.simulator.simulate import Simulator
from oracles.exhaustive import Exhausted, everything, exhaust


def searched(profile: Profile, cluster: Cluster, options: PlanOptions) -> tuple[Best, SearchResult]:
    """Return the best that a search finds, and what it knows of bounds."""
    costs, best = CostModel(profile, cluster, options), Best()
    return best, search(Simulator(costs), runnable(costs, options), options, best)


def exhausted(profile: Profile, cluster: Cluster, options: PlanOptions) -> tuple[Best, Exhausted]:
    """Return the best of all plans, each simulated."""
    best = Best()
    return best, exhaust(Simulator(CostModel(profile, cluster, options)), options, best)


def agreed(profile: Profile, cluster: Cluster, options: PlanOptions, seed: int) -> Best:
    """Hold what an exact search finds and knows of bounds against all plans; return it."""
    (best, result), (oracle, every) = (find(profile, cluster, options) for find in (searched, exhausted))
    assert (best.fastest is None) == (oracle.fastest is None), f"seed {seed}"
    if best.fastest is not None:
        assert best.step_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
        assert result.lower_bound_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
        # Where the references or a first candidate are no worse than any bound, no bound is met.
        if result.least_bound_s < best.step_s:
            assert result.least_bound_s == pytest.approx(every.least_bound_s, rel=1e-9), f"seed {seed}"
    return best


def closest_of(
    costs: CostModel, families: Sequence[Family], options: PlanOptions, stages: int | None
) -> tuple[int, Candidate] | None:
    """Return the closest plan of exactly so many stages, or of any number; none where no stages obey all options."""
    asked = options if stages is None else replace(options, min_stages=stages, max_stages=stages)
    try:
        return closest(costs, families, asked)
    except UsageError:
        return None


def least_by_stages(costs: CostModel, options: PlanOptions) -> dict[int | None, int]:
    """Return the least shortfall of all plans with so many stages, and, for None, with any number."""
    least: dict[int | None, int] = {}
    for candidate in everything(costs, options):
        short = max(costs.shortfalls(candidate))
        for count in (None, len(candidate.stages)):
            least[count] = min(least.get(count, short), short)
    return least
