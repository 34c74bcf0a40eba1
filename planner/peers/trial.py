"""Trial: proposed stages, judged by memory and simulator in every micro-batch count and depth of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from autopar.planner.bounds.chain import candidate_bound_s
from autopar.planner.candidate import MOST_MICRO_BATCHES, Candidate, CandidateStage, divisors
from autopar.planner.costs.model import CostModel
from autopar.planner.infeasible import explain
from autopar.planner.peers.prices import Prices, Proposal
from autopar.planner.search.judge import Best
from autopar.planner.share_limits import crossed_limit
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules import SCHEDULES

MOST_WORK, LITTLE_WORK = 5 * 10**9, 2 * 10**8
"""Array elements that a peer may take for all its proposals together: about ten seconds, and half a second."""


def counts_of(batch: int, micro_batches: int | None) -> list[int]:
    """Return the micro-batch counts to try, ascending.

    >>> counts_of(12, None), counts_of(12, 4)
    ([1, 2, 3, 4, 6, 12], [4])
    """
    return [
        count
        for count in divisors(batch)
        if micro_batches in (None, count) and (micro_batches or count <= MOST_MICRO_BATCHES)
    ]


def planned_counts(prices: Sequence[Prices], work: Callable[[Prices], int], most_work: int = MOST_WORK) -> list[Prices]:
    """Return the micro-batch counts for which a peer's planner is run: all, or as many as time allows, evenly spaced.

    What it proposes for one count is tried with every other, too.
    """
    most = min(len(prices), most_work // max(1, work(prices[0])))
    if most < 2:
        return list(prices[len(prices) // 2 :][:most])
    return [prices[round(index * (len(prices) - 1) / (most - 1))] for index in range(most)]


def place(costs: CostModel, proposal: Proposal, micro_batches: int, schedule: str) -> Iterator[Candidate]:
    """Yield a proposal's candidates, one for every choice of depths that the schedule offers."""
    rows = costs.batch // micro_batches
    starts = (0, *proposal.cuts[:-1])
    shares = [costs.shares(rows, len(devices)) for devices in proposal.devices]
    depths = SCHEDULES[schedule].warmups(len(proposal.cuts), 1, micro_batches).values()
    for choice in dict.fromkeys(depths):
        fields = zip(starts, proposal.cuts, proposal.devices, shares, choice, strict=True)
        yield Candidate(micro_batches, rows, schedule, tuple(CandidateStage(*each) for each in fields))


def trial(
    simulator: Simulator, schedule: str, counts: Sequence[int], proposals: Sequence[Proposal]
) -> tuple[Candidate | None, str | None]:
    """Return the fastest candidate of the proposals that fits, or the one that comes closest and why it does not."""
    costs = simulator.costs
    candidates = [
        candidate
        for count in counts
        for proposal in proposals
        if costs.divisible or proposal.widest <= costs.batch // count
        for candidate in place(costs, proposal, count, schedule)
    ]
    reasons = [
        costs.replicated_single(candidate.stages) or crossed_limit(costs, candidate.stages) for candidate in candidates
    ]
    if candidates and all(reasons):
        return None, reasons[0]
    candidates = [candidate for candidate, reason in zip(candidates, reasons, strict=True) if reason is None]
    best = Best()
    bounds = [candidate_bound_s(costs, candidate) for candidate in candidates]
    for at in sorted(range(len(candidates)), key=lambda index: (bounds[index], index)):
        # A candidate whose bound is not below the best simulated step cannot improve on it.
        if bounds[at] < best.step_s:
            best.judge(simulator, candidates[at])
    if best.fastest is not None:
        return best.fastest.candidate, None
    if best.closest is not None:
        return best.closest[1], explain(costs, best.closest[1])
    return None, f"no micro-batch of a batch of {costs.batch} has a sample for each replica of a stage"
