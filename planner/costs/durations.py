"""Durations: how long every action of a candidate takes; and what its ranks hold beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

from autopar.formats.cluster import Level
from autopar.formats.prices import ActionPrices, RankBytes, RankPrices, price_key
from autopar.formats.program import (
    BACKWARD,
    CORRECT,
    FORWARD,
    INPUT_BACKWARD,
    PREDICT,
    REDUCE,
    REDUCE_TIED,
    SENDS,
    UPDATE,
    WEIGHT_BACKWARD,
    Program,
)
from autopar.planner.candidate import Candidate, CandidateStage, groups, has_chunks, splits_backward
from autopar.planner.costs.activations import rows_bytes
from autopar.planner.costs.in_flight import backwards, stage_terms
from autopar.planner.costs.memory import state_of
from autopar.planner.costs.model import CostModel
from autopar.schedules.route import Routes


@dataclass(frozen=True)
class Durations:
    """Seconds of every action, by replica: those of all stages in order, as ranks are, where each runs one stage."""

    overhead_s: float
    stage: list[int] = field(default_factory=list)
    """Of every replica."""
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    """From the end of a replica's last backward to the end of its gradients' reduction."""
    reduce_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    """Of a rank that runs several stages, all at the first of them."""
    prepare_s: list[float] = field(default_factory=list)
    """Of weights that are predicted or corrected, which reads and writes about what an update does; empty: as it."""
    message_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """By (sending replica, receiving replica), of different ranks."""
    tied_s: list[float] = field(default_factory=list)
    """By index into the plan's shared parameters."""
    turns: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(first, period) of the micro-batches that a pair's messages carry; only where not all do."""
    input_s: list[float] = field(default_factory=list)
    """Halves of a backward; empty where the schedule has none."""
    weight_s: list[float] = field(default_factory=list)
    last_s: list[float] = field(default_factory=list)
    """Of the last that makes gradients: a whole backward, or a weight half; empty like the halves."""
    rank: list[int] = field(default_factory=list)
    """Of every replica; empty where ranks run one stage each."""

    @property
    def ranks(self) -> Sequence[int]:
        """The rank of every replica."""
        return self.rank or range(len(self.stage))


def durations(costs: CostModel, candidate: Candidate) -> Durations:
    """Return the durations of a candidate's actions."""
    found = Durations(costs.profile.step_overhead_s)
    columns = found.forward_s, found.backward_s, found.exposed_s, found.input_s, found.weight_s, found.last_s
    ends = backwards(candidate) if splits_backward(candidate.schedule) else None
    for index, stage in enumerate(candidate.stages):
        reduce_s, update_s = costs.reduce_s(stage), costs.update_s(stage)
        alike: dict[tuple[float, int], tuple[float, ...]] = {}
        for replica, key in enumerate(zip(stage.shares, map(costs.kind_of.__getitem__, stage.devices), strict=True)):
            if key not in alike:
                backward_s = costs.backward_s(stage, replica, candidate.micro_batches)
                whole = ends is None or ends[index].ends_whole
                exposed_s = costs.replica_exposed_s(stage, replica, split=not whole)
                alike[key] = costs.forward_s(stage, replica), backward_s, exposed_s
                if ends is not None:
                    input_s, weight_s = costs.halves_s(stage, replica, candidate.micro_batches)
                    alike[key] += input_s, weight_s, backward_s if whole else weight_s
            for column, seconds in zip(columns, alike[key], strict=False):
                column.append(seconds)
        width = len(stage.devices)
        found.stage.extend([index] * width)
        found.reduce_s.extend([reduce_s] * width)
        found.update_s.extend([update_s] * width)
    if has_chunks(candidate.schedule):
        _share_ranks(candidate, found)
    _price_messages(costs, candidate, found)
    for tied, holders in costs.tied_between(candidate.stages):
        devices = list(dict.fromkeys(each for index in holders for each in candidate.stages[index].devices))
        found.tied_s.append(costs.tied_s(tied, devices))
    return found


