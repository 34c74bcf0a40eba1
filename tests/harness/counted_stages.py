"""The closest plans of so many stages: what is found, and the least shortfall of all plans."""

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import UsageError
from autopar.planner.candidate import Candidate, Family
from autopar.planner.costs.model import CostModel
from autopar.planner.infeasible import closest
from autopar.planner.options import PlanOptions
from oracles.exhaustive import everything


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
