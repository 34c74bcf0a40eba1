"""What the search finds, and what the oracle."""

from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions
from autopar.planner.constraints import runnable
from autopar.planner.costs.model import CostModel
from autopar.planner.search.best_first import SearchResult, search
from autopar.planner.search.judge import Best
from autopar.planner.simulator.simulate import Simulator
from oracles.exhaustive import Exhausted, exhaust


def searched(profile: Profile, cluster: Cluster, options: PlanOptions) -> tuple[Best, SearchResult]:
    """Return the best that a search finds, and what it knows of bounds."""
    costs, best = CostModel(profile, cluster, options), Best()
    return best, search(Simulator(costs), runnable(costs, options), options, best)


def exhausted(profile: Profile, cluster: Cluster, options: PlanOptions) -> tuple[Best, Exhausted]:
    """Return the best of all plans, each simulated."""
    best = Best()
    return best, exhaust(Simulator(CostModel(profile, cluster, options)), options, best)
