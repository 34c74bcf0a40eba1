"""Durations: how long every action of a candidate takes, what a rank's actions are priced at, and what ranks hold.

A team moves as one: its ranks compute the same layers at once, wait for each other wherever they exchange, and receive
and send in lanes, one each. So durations are by replica, whoever runs it. A message takes as long as its slowest lane.
Of what came in lanes, or is whole on the other side, every rank of a team makes the whole by a sum over the team: that
is part of the forward, or backward, that takes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from math import ceil
from typing import NamedTuple

from autopar.formats.cluster import LEVELS, Level
from autopar.formats.plan import Plan
from autopar.formats.program import (
    BACKWARD,
    CORRECT,
    FORWARD,
    INPUT_BACKWARD,
    PREDICT,
    PULL,
    PUSH,
    REDUCE,
    REDUCE_TIED,
    SENDS,
    UPDATE,
    WEIGHT_BACKWARD,
    ActionPrices,
    Program,
    RankBytes,
    RankPrices,
    price_key,
)
from autopar.ownership import meetings
from autopar.planner.candidate import Candidate, CandidateStage, groups, has_chunks, splits_backward
from autopar.planner.costs.activations import rows_bytes
from autopar.planner.costs.communication import FlowTensor
from autopar.planner.costs.forms import slices_of
from autopar.planner.costs.memory import state_of
from autopar.planner.costs.model import CostModel
from autopar.planner.costs.rank_memory import backwards, peak_terms_of


class WaveSum(NamedTuple):
    """What ranks of several pipelines add up of every wave."""

    ranks: tuple[int, ...]
    seconds: float
    early_pulls: int = 0
    """How many pulls come before the first that waits for one."""


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
    """Of weights that are predicted or corrected, or changed by waves: it reads and writes about what an update does;
    empty: as it."""
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
    """Of every replica; empty where ranks run one stage each. A team counts as one."""
    waves: list[WaveSum] = field(default_factory=list)
    """Where there are several pipelines, the sums of every wave."""
    teams: list[tuple[int, ...]] = field(default_factory=list)
    """The ranks of every team, in order; empty where each has one."""

    @property
    def ranks(self) -> Sequence[int]:
        """The rank of every replica."""
        return self.rank or range(len(self.stage))

    def team(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that go as this one, with which replicas' ranks are counted."""
        return self.teams[rank] if self.teams else (rank,)

    @property
    def compute_s(self) -> dict[str, list[float]]:
        """Seconds of every replica's computations, by the kind of action."""
        return {
            FORWARD: self.forward_s,
            BACKWARD: self.backward_s,
            INPUT_BACKWARD: self.input_s,
            WEIGHT_BACKWARD: self.weight_s,
            UPDATE: self.update_s,
            **dict.fromkeys((PREDICT, CORRECT, PUSH, PULL), self.prepare_s or self.update_s),
        }


def durations(costs: CostModel, candidate: Candidate) -> Durations:
    """Return the durations of a candidate's actions."""
    found = Durations(costs.profile.step_overhead_s)
    columns = found.forward_s, found.backward_s, found.exposed_s, found.input_s, found.weight_s, found.last_s
    ends = backwards(candidate) if splits_backward(candidate.schedule) else None
    joining = Joining(costs, candidate)
    for index, stage in enumerate(candidate.stages):
        reduce_s, update_s = costs.reduce_s(stage), costs.update_s(stage)
        alike: dict[tuple[float, int], tuple[float, ...]] = {}
        for replica, key in enumerate(zip(stage.shares, costs.forms_of(stage), strict=True)):
            if key not in alike:
                forth_s, back_s = joining.seconds(index, replica)
                backward_s = costs.backward_s(stage, replica, candidate.micro_batches) + back_s
                whole = ends is None or ends[index].ends_whole
                exposed_s = costs.replica_exposed_s(stage, replica, split=not whole)
                alike[key] = costs.forward_s(stage, replica) + forth_s, backward_s, exposed_s
                if ends is not None:
                    input_s, weight_s = costs.halves_s(stage, replica, candidate.micro_batches)
                    alike[key] += input_s + back_s, weight_s, backward_s if whole else weight_s
            for column, seconds in zip(columns, alike[key], strict=False):
                column.append(seconds)
        width = stage.replicas.width
        found.stage.extend([index] * width)
        found.reduce_s.extend([reduce_s] * width)
        found.update_s.extend([update_s] * width)
    if has_chunks(candidate.schedule):
        _share_ranks(candidate, found)
    _price_messages(costs, candidate, found, joining)
    for tied, holders in costs.tied_between(candidate.stages):
        found.tied_s.append(costs.tied_s(tied, [candidate.stages[index] for index in holders]))
    _note_teams(candidate, found)
    return found


