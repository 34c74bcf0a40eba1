"""Alternatives: plans to list beside the chosen one.

From the simulator: the plans that anyone would try first, given stages in every way to run them, those met in the
search that differ from the chosen one in a single respect, and the simplest of those about as fast.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from autopar.formats.plan import SHARDS, Shard
from autopar.formats.prediction import Alternative
from autopar.planner.candidate import (
    Candidate,
    CandidateStage,
    Family,
    Manner,
    counts_beside,
    manners_of,
    place,
    placed_on,
)
from autopar.planner.costs.model import CostModel
from autopar.planner.infeasible import explain
from autopar.planner.options import PLANNED, PlanOptions, sharding_refusal
from autopar.planner.search.depths import ROUNDING, depth_choices, span_of
from autopar.planner.search.judge import NEAR, Best, SimulatedPlan
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules.route import even_shares

MOST_FRAMES = 64


class Reference(NamedTuple):
    """A plan to compare with: found, or not feasible for a reason."""

    name: str
    simulated_plan: SimulatedPlan | None
    reason: str | None

    def record(self) -> Alternative:
        """Return it as the plan file lists it."""
        if self.simulated_plan is None:
            return Alternative(name=self.name, infeasible=self.reason)
        step_s, candidate = self.simulated_plan
        return Alternative(
            name=self.name,
            step_s=step_s,
            stages=candidate.text(),
            micro_batches=candidate.micro_batches,
            schedule=candidate.schedule,
        )


def try_stages(
    simulator: Simulator,
    families: Iterable[Family],
    options: PlanOptions,
    cuts: Sequence[int],
    widths: Sequence[int],
    order: Sequence[int] | None = None,
) -> Best:
    """Judge given stages in every family, with every division and sharding.

    ``order`` are devices in the order in which stages take them, the cluster's if not given.
    """
    best = Best()
    for family in families:
        for each in frames(simulator.costs, family, options, cuts, widths):
            frame = each if order is None else placed_on(order, each)
            spans = [span_of(simulator.costs, family, options, stage) for stage in frame]
            found = depth_choices(simulator.costs, family, frame, spans, exact=False)
            for candidate in found.candidates:
                best.judge(simulator, candidate)
            best.miss(found.closest)
    return best


def frames(
    costs: CostModel, family: Family, options: PlanOptions, cuts: Sequence[int], widths: Sequence[int]
) -> list[tuple[CandidateStage, ...]]:
    """Return given stages, with all in flight and nothing recomputed, in every division and sharding."""
    manners = [manners_of(family, width, options.shards, divisible=costs.divisible) for width in widths]
    every: Iterable[Sequence[Manner]] = product(*manners)
    if prod(map(len, manners)) > MOST_FRAMES:
        # Too many to mix: the same in all stages that can.
        alike = dict.fromkeys(manner for each in manners for manner in each)
        every = [[manner if manner in each else each[0] for each in manners] for manner in alike]
    return [place(family, cuts, widths, each, divisible=costs.divisible) for each in every]


def references(simulator: Simulator, families: Sequence[Family], options: PlanOptions) -> list[Reference]:
    """Return pure and sharded data parallelism on all devices, and an equal split into stages of one device."""
    costs = simulator.costs
    layers, devices = costs.layer_count, len(costs.devices)
    stages = min(layers, devices)
    equal = tuple(accumulate(even_shares(layers, stages)))
    named: dict[str, Shard] = {"pure data parallelism": "none"}
    if devices > 1 and sharding_refusal(costs.profile) is None:
        named["sharded data parallelism"] = "parameters"
    if devices > 1 and costs.single:
        found = [Reference(name, None, next(iter(costs.single.values())).reason) for name in named]
    else:
        every = ((name, replace(options, shard=shard)) for name, shard in named.items())
        found = [
            _reference(costs, name, try_stages(simulator, families, asked, (layers,), (devices,)))
            for name, asked in every
        ]
    return [*found, _reference(costs, "equal split", try_stages(simulator, families, options, equal, (1,) * stages))]


def _reference(costs: CostModel, name: str, best: Best) -> Reference:
    reason = None
    if best.fastest is None:
        reason = f"no micro-batch of a batch of {costs.batch} has a sample for each of {len(costs.devices)}"
        if best.closest is not None:
            reason = explain(costs, best.closest[1])
        elif costs.share_limits:
            reason = costs.share_limits[0].text
    return Reference(name, best.fastest, reason)


MOST_NEIGHBOURS = 5


def neighbours(simulator: Simulator, best: Best, candidate: Candidate) -> list[Reference]:
    """Return the fastest plans that were met with fewer and more stages, devices or micro-batches, or less of the rest.

    At most five, the fastest first; and the fastest whose stages are equally wide, if the chosen one's are not.
    """
    rows: dict[Candidate, Reference] = {}
    for name, found in _named_neighbours(simulator, best, candidate):
        if found is not None and found.candidate != candidate:
            step_s = simulator.step_s(found.candidate) if simulator.sharing else found.step_s
            rows.setdefault(found.candidate, Reference(name, SimulatedPlan(step_s, found.candidate), None))
    every = sorted(rows.values(), key=lambda each: each.simulated_plan.step_s if each.simulated_plan else 0.0)
    equal = [each for each in every[MOST_NEIGHBOURS:] if each.name == "equal widths"]
    return [*every[: MOST_NEIGHBOURS - len(equal)], *equal]


def _named_neighbours(
    simulator: Simulator, best: Best, candidate: Candidate
) -> Iterator[tuple[str, SimulatedPlan | None]]:
    yield "equal widths", best.equal
    if best.fastest is not None and best.fastest.candidate != candidate:
        yield "fastest", best.fastest
    own = len(candidate.stages)
    for count in (own - 1, own + 1, 1):
        yield f"{count} stage{'s' if count > 1 else ''}", best.by_stages.get(count)
    for count in counts_beside(simulator.costs.batch, candidate.micro_batches):
        name = f"{count} micro-batch{'es' if count > 1 else ''}"
        yield name, best.by_trait.get(("micro_batches", count))
    used = len(set(candidate.devices))
    fewer = max((count for kind, count in best.by_trait if kind == "devices" and count < used), default=0)
    yield f"{fewer} device{'s' if fewer > 1 else ''}", best.by_trait.get(("devices", fewer))
    if any(stage.recompute for stage in candidate.stages):
        yield "no recomputation", best.by_trait.get(("recompute", 0))
    shard = max(SHARDS.index(stage.shard) for stage in candidate.stages)
    for less in range(shard):
        yield f"shards {SHARDS[less]}" if less else "shards nothing", best.by_trait.get(("shard", less))


def simplicity(costs: CostModel, candidate: Candidate) -> tuple[int, ...]:
    """Return how simple a candidate is, what counts most first; less is simpler.

    Counted are stages that are neither within one node nor on whole nodes, different numbers of replicas, stages whose
    replicas take unequal shares, and those whose replicas take turns; what is sharded: none, optimizer, gradients,
    parameters; whether the schedule is other than `1f1b`; and stages, and layers that are run forward again.
    """
    stages = candidate.stages
    return (
        len(straddling(costs, stages)),
        len({len(stage.devices) for stage in stages}),
        sum(len(set(stage.shares)) > 1 for stage in stages),
        sum(stage.division == "round-robin" for stage in stages),
        max(SHARDS.index(stage.shard) for stage in stages),
        candidate.schedule not in PLANNED,
        len(stages),
        sum(len(stage.recompute) for stage in stages),
    )


def straddling(costs: CostModel, stages: Sequence[CandidateStage]) -> list[int]:
    """Return the stages that take some devices of several nodes, and not all of each."""
    nodes = costs.links.topology.nodes
    used = [{nodes[device] for device in stage.devices} for stage in stages]
    return [
        index
        for index, (stage, own) in enumerate(zip(stages, used, strict=True))
        if len(own) > 1 and len(stage.devices) < sum(map(nodes.count, own))
    ]


def simplest(simulator: Simulator, best: Best) -> SimulatedPlan:
    """Return the simplest of all candidates that were met within 1 % of the best one; of equals the fastest."""
    assert best.fastest is not None
    most_s = best.step_s * (1 + NEAR)
    near = [(candidate, step_s) for candidate, step_s in best.near.items() if step_s <= most_s]
    for candidate, known_s in sorted(near, key=lambda each: (simplicity(simulator.costs, each[0]), each[1])):
        # What was not the best of its number of stages may have been simulated without contention.
        step_s = simulator.step_s(candidate) if simulator.sharing else known_s
        if step_s <= most_s:
            return SimulatedPlan(step_s, candidate)
    return best.fastest


def shallowest(simulator: Simulator, simulated_plan: SimulatedPlan) -> SimulatedPlan:
    """Return the plan with as few micro-batches in flight as leave it no slower.

    The depths that the search tries follow from paces, and may be more than the plan needs: memory that serves nobody.
    From the last stage to the first, each gets the least depth that the one behind allows and that costs no time.
    """
    step_s, candidate = simulated_plan
    if candidate.schedule != "1f1b":
        return simulated_plan
    most_s = step_s * (1 + ROUNDING)

    def is_as_fast(index: int, depth: int) -> bool:
        other = _with_depth(candidate, index, depth)
        return max(simulator.costs.shortfalls(other)) <= 0 and simulator.step_s(other, most_s) <= most_s

    for index in reversed(range(len(candidate.stages))):
        stage, behind = candidate.stages[index], candidate.stages[index + 1 : index + 2]
        # One with fewer in flight than the stage behind would wait for ever.
        least = -(-max([min(each.in_flight, candidate.micro_batches) for each in behind], default=1) // stage.turning)
        if least < stage.warmup and is_as_fast(index, stage.warmup - 1):
            depth = bisect_left(range(stage.warmup - 1), True, lo=least, key=partial(is_as_fast, index))
            candidate = _with_depth(candidate, index, depth)
    if candidate is simulated_plan.candidate:
        return simulated_plan
    return SimulatedPlan(simulator.step_s(candidate), candidate)


def _with_depth(candidate: Candidate, index: int, depth: int) -> Candidate:
    """Return a candidate with one stage's depth in place of its own."""
    stages = candidate.stages
    return candidate._replace(stages=(*stages[:index], stages[index]._replace(warmup=depth), *stages[index + 1 :]))
