"""Provenance: where a candidate's times come from, as the plan file says it."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.formats.cluster import Level
from autopar.formats.document import Provenance, least_certain
from autopar.planner.candidate import Candidate, Placed
from autopar.planner.costs.links import Collective
from autopar.planner.costs.model import CostModel
from autopar.schedules.route import Routes


def computed(costs: CostModel, stage: Placed) -> Provenance:
    """Return where the times of a stage's forwards and backwards come from."""
    placed = {(rows, costs.kind_of[device]) for rows, device in zip(stage.shares, stage.devices, strict=True)}
    known = (costs.layers[kind].provenance(stage.first, stage.stop, rows) for rows, kind in placed)
    return least_certain(known) or "estimated"


def communicated(costs: CostModel, candidate: Candidate) -> Provenance | None:
    """Return where the times of a candidate's messages and reductions come from; none if it has none."""
    return least_certain((*_messages(costs, candidate), *_reductions(costs, candidate)))


def _messages(costs: CostModel, candidate: Candidate) -> Iterator[Provenance]:
    known, level = Routes(), costs.links.topology.pair
    for producer, consumer, flow in costs.flows.exchanges([stage.stop for stage in candidate.stages]):
        sending, receiving = candidate.stages[producer], candidate.stages[consumer]
        sent: set[tuple[float, Level]] = set()
        for route in known.between(sending, receiving):
            ends = sending.devices[route.sender], receiving.devices[route.receiver]
            if ends[0] != ends[1]:
                size = costs.message_bytes(route, candidate.micro_batch_size, flow.bytes_per_sample)
                sent.add((size, level(*ends)))
        yield from (costs.links.message_provenance(*each) for each in sent)


def _reductions(costs: CostModel, candidate: Candidate) -> Iterator[Provenance]:
    for stage in candidate.stages:
        ranks, level = len(stage.devices), costs.links.level(stage.devices)
        kinds: list[Collective] = ["all_reduce"] if stage.shard == "none" else ["reduce_scatter", "all_gather"]
        for kind in kinds if ranks > 1 else ():
            for _, size in costs.buckets(stage.first, stage.stop):
                yield costs.links.collective_provenance(kind, size, ranks, level)
    for index, holders in costs.tied_between(candidate.stages):
        devices = list(dict.fromkeys(each for holder in holders for each in candidate.stages[holder].devices))
        size = costs.flows.tied[index].bytes
        yield costs.links.collective_provenance("all_reduce", size, len(devices), costs.links.level(devices))
