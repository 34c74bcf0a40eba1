"""Simulate: interpret a program with durations; the planner's judge, and the predicted timeline."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import NamedTuple

from autopar.formats.plan import Crossing, Plan, SharedParameter, Stage
from autopar.formats.program import Program
from autopar.formats.timeline import Timeline
from autopar.planner.candidate import Candidate, groups, has_chunks, plain
from autopar.planner.costs.durations import Durations, durations
from autopar.planner.costs.links import Sharing, Traffic
from autopar.planner.costs.model import CostModel
from autopar.planner.simulator.beats import action_levels, drop_covered_messages, simulate_levels
from autopar.planner.simulator.contention import ContentionSimulation
from autopar.planner.simulator.rows import (
    BACKWARD_CODE,
    FORWARD_CODE,
    INPUT_CODE,
    LAST,
    RECEIVES,
    REDUCE_CODE,
    SENDS,
    TIED_CODE,
    UPDATE_CODE,
    WEIGHT_CODE,
    Lanes,
    Rows,
    compile_rows,
    joint_reductions,
    rows_of,
)
from autopar.planner.simulator.wave import chain_times, simulate_chain
from autopar.progress import Progress, no_progress

_NOT_BLOCKED = -1
# Microseconds of one core: only their ratios matter, and only to which simulator is asked.
COST_ACTION, COST_BEAT, COST_TURN = 0.65, 10.0, 20.0
COST_BEFORE = 250.0
"""Of laying out what is simulated at once."""
MOST_KEPT = 2**21
"""Actions of expanded programs that are kept, some hundred bytes each."""


class _Simulation:
    """State of one simulation: a list simulation, for every queue is filled by one rank in order."""

    def __init__(self, rows: Rows, times: Durations) -> None:
        self.rows, self.times, self.ranks = rows, times, times.ranks
        count = len(rows)
        self.compute_s = {
            FORWARD_CODE: times.forward_s,
            BACKWARD_CODE: times.backward_s,
            INPUT_CODE: times.input_s,
            WEIGHT_CODE: times.weight_s,
            UPDATE_CODE: times.update_s,
        }
        self.backward_end_s = [times.overhead_s] * len(times.stage)
        """The end of every replica's latest backward."""
        self.reduction_end_s = [-math.inf] * count
        """The end of every rank's latest reduction."""
        self.clock = [times.overhead_s] * count
        self.position = [0] * count
        self.free: dict[tuple[int, int], float] = {}
        self.arrivals: dict[tuple[int, int], list[float]] = {}
        self.received_counts: dict[tuple[int, int], int] = {}
        self.waits_for = [_NOT_BLOCKED] * count
        self.meetings = joint_reductions(rows, times.stage)
        self.events: list[list[tuple[float, float]]] | None = None

    def go(self) -> float:
        """Run all ranks to their ends; return the seconds of the step."""
        ready = list(range(len(self.rows) - 1, -1, -1))
        while ready:
            self._advance(ready.pop(), ready)
        stuck = [rank for rank, actions in enumerate(self.rows) if self.position[rank] < len(actions)]
        if stuck:
            raise AssertionError(f"deadlock in a program that was not checked: ranks {stuck}")
        return max(self.clock)

    def _advance(self, rank: int, ready: list[int]) -> None:
        actions, clock, ranks, compute_s = self.rows[rank], self.clock[rank], self.ranks, self.compute_s
        record = None if self.events is None else self.events[rank]
        for at in range(self.position[rank], len(actions)):
            code, index, peer, own = actions[at]
            start = clock
            if code in compute_s:
                clock += compute_s[code][own]
                if code in LAST:
                    self.backward_end_s[own] = clock
            elif code in RECEIVES:
                peer = ranks[peer]
                key = (peer, rank)
                arrived, taken = self.arrivals.get(key), self.received_counts.get(key, 0)
                if arrived is None or taken == len(arrived):
                    self.waits_for[rank] = peer
                    break
                self.received_counts[key] = taken + 1
                clock = max(clock, arrived[taken])
            else:
                if code not in SENDS:
                    self.clock[rank], self.position[rank] = clock, at
                    self._meet(code, index, own, ready)
                    return
                message_s = self.times.message_s[own, peer]
                peer = ranks[peer]
                key = (rank, peer)
                start = max(clock, self.free.get(key, 0.0))
                end = self.free[key] = start + message_s
                self.arrivals.setdefault(key, []).append(end)
                if record is not None:
                    record.append((start, end))
                if self.waits_for[peer] == rank:
                    self.waits_for[peer] = _NOT_BLOCKED
                    ready.append(peer)
                continue
            if record is not None:
                record.append((start, clock))
        else:
            at = len(actions)
        self.clock[rank], self.position[rank] = clock, at

    def _meet(self, code: int, index: int, own: int, ready: list[int]) -> None:
        times, rank = self.times, self.ranks[own]
        meeting = self.meetings[code, index if code == TIED_CODE else times.stage[own]]
        come = self.clock[rank] if code == TIED_CODE else self.backward_end_s[own] + times.exposed_s[own]
        meeting.end_s = max(meeting.end_s, come)
        meeting.missing -= 1
        if meeting.missing:
            return
        length = times.reduce_s[own] if code == REDUCE_CODE else times.tied_s[index]
        # A rank's stages are reduced one after the other.
        end = meeting.end_s + length if code == TIED_CODE else max(meeting.end_s, self.reduction_end_s[rank] + length)
        for member in meeting.members:
            if self.events is not None:
                earliest = self.clock[member] if code == TIED_CODE else self._backward_start_s(member)
                self.events[member].append((min(end, max(end - length, earliest)), end))
            self.clock[member] = max(self.clock[member], end)
            if code == REDUCE_CODE:
                self.reduction_end_s[member] = end
            self.position[member] += 1
            ready.append(member)

    def _backward_start_s(self, rank: int) -> float:
        """Return when the last backward began of the stage that a rank is about to reduce."""
        own, times = self.rows[rank][self.position[rank]][3], self.times
        return self.backward_end_s[own] - (times.last_s or times.backward_s)[own]