def plan_durations(costs: CostModel, candidates: Sequence[Candidate], plan: Plan) -> Durations:
    """Return the durations of the actions of all pipelines of a plan; of several, what of which layers they add up."""
    if len(candidates) == 1:
        return durations(costs, candidates[0])
    found = Durations(costs.profile.step_overhead_s)
    for candidate in candidates:
        own, start = durations(costs, candidate), len(found.stage)
        for name in ("forward_s", "backward_s", "exposed_s", "reduce_s", "update_s"):
            getattr(found, name).extend(getattr(own, name))
        found.stage.extend(stage + start for stage in own.stage)
        found.message_s.update({(one + start, other + start): s for (one, other), s in own.message_s.items()})
    devices = [device for candidate in candidates for device in candidate.devices]
    place = {layer.name: at for at, layer in enumerate(costs.profile.layers)}
    for shared in plan.shared_layers:
        size = costs.trained_bytes({place[name] for name in shared.layers})
        group = costs.links.place([devices[rank] for rank in shared.ranks])
        seconds = costs.links.collective_s("all_reduce", size, group)
        found.waves.append(WaveSum(shared.ranks, seconds, plan.early_pulls))
    return found


def _note_teams(candidate: Candidate, times: Durations) -> None:
    """Note the ranks of teams, if there are any."""
    if any(stage.team > 1 for stage in candidate.stages):
        ranks = count()
        for chunks in groups(candidate.stages):
            replicas = candidate.stages[chunks[0]].replicas
            times.teams.extend(tuple(next(ranks) for _ in range(replicas.team)) for _ in range(replicas.width))


