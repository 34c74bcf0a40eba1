"""Written: plans of objectives that no step's program stands for, as plan files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from operator import add

from autopar.errors import InfeasibleError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Alternative, Plan, Prediction
from autopar.formats.profile import Profile
from autopar.planner.assemble import plan_of, prediction, stage_record
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.costs.model import UNLIMITED_BYTES, CostModel
from autopar.planner.infeasible import advice, any_plan_fits, size, throughput_remedies
from autopar.planner.objectives.throughput import StashCosts, quickest, stash_divisions
from autopar.planner.options import PlanOptions


def throughput_plan(profile: Profile, cluster: Cluster, options: PlanOptions) -> Plan:
    """Return the asynchronous pipeline that takes least per mini-batch, within the memory of every device.

    Raises:
        UsageError: the tables would take too long.
        InfeasibleError: nothing fits the memory, or uses all devices.
    """
    costs = CostModel(profile, cluster, replace(options, gpus=options.gpus or len(cluster.devices)))
    prices = StashCosts(costs)
    found = quickest(prices, options)
    if found is None:
        raise _infeasible(costs, options)
    made = stash_plan(prices, found.candidate, options, found.least_s)
    return made.model_copy(update={"alternatives": tuple(_alternatives(prices))})


def stash_plan(
    prices: StashCosts, candidate: Candidate, options: PlanOptions, least_s: float, notes: Iterable[str] = ()
) -> Plan:
    """Return the plan of an asynchronous pipeline, priced by :class:`StashCosts`."""
    costs = prices.costs
    busy = prices.busy(candidate)
    binding, step_s = max(busy.items(), key=lambda each: each[1])
    plan = plan_of(
        costs,
        candidate,
        options,
        (stage_record(costs, stage) for stage in candidate.stages),
        prediction(costs, candidate, map(prices.peak_bytes, candidate.stages)),
        (*notes, f"bound by {binding}", *_latency_notes(prices, candidate, step_s)),
        schedule="1f1b",
        objective="throughput",
        weight_policy="stash",
    )
    bubble = _bubble(plan.predicted, candidate, step_s)
    known = {"step_s": step_s, "lower_bound_s": min(least_s, step_s), "bubble": bubble}
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update=known)})


def _bubble(prediction: Prediction, candidate: Candidate, step_s: float) -> float:
    """Return the share of the replicas' time in which they compute nothing."""
    computed = sum(
        (forward_s + backward_s) * (1 if stage.division == "round-robin" else len(stage.devices))
        for forward_s, backward_s, stage in zip(
            prediction.forward_s, prediction.backward_s, candidate.stages, strict=True
        )
    )
    return max(0.0, 1 - computed / (len(candidate.devices) * step_s)) if step_s > 0 else 0.0


def _latency_notes(prices: StashCosts, candidate: Candidate, step_s: float) -> list[str]:
    """Say where transfers take so long that what is in flight does not cover a mini-batch's way there and back."""
    trip_s, longest = 0.0, 0.0
    busy = prices.busy(candidate)
    for index in reversed(range(len(candidate.stages))):
        stage = candidate.stages[index]
        lanes = prices.shapes(stage)[0].lanes
        trip_s += busy[f"computing in stage {index}"] * lanes
        if index + 1 < len(candidate.stages):
            after = prices.shapes(candidate.stages[index + 1])[0]
            _, period = prices.message(prices.shapes(stage)[0], after)
            trip_s += 2 * period * busy[f"messages between stages {index} and {index + 1}"]
        longest = max(longest, trip_s / (stage.warmup * lanes))
    if longest <= step_s * (1 + 1e-9):
        return []
    return [f"with so few in flight, a mini-batch's way there and back may make it {longest:.4g} s per mini-batch"]


def _alternatives(prices: StashCosts) -> list[Alternative]:
    """Return pure data parallelism, for comparison."""
    costs = prices.costs
    width = len(costs.devices)
    found = []
    for division in stash_divisions(costs, width):
        shares = costs.shares(costs.batch, width, division)
        stage = CandidateStage(0, costs.layer_count, tuple(range(width)), shares, 1, division=division)
        candidate = Candidate(1, costs.batch, "1f1b", (stage,))
        short = prices.peak_bytes(stage) - costs.limit_bytes(stage.devices)
        name = f"pure data parallelism{', in turns' if division == 'round-robin' else ''}"
        if short > 0:
            found.append(Alternative(name=name, infeasible=f"needs {size(short)} more"))
        else:
            step_s = max(prices.busy(candidate).values())
            found.append(Alternative(name=name, step_s=step_s, stages=candidate.text(), micro_batches=1))
    return found


def _infeasible(costs: CostModel, options: PlanOptions) -> InfeasibleError:
    every = " on all of them" if options.use_all else ""
    ample = CostModel(costs.profile, costs.cluster, replace(options, memory_bytes=UNLIMITED_BYTES))
    prices = StashCosts(ample)
    found, needed = quickest(prices, options), None
    if found is not None:
        stages = found.candidate.stages
        reserved = (max(ample.kinds[ample.kind_of[each]].reserved_bytes for each in stage.devices) for stage in stages)
        needed = max(map(add, map(prices.peak_bytes, stages), reserved))
    return InfeasibleError(
        f"no asynchronous pipeline of {costs.layer_count} layers fits {len(costs.devices)} devices{every}, with the "
        f"weight versions that it keeps; {advice(throughput_remedies(costs, options, partial(_fits, costs), needed))}"
    )


def _fits(costs: CostModel, options: PlanOptions) -> bool:
    """Whether a plan fits with other options, or a synchronous one if that is the objective."""
    if options.objective == "step":
        return any_plan_fits(costs, {}, options)
    return quickest(StashCosts(CostModel(costs.profile, costs.cluster, options)), options) is not None