def run(rows: Rows, times: Durations, traffic: Traffic | None = None) -> float:
    """Return the seconds of one step.

    A rank performs its actions in order. The messages of an ordered pair of ranks form one queue, which a message
    occupies for its transfer; a send occupies its queue and not its rank; a receive waits for its message. With
    ``traffic``, transfers share ports, and computing and communicating slow each other.
    """
    if traffic and traffic.sharing:
        return ContentionSimulation(rows, times, traffic).go()
    return _Simulation(rows, times).go()


def trace(program: Program, times: Durations, traffic: Traffic | None = None) -> Timeline:
    """Return the timeline of one step; ``traffic`` as of :func:`run`."""
    rows = compile_rows(program, times)
    if traffic and traffic.sharing:
        contended = ContentionSimulation(rows, times, traffic, tracing=True)
        contended.go()
        return _timeline(program, contended.spans or [])
    state = _Simulation(rows, times)
    state.events = [[] for _ in program.ranks]
    state.go()
    return _timeline(program, state.events)


def _timeline(program: Program, spans: Sequence[Sequence[tuple[float, float]]]) -> Timeline:
    timeline = Timeline("simulated")
    for rank, (actions, events) in enumerate(zip(program.ranks, spans, strict=True)):
        for action, (start, end) in zip(actions, events, strict=True):
            timeline.add(rank, action, start, end)
    return timeline


class _CandidateSetup(NamedTuple):
    """What of a candidate does not depend on depths."""

    times: Durations
    awaited_times: Durations
    """Without messages that nobody waits for."""
    tied_stages: list[tuple[int, ...]]
    """The stages of every shared parameter."""
    traffic: Traffic | None