class Joining:
    """Between which stages of a candidate what is sent is joined, and what that takes."""

    def __init__(self, costs: CostModel, candidate: Candidate) -> None:
        """Find it."""
        self._costs, self._stages = costs, candidate.stages
        self._sums: list[tuple[list[int], list[int]]] = [([], []) for _ in candidate.stages]
        """By stage, bytes per sample of what is summed of activations, and of gradients."""
        self._sliced: dict[tuple[int, int], set[str]] = {}
        """By (producer, consumer) of which a part sends to the same part of the other, tensors that are in slices."""
        if any(stage.team > 1 for stage in candidate.stages):
            self._find(list(self._crossing()))

    def _crossing(self) -> Iterator[tuple[FlowTensor, int, list[int]]]:
        """Yield every tensor between stages, with that which makes it and those that read it, on other devices."""
        stage_of = [index for index, stage in enumerate(self._stages) for _ in range(stage.first, stage.stop)]
        for tensor in self._costs.flows.crossing:
            made = stage_of[tensor.producer]
            readers = {stage_of[consumer] for consumer in tensor.consumers}
            yield tensor, made, sorted(at for at in readers if self._stages[at].devices != self._stages[made].devices)

    def _find(self, crossing: Sequence[tuple[FlowTensor, int, list[int]]]) -> None:
        slices = slices_of(self._costs.profile, self._stages)
        for tensor, made, readers in crossing:
            if tensor.name in slices[made]:
                for reader in readers:
                    self._sliced.setdefault((made, reader), set()).add(tensor.name)
        for tensor, made, readers in crossing:
            for reader in readers:
                if (made, reader) not in self._sliced:
                    self._sums[reader][0].append(tensor.bytes_per_sample)
                    self._sums[made][1].extend([tensor.bytes_per_sample] * tensor.gradient)

    def seconds(self, index: int, replica: int) -> tuple[float, float]:
        """Return what a replica's team takes to join what it receives for a forward, and for a backward."""
        stage = self._stages[index]
        if stage.team == 1:
            return 0.0, 0.0
        place, rows = self._costs.links.place(stage.teams[replica]), stage.shares[replica]
        forth, back = (
            sum(self._costs.links.collective_s("all_reduce", ceil(rows * size), place) for size in sizes)
            for sizes in self._sums[index]
        )
        return forth, back

    def lanes(self, producer: int, consumer: int) -> int:
        """Return among how many lanes the rows of a message are divided."""
        teams = self._stages[producer].team, self._stages[consumer].team
        return 1 if (producer, consumer) in self._sliced else max(teams)

    def saved_bytes(self, producer: int, consumer: int) -> tuple[int, int]:
        """Return by how many bytes per sample slices make a message smaller, forth and back."""
        names, team = self._sliced.get((producer, consumer), set[str]()), self._stages[producer].team
        if not names:
            return 0, 0
        found = [each for each in self._costs.flows.crossing if each.name in names]
        less = [(each.bytes_per_sample - -(-each.bytes_per_sample // team), each.gradient) for each in found]
        return sum(size for size, _ in less), sum(size for size, gradient in less if gradient)


def prices_of(program: Program, times: Durations) -> ActionPrices:
    """Return what every action of a program is priced at, by rank; those of a team are priced alike."""
    owner = {place: at for at, place in enumerate(zip(times.ranks, times.stage, strict=True))}
    ahead = {rank: at for at, team in enumerate(times.teams) for rank in team}
    compute_s = times.compute_s
    found = []
    for rank, actions in enumerate(program.ranks):
        seconds: dict[str, float] = {}
        exposed_s: dict[str, float] = {}
        for key, action in {price_key(action): action for action in actions}.items():
            own = owner[ahead.get(rank, rank), action.stage]
            if action.kind in SENDS:
                seconds[key] = times.message_s[own, owner[ahead.get(action.peer, action.peer), action.peer_stage]]
            elif action.kind == REDUCE_TIED:
                seconds[key] = times.tied_s[action.micro_batch]
            elif action.kind == REDUCE:
                seconds[key], exposed_s[key] = times.reduce_s[own], times.exposed_s[own]
            elif action.kind in compute_s:
                seconds[key] = compute_s[action.kind][own]
        waves_s = tuple(each.seconds for each in times.waves if rank in each.ranks)
        found.append(RankPrices(seconds, exposed_s, waves_s))
    return ActionPrices(times.overhead_s, tuple(found))


def rank_bytes(costs: CostModel, candidate: Candidate) -> tuple[RankBytes, ...]:
    """Return what every rank holds throughout a step, and what its layers hold of a micro-batch."""
    found = []
    for chunks in groups(candidate.stages):
        own = [candidate.stages[at] for at in chunks]
        for replica in range(own[0].replicas.width):
            parts = [_replica_bytes(costs, candidate, stage, replica) for stage in own]
            layers = {name: each for part in parts for name, each in part.layers.items()}
            limit = costs.limit_bytes(own[0].teams[replica])
            state, update = sum(part.state for part in parts), sum(part.update for part in parts)
            found.extend([RankBytes(state, update, layers, limit)] * own[0].team)
    return tuple(found)


def _replica_bytes(costs: CostModel, candidate: Candidate, stage: CandidateStage, replica: int) -> RankBytes:
    """Return what a replica of a stage holds."""
    memory, rows = costs.memory[costs.form_of(stage, replica)], stage.shares[replica]
    terms, parts = peak_terms_of(stage, candidate.micro_batches, 0, rows), memory.parts(stage.first, stage.stop, rows)
    kept, gradients, update = map(int, state_of(parts, terms))
    # What replicas divide comes and goes while any layer computes.
    kept += int(memory.parts(stage.first, stage.stop, rows, sharded=terms.sharded).peak) - int(parts.peak)
    kept += len(stage.samples[replica].of(candidate.micro_batches)) * int(rows_bytes(rows, parts.inputs))
    # As they are made, or in buffers that are there throughout.
    comes = terms.replicas == 1 or terms.shard == "optimizer"
    layers = {}
    for layer in range(stage.first, stage.stop):
        layers[costs.profile.layers[layer].name] = memory.layer_bytes(layer, rows, with_gradients=comes)
    return RankBytes(kept + (int(parts.lasting) if comes else gradients), update, layers)


def _share_ranks(candidate: Candidate, times: Durations) -> None:
    """Note the ranks of replicas that share them."""
    stages = candidate.stages
    starts = [0, *accumulate(candidate.widths)]
    times.rank.extend([0] * starts[-1])
    ranks = count()
    for chunks in groups(stages):
        for replica in range(stages[chunks[0]].replicas.width):
            rank, mine = next(ranks), [starts[stage] + replica for stage in chunks]
            update_s = sum(times.update_s[at] for at in mine)
            for at in mine:
                times.rank[at], times.update_s[at] = rank, 0.0
            times.update_s[mine[0]] = update_s


def _price_messages(costs: CostModel, candidate: Candidate, times: Durations, joining: Joining) -> None:
    stages = candidate.stages
    starts = [0, *accumulate(candidate.widths)]
    for producer, consumer, flow in costs.flows.exchanges(candidate.cuts):
        sending, receiving, lanes = stages[producer], stages[consumer], joining.lanes(producer, consumer)
        less = joining.saved_bytes(producer, consumer)
        sizes = flow.bytes_per_sample - less[0], flow.gradient_bytes_per_sample - less[1]
        teams, others = sending.teams, receiving.teams
        alike: dict[tuple[float, Level], tuple[float, ...]] = {}
        for sender, receiver, samples in meetings(sending, receiving):
            pair = starts[producer] + sender, starts[consumer] + receiver
            if teams[sender] == others[receiver]:
                continue
            key = samples.rows, _widest_lane(costs, teams[sender], others[receiver])
            if key not in alike:
                rows = costs.message_bytes(samples, candidate.micro_batch_size, 1)
                rows = rows if lanes == 1 else ceil(rows / lanes)
                alike[key] = tuple(costs.links.message_s(rows * size, key[1]) for size in sizes)
            times.message_s[pair] = alike[key][0]
            if flow.gradients:
                times.message_s[pair[::-1]] = alike[key][1]
            if samples.period > 1:
                times.turns[pair] = times.turns[pair[::-1]] = samples.first, samples.period


def _widest_lane(costs: CostModel, team: Sequence[int], other: Sequence[int]) -> Level:
    """Return the level of the lane that is the farthest from one team to another."""
    pair = costs.links.topology.pair
    if len(team) == len(other) == 1:
        return pair(*team, *other)
    lanes = range(max(len(team), len(other)))
    levels = {pair(team[at % len(team)], other[at % len(other)]) for at in lanes}
    return max(levels, key=LEVELS.index)
