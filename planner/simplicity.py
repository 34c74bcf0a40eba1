"""Simplicity: which of several plans that are about as fast is easiest to use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.formats.plan import SHARDS
from autopar.planner.candidate import Candidate, Placed
from autopar.planner.chunks import plain
from autopar.planner.costs.model import CostModel
from autopar.planner.search.judge import NEAR, Best, Found
from autopar.planner.simulator.simulate import Simulator


class Simplicity(NamedTuple):
    """How simple a plan is, what counts most first; less is simpler."""

    straddling: int
    """Stages that are neither within one node nor on whole nodes."""
    widths: int
    """Different numbers of replicas."""
    shares: int
    """Stages whose replicas take unequal shares."""
    turning: int
    """Stages whose replicas take turns."""
    shard: int
    """What is sharded: none, optimizer, gradients, parameters."""
    schedule: bool
    """Whether it is other than `1f1b`."""
    stages: int
    recomputed: int
    """Layers that are run forward again."""


def simplicity(costs: CostModel, candidate: Candidate) -> Simplicity:
    """Return how simple a candidate is."""
    stages = candidate.stages
    return Simplicity(
        straddling=len(straddling(costs, stages)),
        widths=len({len(stage.devices) for stage in stages}),
        shares=sum(len(set(stage.shares)) > 1 for stage in stages),
        turning=sum(stage.division == "round-robin" for stage in stages),
        shard=max(SHARDS.index(stage.shard) for stage in stages),
        schedule=not plain(candidate.schedule),
        stages=len(stages),
        recomputed=sum(len(stage.recompute) for stage in stages),
    )


def straddling(costs: CostModel, stages: Sequence[Placed]) -> list[int]:
    """Return the stages that take some devices of several nodes, and not all of each."""
    nodes = costs.links.topology.nodes
    found = []
    for index, stage in enumerate(stages):
        used = {nodes[device] for device in stage.devices}
        if len(used) > 1 and len(stage.devices) < sum(nodes.count(node) for node in used):
            found.append(index)
    return found


def simplest(simulator: Simulator, best: Best) -> Found:
    """Return the simplest of all candidates that were met within 1 % of the best one; of equals the fastest."""
    assert best.found is not None
    most_s = best.step_s * (1 + NEAR)
    ranked = sorted(
        (
            (simplicity(simulator.costs, candidate), step_s, at)
            for at, (candidate, step_s) in enumerate(best.near.items())
            if step_s <= most_s
        ),
    )
    candidates = list(best.near)
    for _, known_s, at in ranked:
        # What was not the best of its number of stages may have been simulated without contention.
        step_s = simulator.step_s(candidates[at]) if simulator.sharing else known_s
        if step_s <= most_s:
            return Found(step_s, candidates[at])
    return best.found
