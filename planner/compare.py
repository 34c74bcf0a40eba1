"""Comparison: autopar's plan beside those that its peers' planners would choose."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.report import ComparisonRow
from autopar.planner.alternatives import Reference, references
from autopar.planner.assemble import candidate_of
from autopar.planner.candidate import Candidate, plain
from autopar.planner.constraints import parse, runnable
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions, admissible_options
from autopar.planner.peers import Peer, peers
from autopar.planner.plan import plan
from autopar.planner.search.other_schedules import otherwise, usual
from autopar.planner.simulator.simulate import Simulator
from autopar.progress import Progress, no_progress


class Comparison(NamedTuple):
    """What :func:`compare` returns."""

    rows: tuple[ComparisonRow, ...]
    """Fastest first; plans that cannot be run last."""
    plan: Plan
    """autopar's own."""


def compare(
    profile: Profile, cluster: Cluster, options: PlanOptions | None = None, progress: Progress = no_progress
) -> Comparison:
    """Return autopar's plan, also under other schedules, and its peers', all judged by autopar's costs and simulator.

    autopar's search starts from the peers' plans, but for those that take their planners long; virtual workers that cut
    the layers differently are no plan. Of ``stages`` in the options, and the schedule for them, there is a row beside
    autopar's free choice. ``progress`` is told what is done.

    Raises:
        UsageError: the options contradict the profile or each other.
        InfeasibleError: nothing fits the memory; names the stage and by how much.
    """
    options = admissible_options(options or PlanOptions(), profile)
    if options.stages is not None:
        names = [layer.name for layer in profile.layers]
        if max(parse(options.stages, names).team_sizes) > 1:
            raise UsageError("`stages`: nothing prices replicas that several devices run; give them one device each")
    options = replace(options, gpus=options.gpus or len(cluster.devices))
    costs = CostModel(profile, cluster, options)
    simulator = Simulator(costs, progress=progress)
    progress("trying usual plans", 0.0)
    beside = options if options.schedule == "auto" or plain(options.schedule) else usual(options)
    compared = references(simulator, runnable(costs, beside), beside)
    rows = [_row(simulator, each) for each in peers(simulator, options, compared)]
    dictated = [] if options.stages is None else [_row_of_stages(plan(profile, cluster, options), profile)]
    options = _free(options)
    own = plan(profile, cluster, options, lambda what, share: progress(what, 0.2 + 0.7 * share))
    progress("running its stages under other schedules", 0.9)
    chosen = candidate_of(own, profile)
    others = (_otherwise(costs, each) for each in otherwise(simulator, options, chosen))
    first = _comparison_row("autopar", chosen, own.predicted.step_s, max(own.predicted.peak_bytes), None)
    every = [first, *dictated, *others, *rows]
    return Comparison(tuple(sorted(every, key=lambda row: (row.step_s is None, row.step_s or 0.0))), own)


def _free(options: PlanOptions) -> PlanOptions:
    """Return options without stages and the schedule that these are for."""
    return options if options.stages is None else replace(options, stages=None, schedule="auto", chunks=None)


def _row_of_stages(dictated_plan: Plan, profile: Profile) -> ComparisonRow:
    """Return the row of stages that the user dictates."""
    found = dictated_plan.predicted
    return _comparison_row("dictated", candidate_of(dictated_plan, profile), found.step_s, max(found.peak_bytes), None)


def _row(simulator: Simulator, peer: Peer) -> ComparisonRow:
    candidate, workers = peer.candidate, peer.virtual_workers
    if candidate is not None:
        step_s = simulator.step_s(candidate) if peer.reason is None else None
        row = _comparison_row(peer.name, candidate, step_s, max(simulator.costs.peak_bytes(candidate)), peer.reason)
        return row._replace(virtual_workers=workers)
    if workers is None:
        return ComparisonRow(peer.name, infeasible=peer.reason)
    peak = max(stage.peak_bytes for worker in workers.workers for stage in worker.stages)
    return ComparisonRow(peer.name, None, peer.micro_batches, "1f1b", peer.step_s, peak, None, workers)


def _otherwise(costs: CostModel, each: Reference) -> ComparisonRow:
    """Return a row of autopar's own stages under another schedule."""
    name = f"autopar, as {each.name}"
    if each.simulated_plan is None:
        return ComparisonRow(name, schedule=each.name, infeasible=each.reason)
    step_s, candidate = each.simulated_plan
    return _comparison_row(name, candidate, step_s, max(costs.peak_bytes(candidate)), None)


def _comparison_row(
    name: str, candidate: Candidate, step_s: float | None, peak_bytes: int, infeasible: str | None
) -> ComparisonRow:
    return ComparisonRow(
        name, candidate.text(), candidate.micro_batches, candidate.schedule, step_s, peak_bytes, infeasible
    )
