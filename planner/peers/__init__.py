"""Peers: what other systems' planners would choose, judged by autopar's own cost model, memory and simulator.

Each is written from its paper. A peer's planner sees the same profile and the same links as autopar's, priced by the
peer's own formulas; what it proposes is then tried like any other plan: both in :mod:`autopar.planner.peers.prices`.
None of them looks at memory, as none of the papers' planners does. HetPipe's does: its pipelines train under a weight
policy of their own, and :mod:`autopar.planner.objectives.waves` plans them. Servers of parameters are no plans:
:mod:`autopar.planner.peers.servers` prices them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopar.options.plan import PlanOptions
from autopar.planner.candidate import families
from autopar.planner.peers import dapple, gpipe, pipedream
from autopar.planner.peers.prices import LITTLE_WORK, MOST_WORK, Prices, Proposal, planned_counts, trial
from autopar.planner.search.judge import Reference
from autopar.planner.simulator.simulate import Simulator

__all__ = ["PLANNERS", "PeerPlanner", "peers"]


class PeerPlanner(NamedTuple):
    """How a peer plans."""

    name: str
    schedule: str
    propose: Callable[[Prices], list[Proposal]]
    """What it would choose, for one micro-batch count."""
    work: Callable[[Prices], int]
    """How many array elements a proposal takes to compute, about."""


PLANNERS: tuple[PeerPlanner, ...] = (
    PeerPlanner("GPipe", "gpipe", gpipe.propose, gpipe.work),
    PeerPlanner("torchgpipe, by time", "gpipe", gpipe.by_time, gpipe.blocks_work),
    PeerPlanner("torchgpipe, by size", "gpipe", gpipe.by_size, gpipe.blocks_work),
    PeerPlanner("PipeDream", "1f1b", pipedream.propose, pipedream.work),
    PeerPlanner("DAPPLE", "1f1b", dapple.propose, dapple.work),
)


def peers(
    simulator: Simulator, options: PlanOptions, reference_plans: Sequence[Reference] = (), *, quickly: bool = False
) -> list[Reference]:
    """Return every peer's fastest plan that fits, over the micro-batch counts that the options admit.

    ``quickly`` leaves out planners that take more than about half a second.
    None of the papers' planners chooses the micro-batch count: a peer is given the one that suits it best, as its user
    would find by trying. The schedule is the peer's own, whatever ``options.schedule`` says. The references come first.
    """
    costs = simulator.costs
    prices = [Prices(costs, family.micro_batches) for family in families(costs.batch, options)]
    most = LITTLE_WORK if quickly else MOST_WORK
    found = [_peer(simulator, planner, prices, most) for planner in PLANNERS]
    return [*reference_plans, *found]


def _peer(simulator: Simulator, planner: PeerPlanner, prices: list[Prices], most_work: int) -> Reference:
    simulator.progress(f"planning as {planner.name} does", 0.05 + 0.1 * PLANNERS.index(planner) / len(PLANNERS))
    planned = planned_counts(prices, planner.work, most_work)
    if not planned:
        return Reference(planner.name, None, None, _too_long(prices[0]))
    proposals = dict.fromkeys(proposal for each in planned for proposal in planner.propose(each))
    counts = [each.micro_batches for each in prices]
    return trial(simulator, planner.name, planner.schedule, counts, list(proposals))


def _too_long(prices: Prices) -> str:
    return f"its planner takes too long for {prices.layer_count} layers on {prices.device_count} devices"
