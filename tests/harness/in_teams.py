"""Plans of several ranks for each replica, made of plans of one."""

from collections.abc import Sequence

from autopar.capture.graph import LayerGraph
from autopar.formats.plan import Plan
from autopar.formats.profile import LayerSplit
from autopar.planner.teams import with_sequences, with_teams
from autopar.profiler.subject import SplitSurvey


def in_teams(graph: LayerGraph, plan: Plan, sizes: Sequence[int], *, sequence: bool = False) -> Plan:
    """Return a plan whose replicas are run by so many ranks each, by stage; devices count from 0."""
    splits = {size: SplitSurvey(graph).splits(size) for size in set(sizes) - {1}}

    def split_of(layer: str, count: int) -> LayerSplit | None:
        return splits[count].get(layer) if count > 1 else None

    places, device = {}, 0
    for chunks in plan.groups:
        for replica in range(plan.stages[chunks[0]].replicas):
            places[chunks[0], replica] = tuple(range(device, device + sizes[chunks[0]]))
            device += sizes[chunks[0]]
    made = with_teams(plan, sizes, places, split_of)
    tensors = {each.name: (each.producer, *each.consumers) for each in graph.tensors if each.producer is not None}
    return with_sequences(made, tensors, split_of) if sequence else made
