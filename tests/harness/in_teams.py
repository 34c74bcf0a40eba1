"""Plans of several ranks for each replica, made of plans of one."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.capture.graph import LayerGraph
from autopar.formats.cuts import ParameterCut
from autopar.formats.plan import Plan
from autopar.planner.teams import with_teams
from autopar.profiler.splits import cuts_of_layers


def in_teams(graph: LayerGraph, plan: Plan, sizes: Sequence[int]) -> Plan:
    """Return a plan whose replicas are run by so many ranks each, by stage; devices count from 0."""
    cuts = {size: cuts_of_layers(graph, size) for size in set(sizes) - {1}}

    def split_of(layer: str, count: int) -> tuple[ParameterCut, ...]:
        return cuts[count][layer]

    places, device = {}, 0
    for chunks in plan.groups:
        for replica in range(plan.stages[chunks[0]].replicas):
            places[chunks[0], replica] = tuple(range(device, device + sizes[chunks[0]]))
            device += sizes[chunks[0]]
    return with_teams(plan, sizes, places, split_of)
