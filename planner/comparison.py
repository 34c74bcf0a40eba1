"""Comparison: autopar's plan beside its peers' and other schedules', all judged by the same costs and simulator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from autopar.errors import AutoparError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.prediction import Throughput
from autopar.formats.profile import Profile
from autopar.formats.report import Comparison, ComparisonRow
from autopar.options.plan import PlanOptions, admissible_options, check_policy
from autopar.planner.assemble import candidate_of
from autopar.planner.candidate import plain
from autopar.planner.constraints import Question, runnable
from autopar.planner.costs.model import CostModel
from autopar.planner.objectives.waves import hetpipe_plan
from autopar.planner.order import canonical, numbered
from autopar.planner.peers import peers
from autopar.planner.peers.servers import Served, ways_to_serve
from autopar.planner.plan import plan
from autopar.planner.search import other_schedules
from autopar.planner.search.judge import Reference, references
from autopar.planner.simulator.simulate import Simulator
from autopar.planner.throughput import check_length, throughput_of
from autopar.planner.uniform import uniform_layouts
from autopar.progress import Progress, no_progress


def compare(
    profile: Profile, cluster: Cluster, options: PlanOptions | None = None, progress: Progress = no_progress
) -> Comparison:
    """Return autopar's plan, also under other schedules, and its peers', all judged by autopar's costs and simulator.

    autopar's search starts from the peers' plans, but for those that take their planners long, and HetPipe's, which
    trains several pipelines under policy ``wsp``. Servers of parameters are no plans: they are priced and not run. Of
    ``stages`` in the options, and the schedule for them, there is a row beside autopar's free choice. A row's step is
    of as many samples as a mini-batch has. ``progress`` is told what is done.

    Raises:
        UsageError: the options contradict the profile or each other.
        InfeasibleError: nothing fits the memory; names the stage and by how much.
    """
    options = admissible_options(options or PlanOptions(), profile)
    check_length(profile, options)
    options = replace(options, gpus=options.gpus or len(cluster.devices))
    costs = canonical(CostModel(profile, cluster, options))
    simulator = Simulator(costs, progress=progress)
    progress("trying usual plans", 0.0)
    beside = options if options.schedule == "auto" or plain(options.schedule) else other_schedules.usual(options)
    compared = references(simulator, runnable(costs, beside), beside)
    compared += uniform_layouts(simulator, runnable(costs, beside), options, chunked=options.schedule == "auto")
    rows = [_row_of(costs, each, options) for each in peers(simulator, options, compared)]
    progress("planning as HetPipe does", 0.15)
    rows.append(_row_of_hetpipe(profile, cluster, costs, options))
    rows += [_row_of_served(costs, each, options) for each in ways_to_serve(costs, options)]
    dictated = []
    if options.stages is not None:
        dictated = [_row_of_plan(costs, "dictated", plan(profile, cluster, options), options)]
        options = replace(options, stages=None, schedule="auto", chunks=None, division="split")
    own = plan(profile, cluster, options, lambda what, share: progress(what, 0.2 + 0.7 * share))
    progress("running its stages under other schedules", 0.9)
    alone = [] if own.pipelines else [numbered(costs, candidate_of(own, profile))]
    beside_it = [row for each in alone for row in other_schedules.otherwise(simulator, options, each)]
    others = [_row_of(costs, each._replace(name=f"autopar, as {each.name}"), options) for each in beside_it]
    every = [_row_of_plan(costs, "autopar", own, options), *dictated, *others, *rows]
    return Comparison(tuple(sorted(every, key=partial(_place, bool(own.pipelines)))), own)


def _place(in_waves: bool, row: ComparisonRow) -> tuple[bool, bool, bool, float]:
    """Return where a row stands: behind those that train as the plan does are those that train other weights."""
    return row.step_s is None, row.priced is not None, (row.waves is not None) != in_waves, row.step_s or 0.0


def _row_of_plan(costs: CostModel, name: str, own: Plan, options: PlanOptions) -> ComparisonRow:
    every = [numbered(costs, candidate_of(each, costs.profile)) for each in own.separate]
    step_s = own.predicted.step_s / len(every)
    used = [device for each in every for device in each.used_devices]
    row = _row_of(costs, Reference(name, every[0], step_s), options)._replace(
        stages="/".join(map(costs.text, every)),
        peak_bytes=max(own.predicted.peak_bytes),
        throughput=_throughput(costs, used, step_s, options),
    )
    return row._replace(waves=_waves_text(own, f"{len(every)} pipelines")) if own.pipelines else row


def _waves_text(own: Plan, pipelines: str) -> str:
    return f"{pipelines}, in waves of {own.wave}, staleness {own.staleness}"


_OF_HETPIPE = ("batch", "memory_bytes", "recompute", "wave", "staleness", "effort", "bytes_per_s", "times_of")
"""Options of a comparison that HetPipe's plan heeds, too; it has whole mini-batches in flight."""


def _row_of_hetpipe(profile: Profile, cluster: Cluster, costs: CostModel, options: PlanOptions) -> ComparisonRow:
    """Return the row of the plan that HetPipe would make, as it runs under ``wsp``."""
    heeded = {name: getattr(options, name) for name in _OF_HETPIPE}
    asked = check_policy(PlanOptions(gpus=options.gpus, policy="wsp", **heeded))
    try:
        dealt, own = hetpipe_plan(Question.of(profile, cluster, asked))
    except AutoparError as error:
        # What is behind a semicolon is a remedy, of plans.
        return ComparisonRow("HetPipe", infeasible=f"not priced: {str(error).partition(';')[0]}")
    return _row_of_plan(costs, "HetPipe", own, options)._replace(waves=_waves_text(own, dealt))


def _row_of(costs: CostModel, each: Reference, options: PlanOptions) -> ComparisonRow:
    candidate = each.candidate
    if candidate is None:
        return ComparisonRow(each.name, infeasible=each.reason)
    known = None if each.step_s is None else _throughput(costs, candidate.used_devices, each.step_s, options)
    divisions = {stage.division for stage in candidate.stages if stage.replicas.width > 1}
    return ComparisonRow(
        each.name,
        costs.text(candidate),
        candidate.micro_batches,
        candidate.schedule,
        each.step_s,
        max(costs.peak_bytes(candidate)),
        each.reason,
        division=divisions.pop() if len(divisions) == 1 else None,
        throughput=known,
    )


def _row_of_served(costs: CostModel, each: Served, options: PlanOptions) -> ComparisonRow:
    step = each.step
    if step is None:
        return ComparisonRow(each.name, infeasible=each.reason)
    row = ComparisonRow(each.name, None, step.micro_batches, None, None, max(step.peak_bytes.values()), each.reason)
    if each.reason is not None:
        return row
    known = _throughput(costs, step.peak_bytes, step.step_s, options)
    return row._replace(step_s=step.step_s, throughput=known, priced=step.text)


def _throughput(costs: CostModel, devices: Iterable[int], step_s: float, options: PlanOptions) -> Throughput | None:
    used = [costs.devices[device] for device in devices]
    return throughput_of(costs.profile, used, costs.batch, step_s, options)
