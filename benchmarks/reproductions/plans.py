"""Others: what PipeDream's and Piper's planners call best, as plan files that autopar prices, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from autopar.formats.cluster import Cluster
from autopar.formats.plan import Objective, Plan
from autopar.formats.prediction import Prediction
from autopar.formats.profile import Profile
from autopar.formats.stage import Stage
from autopar.options.plan import PlanOptions
from autopar.ownership import Division, Replicas
from autopar.planner.assemble import assemble, plan_of
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.costs.model import CostModel
from autopar.planner.infeasible import size
from autopar.planner.objectives.unflushed import shallow_depths
from reproductions.pipedream import pipedream_plan
from reproductions.pipedream_graph import mini_batch
from reproductions.piper import PiperPlan, PiperStage, piper_plan
from reproductions.piper_files import PiperProfile
from reproductions.stash import StashCosts, stash_plan

__all__ = ["planned_by_pipedream", "planned_by_piper"]

MOST_ROUTED = 5_000_000
"""Micro-batches times pairs of neighbouring replicas, of a step that is simulated; about ten seconds."""


def planned_by_pipedream(profile: Profile, cluster: Cluster, options: PlanOptions) -> Plan:
    """Return PipeDream's plan: an asynchronous pipeline whose replicas take turns, with its bottleneck and our price.

    Raises:
        UsageError: nodes are not of equal size, or layers were profiled with no size in common.
        InfeasibleError: the cluster has fewer devices.
    """
    found = pipedream_plan(profile, cluster, options.gpus, options.bytes_per_s)
    batch = mini_batch(profile)
    costs = CostModel(profile, cluster, replace(options, gpus=options.gpus or len(cluster.devices), batch=batch))
    flights = shallow_depths([stage.replicas for stage in found.stages])
    stages = []
    for stage, depth in zip(found.stages, flights, strict=True):
        division: Division = "round-robin" if stage.replicas > 1 else "split"
        shares = costs.shares(batch, Replicas(stage.replicas, division))
        stages.append(CandidateStage(stage.first, stage.stop, stage.devices, shares, depth, division=division))
    prices, candidate = StashCosts(costs), Candidate(1, batch, "1f1b", tuple(stages))
    shorts = [prices.peak_bytes(stage) - costs.limit_bytes(stage.devices) for stage in stages]
    notes = [
        f"bottleneck per mini-batch by PipeDream's formulas: {found.bottleneck_s:.6g} s; data parallelism on all "
        f"devices {found.data_parallel_s:.6g} s, one device {found.one_device_s:.6g} s",
        *_exceeding(shorts, "with the weight versions that it keeps"),
    ]
    return _named(stash_plan(prices, candidate, options, 0.0, notes), "pipedream", found.bottleneck_s)


def _named(plan: Plan, objective: Objective, objective_s: float) -> Plan:
    predicted = plan.predicted.model_copy(update={"objective_s": objective_s})
    return plan.model_copy(update={"objective": objective, "predicted": predicted})


def planned_by_piper(profile: PiperProfile, cluster: Cluster, options: PlanOptions) -> Plan:
    """Return Piper's plan: a synchronous pipeline whose replicas take turns, with its bottleneck and our price.

    A plan whose layers are run by several devices together, or whose step is very long, has Piper's own numbers alone.

    Raises:
        InfeasibleError: no plan fits the memory, or the cluster has fewer devices.
    """
    found = piper_plan(
        profile,
        cluster,
        options.gpus,
        memory_bytes=options.memory_bytes,
        bytes_per_s=options.bytes_per_s,
        batch=options.batch,
    )
    costs = CostModel(profile, cluster, replace(options, gpus=options.gpus or len(cluster.devices)))
    candidate = _candidate(costs, found)
    notes = [*_chosen(profile, found), *_shallower(found, candidate)]
    idle = len(costs.devices) - found.devices
    if idle:
        notes.append(f"{idle} of {len(costs.devices)} devices stay idle: Piper's formulas know no plan that is faster")
    notes.insert(0, f"slowest stage per micro-batch by Piper's formulas: {found.bottleneck_s:.6g} s")
    unpriced = _unpriced(candidate, found)
    if unpriced is None:
        notes += _exceeding(costs.shortfalls(candidate), "by autopar's count")
        return _named(assemble(costs, candidate, options, 0.0, (), notes), "piper", found.bottleneck_s)
    notes.append(f"{unpriced}: the step is the slowest stage's time for all micro-batches, memory is by Piper's rule")
    return _by_piper_alone(costs, candidate, found, options, notes)


def _unpriced(candidate: Candidate, found: PiperPlan) -> str | None:
    """Return why autopar does not price a plan of Piper's; none where it does."""
    if any(stage.tensor_parallel > 1 for stage in found.stages):
        return "several devices run a replica together, which autopar does not price"
    widths = [len(stage.devices) for stage in candidate.stages]
    routed = candidate.micro_batches * sum(before * after for before, after in pairwise(widths))
    if routed > MOST_ROUTED:
        return (
            f"a step of {candidate.micro_batches} micro-batches on {found.devices} devices is too long to simulate here"
        )
    return None