class Simulator:
    """Simulates candidates; programs that differ in their layers only are expanded once.

    Large ones need no program: many actions are simulated at once, wherever that is quicker. Where devices share links,
    or computing and communicating slow each other, a program is interpreted event by event.
    """

    def __init__(self, costs: CostModel, sharing: Sharing | None = None, progress: Progress = no_progress) -> None:
        """Judge by a cost model; ``sharing`` takes the place of what its cluster says of shared links and overlap."""
        self.costs = costs
        self.progress = progress
        """For whoever searches with this simulator to say how far they are."""
        self.sharing = costs.sharing if sharing is None else sharing
        self._rows: dict[object, Rows] = {}
        self._action_count = 0
        self._latest: tuple[Candidate, _CandidateSetup] | None = None

    def step_s(self, candidate: Candidate, below_s: float = math.inf) -> float:
        """Return a candidate's seconds per step.

        Where they are not below ``below_s``, a lower bound may be returned that is not, either: contention never
        shortens a step, and what nothing slows is soon simulated.
        """
        laid = self._setup_of(candidate)
        if laid.traffic is None or below_s < math.inf:
            alone_s = self._alone_s(candidate, laid)
            if laid.traffic is None or alone_s >= below_s:
                return alone_s
        return run(self.rows_of(candidate), laid.times, laid.traffic)

    def _setup_of(self, candidate: Candidate) -> _CandidateSetup:
        """Return what candidates that differ in depths have in common; the last one is remembered."""
        stages = tuple(stage._replace(warmup=0) for stage in candidate.stages)
        key = candidate._replace(stages=stages)
        if self._latest is None or self._latest[0] != key:
            times = durations(self.costs, candidate)
            needed = drop_covered_messages(candidate, times) if plain(candidate.schedule) else times
            laid = _CandidateSetup(times, needed, self._tied_stages(candidate), self._traffic(candidate, times))
            self._latest = key, laid
        return self._latest[1]

    def _alone_s(self, candidate: Candidate, setup: _CandidateSetup) -> float:
        """Return the seconds of a step that nothing slows."""
        times = setup.times
        if not plain(candidate.schedule):
            return run(self.rows_of(candidate), times)
        step_s = self._at_once(candidate, setup.awaited_times, setup.tied_stages)
        if step_s is not None:
            return step_s
        pairs = {(times.stage[sender], times.stage[receiver]) for sender, receiver in setup.awaited_times.message_s}
        return run(self._rows_of(candidate, pairs), times)

    def _at_once(self, candidate: Candidate, times: Durations, tied_stages: Sequence[tuple[int, ...]]) -> float | None:
        """Simulate many actions at once; None where one by one is quicker."""
        count, stages = candidate.micro_batches, candidate.stages
        # Twice a forward for a backward, and a send for a receive; replicas in turn do so many among them.
        taken = sum(1 / times.turns[pair][1] if pair in times.turns else 1 for pair in times.message_s)
        computed = sum(len(stage.devices) if stage.division == "split" else 1 for stage in stages)
        spare = COST_ACTION * 2 * count * (computed + taken) - COST_BEFORE
        if COST_TURN * (count + stages[0].warmup) < spare:
            wave = chain_times(candidate, times, tied_stages)
            if wave is not None:
                return simulate_chain(wave)
        beats = action_levels(candidate) if COST_BEAT * 2 * count < spare else None
        # Beats without actions cost nothing.
        if beats is not None and COST_BEAT * min(beats.total, 2 * count * len(stages)) < spare:
            return simulate_levels(candidate, times, tied_stages, beats)
        return None

    def _tied_stages(self, candidate: Candidate) -> list[tuple[int, ...]]:
        return [holders for _, holders in self.costs.tied_between(candidate.stages)]

    def _traffic(self, candidate: Candidate, times: Durations) -> Traffic | None:
        """Return where a candidate's ranks stand, if anything can slow them there."""
        if not self.sharing:
            return None
        traffic = Traffic(self.sharing, tuple(dict.fromkeys(candidate.devices)))
        ranks: dict[int, list[int]] = {}
        for rank, stage in zip(times.ranks, times.stage, strict=True):
            ranks.setdefault(stage, []).append(rank)
        tied = [
            list(dict.fromkeys(rank for stage in holders for rank in ranks[stage]))
            for holders in self._tied_stages(candidate)
        ]
        return traffic if Lanes(times, traffic, tied).lanes else None

    def rows_of(self, candidate: Candidate) -> Rows:
        """Return a candidate's program."""
        return self._rows_of(candidate)

    def _rows_of(self, candidate: Candidate, pairs: Container[tuple[int, int]] | None = None) -> Rows:
        """Return a candidate's program, of messages between some pairs of stages only."""
        stages = candidate.stages
        exchanges = self.costs.flows.exchanges(candidate.cuts)
        flows = tuple(
            (producer, consumer, flow.gradients > 0)
            for producer, consumer, flow in exchanges
            if pairs is None or (producer, consumer) in pairs or (consumer, producer) in pairs
        )
        tied = tuple(holders for _, holders in self.costs.tied_between(stages))
        shape = tuple((stage.shares, stage.warmup, stage.division) for stage in stages)
        layout = groups(stages) if has_chunks(candidate.schedule) else ()
        key = (candidate.micro_batches, candidate.schedule, shape, layout, flows, tied)
        if key not in self._rows:
            rows = rows_of(skeleton(candidate, flows, tied))
            self._action_count += sum(map(len, rows))
            if self._action_count > MOST_KEPT:
                self._rows.clear()
                self._action_count = sum(map(len, rows))
            self._rows[key] = rows
        return self._rows[key]


def skeleton(
    candidate: Candidate, flows: Sequence[tuple[int, int, bool]], tied_stages: Sequence[tuple[int, ...]]
) -> Plan:
    """Return a candidate as a plan with one tensor per pair of stages; a message bundles its tensors anyway."""
    return Plan.model_construct(
        schedule=candidate.schedule,
        micro_batches=candidate.micro_batches,
        micro_batch_size=candidate.micro_batch_size,
        stages=tuple(
            Stage.model_construct(
                devices=stage.devices, shares=stage.shares, warmup=stage.warmup, division=stage.division
            )
            for stage in candidate.stages
        ),
        tensors=tuple(
            Crossing.model_construct(producer=producer, consumers=(consumer,), gradient=gradient)
            for producer, consumer, gradient in flows
        ),
        tied=tuple(SharedParameter.model_construct(stages=holders) for holders in tied_stages),
    )