def prices_of(program: Program, times: Durations) -> ActionPrices:
    """Return what every action of a program is priced at, by rank."""
    owner = {place: at for at, place in enumerate(zip(times.ranks, times.stage, strict=True))}
    seconds_of = {
        FORWARD: times.forward_s,
        BACKWARD: times.backward_s,
        INPUT_BACKWARD: times.input_s,
        WEIGHT_BACKWARD: times.weight_s,
        REDUCE: times.reduce_s,
        UPDATE: times.update_s,
        **dict.fromkeys((PREDICT, CORRECT), times.prepare_s or times.update_s),
    }
    found = []
    for rank, actions in enumerate(program.ranks):
        seconds: dict[str, float] = {}
        exposed_s: dict[str, float] = {}
        for key, action in {price_key(action): action for action in actions}.items():
            own = owner[rank, action.stage]
            if action.kind in SENDS:
                seconds[key] = times.message_s[own, owner[action.peer, action.peer_stage]]
            elif action.kind == REDUCE_TIED:
                seconds[key] = times.tied_s[action.micro_batch]
            elif action.kind in seconds_of:
                seconds[key] = seconds_of[action.kind][own]
            if action.kind == REDUCE:
                exposed_s[key] = times.exposed_s[own]
        found.append(RankPrices(seconds, exposed_s))
    return ActionPrices(times.overhead_s, tuple(found))


def rank_bytes(costs: CostModel, candidate: Candidate) -> tuple[RankBytes, ...]:
    """Return what every rank holds throughout a step, and what its layers hold of a micro-batch."""
    found = []
    for chunks in groups(candidate.stages):
        own = [candidate.stages[at] for at in chunks]
        for replica in range(len(own[0].devices)):
            parts = [_replica_bytes(costs, candidate, stage, replica) for stage in own]
            layers = {name: each for part in parts for name, each in part.layers.items()}
            limit = costs.limit_bytes((own[0].devices[replica],))
            state, update = sum(part.state for part in parts), sum(part.update for part in parts)
            found.append(RankBytes(state, update, layers, limit))
    return tuple(found)


def _replica_bytes(costs: CostModel, candidate: Candidate, stage: CandidateStage, replica: int) -> RankBytes:
    """Return what a replica of a stage holds."""
    memory, rows = costs.memory[costs.kind_of[stage.devices[replica]]], stage.shares[replica]
    terms, parts = stage_terms(stage, candidate.micro_batches, 0, rows), memory.parts(stage.first, stage.stop, rows)
    kept, gradients, update = map(int, state_of(parts, terms))
    kept += stage.turns(replica, candidate.micro_batches) * int(rows_bytes(rows, parts.inputs))
    alone = terms.replicas == 1
    layers = {}
    for layer in range(stage.first, stage.stop):
        layers[costs.profile.layers[layer].name] = memory.layer_bytes(layer, rows, with_gradients=alone)
    return RankBytes(kept + (int(parts.lasting) if alone else gradients), update, layers)


def _share_ranks(candidate: Candidate, times: Durations) -> None:
    """Note the ranks of replicas that share them."""
    stages = candidate.stages
    starts = [0, *accumulate(len(stage.devices) for stage in stages)]
    times.rank.extend([0] * starts[-1])
    ranks = count()
    for chunks in groups(stages):
        for replica in range(len(stages[chunks[0]].devices)):
            rank, mine = next(ranks), [starts[stage] + replica for stage in chunks]
            update_s = sum(times.update_s[at] for at in mine)
            for at in mine:
                times.rank[at], times.update_s[at] = rank, 0.0
            times.update_s[mine[0]] = update_s


def _price_messages(costs: CostModel, candidate: Candidate, times: Durations) -> None:
    stages, known = candidate.stages, Routes()
    starts = [0, *accumulate(len(stage.devices) for stage in stages)]
    level = costs.links.topology.pair
    for producer, consumer, flow in costs.flows.exchanges(candidate.cuts):
        sending, receiving = stages[producer], stages[consumer]
        alike: dict[tuple[float, Level], tuple[float, ...]] = {}
        for route in known.between(sending, receiving):
            pair = starts[producer] + route.sender, starts[consumer] + route.receiver
            devices = sending.devices[route.sender], receiving.devices[route.receiver]
            if devices[0] == devices[1]:
                continue
            key = route.stop - route.start, level(*devices)
            if key not in alike:
                rows = costs.message_bytes(route, candidate.micro_batch_size, 1)
                sizes = rows * flow.bytes_per_sample, rows * flow.gradient_bytes_per_sample
                alike[key] = tuple(costs.links.message_s(size, key[1]) for size in sizes)
            times.message_s[pair] = alike[key][0]
            if flow.gradients:
                times.message_s[pair[::-1]] = alike[key][1]
            if route.period > 1:
                times.turns[pair] = times.turns[pair[::-1]] = route.first, route.period