def _candidate(costs: CostModel, found: PiperPlan) -> Candidate:
    """Return Piper's stages on devices in cluster order, none with more in flight than the stage before."""
    stages: list[CandidateStage] = []
    edges = [0, *accumulate(stage.replicas * stage.tensor_parallel for stage in found.stages)]
    for stage, begin in zip(found.stages, edges, strict=False):
        turns = -(-costs.batch // stage.replicas)
        most = stages[-1].in_flight // stage.replicas if stages else turns
        placed = CandidateStage(
            stage.first,
            stage.stop,
            tuple(range(begin, begin + stage.replicas)),
            costs.shares(1, Replicas(stage.replicas, "round-robin")),
            max(1, min(stage.in_flight, turns, most)),
            tuple(stage.first + at for at, again in enumerate(stage.recompute) if again),
            division="round-robin" if stage.replicas > 1 else "split",
        )
        stages.append(placed)
    return Candidate(costs.batch, 1, "1f1b", tuple(stages))


def _by_piper_alone(
    costs: CostModel, candidate: Candidate, found: PiperPlan, options: PlanOptions, notes: list[str]
) -> Plan:
    """Return a plan whose step is what Piper's bottleneck makes of a batch."""
    busy = sum(stage.seconds * stage.replicas * stage.tensor_parallel for stage in found.stages)
    step_s = found.bottleneck_s * costs.batch
    predicted = Prediction(
        step_s=step_s,
        lower_bound_s=0.0,
        objective_s=found.bottleneck_s,
        bubble=max(0.0, 1 - busy / (found.devices * found.bottleneck_s)) if found.bottleneck_s > 0 else 0.0,
        peak_bytes=tuple(stage.memory_bytes for stage in found.stages),
    )
    records = _records(costs, candidate, found)
    return plan_of(costs, candidate, options, records, predicted, notes, schedule="1f1b", objective="piper")


def _records(costs: CostModel, candidate: Candidate, found: PiperPlan) -> Iterator[Stage]:
    profile, begin = costs.profile, 0
    for placed, stage in zip(candidate.stages, found.stages, strict=True):
        used = stage.replicas * stage.tensor_parallel
        names = tuple(layer.name for layer in profile.layers[placed.first : placed.stop])
        yield Stage(
            layers=names,
            devices=tuple(range(begin, begin + used)),
            tensor_parallel=stage.tensor_parallel,
            division=placed.division,
            shares=placed.shares,
            warmup=placed.warmup,
            recompute=tuple(profile.layers[layer].name for layer in placed.recompute),
            types=costs.types(range(begin, begin + used)),
        )
        begin += used


def _chosen(profile: PiperProfile, found: PiperPlan) -> Iterator[str]:
    """Name the options of layers; what recomputes is in the stages, too."""
    for index, stage in enumerate(found.stages):
        counts: dict[str, int] = {}
        for name in stage.options:
            counts[name] = counts.get(name, 0) + 1
        several = f"{stage.tensor_parallel} devices each, " if stage.tensor_parallel > 1 else ""
        options = ", ".join(f"{name} ({count} of {len(stage.options)} layers)" for name, count in counts.items())
        if several or not _plain(profile, stage):
            yield f"stage {index}: {several}options {options}"[:1000]


def _plain(profile: PiperProfile, stage: PiperStage) -> bool:
    """Whether the plan's stages say all of a stage's options: each layer's first one of its kind."""
    for layer, name, again in zip(
        profile.layers[stage.first : stage.stop], stage.options, stage.recompute, strict=True
    ):
        alike = [each for each in layer.ways if each.tensor_parallel == 1 and each.recompute == again]
        if len(alike) > 1 or alike[0].name != name:
            return False
    return True


def _shallower(found: PiperPlan, candidate: Candidate) -> Iterator[str]:
    for index, (stage, placed) in enumerate(zip(found.stages, candidate.stages, strict=True)):
        if placed.warmup < stage.in_flight:
            yield (
                f"stage {index}: {placed.warmup} in flight on each replica, and not Piper's {stage.in_flight}: no "
                "stage may have more than the one before"
            )


def _exceeding(shorts: list[int], how: str) -> Iterator[str]:
    for index, short in enumerate(shorts):
        if short > 0:
            yield f"stage {index} exceeds its devices' memory by {size(short)}, {how}"
