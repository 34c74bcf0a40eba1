"""Simulate: interpret a program with durations; the planner's judge, and the predicted timeline."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import NamedTuple

from autopar.formats.plan import Crossing, Plan, SharedParameter, Stage
from autopar.formats.program import Program
from autopar.formats.timeline import Timeline
from autopar.planner.candidate import Candidate, groups, has_chunks, plain
from autopar.planner.costs.communication import Sharing, Traffic
from autopar.planner.costs.model import CostModel, Durations, durations
from autopar.planner.simulator.contention import ContentionSimulation
from autopar.planner.simulator.levels import action_levels, drop_covered_messages, simulate_levels
from autopar.planner.simulator.rows import Lanes, Rows, compile_rows, rows_of
from autopar.progress import Progress, no_progress

# Microseconds of one core: only their ratios matter, and only to which simulator is asked.
COST_ACTION, COST_LEVEL = 0.65, 8.0
COST_BEFORE = 250.0
"""Of laying out what is simulated at once."""
MOST_KEPT = 2**21
"""Actions of expanded programs that are kept, some hundred bytes each."""


def run(rows: Rows, times: Durations, traffic: Traffic | None = None) -> float:
    """Return the seconds of one step.

    A rank performs its actions in order. The messages of an ordered pair of ranks form one queue, which a message
    occupies for its transfer; a send occupies its queue and not its rank; a receive waits for its message. With
    ``traffic``, transfers share ports, and computing and communicating slow each other.
    """
    return ContentionSimulation(rows, times, traffic).go()


def trace(program: Program, times: Durations, traffic: Traffic | None = None, shift: int = 0) -> Timeline:
    """Return the timeline of one step, or of many mini-batches that follow each other without a flush.

    Args:
        program: of all of it.
        times: its durations.
        traffic: as of :func:`run`.
        shift: micro-batches of a mini-batch, where there are many of them; else 0.
    """
    simulation = ContentionSimulation(compile_rows(program, times), times, traffic, tracing=True, shift=shift)
    simulation.go()
    timeline = Timeline("simulated")
    for rank, (actions, spans) in enumerate(zip(program.ranks, simulation.spans or (), strict=True)):
        for action, (start, end) in zip(actions, spans, strict=True):
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
            tied_stages = [holders for _, holders in self.costs.tied_between(candidate.stages)]
            laid = _CandidateSetup(times, needed, tied_stages, self._traffic(candidate, times, tied_stages))
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
        return run(self.rows_of(candidate, pairs), times)

    def _at_once(self, candidate: Candidate, times: Durations, tied_stages: Sequence[tuple[int, ...]]) -> float | None:
        """Simulate many actions at once; None where one by one is quicker."""
        count, stages = candidate.micro_batches, candidate.stages
        # Twice a forward for a backward, and a send for a receive; replicas in turn do so many among them.
        taken = sum(1 / times.turns[pair][1] if pair in times.turns else 1 for pair in times.message_s)
        computed = sum(len(stage.devices) if stage.division == "split" else 1 for stage in stages)
        spare = COST_ACTION * 2 * count * (computed + taken) - COST_BEFORE
        levels = action_levels(candidate) if COST_LEVEL * 2 * count < spare else None
        # Levels without actions cost nothing.
        if levels is not None and COST_LEVEL * min(levels.total, 2 * count * len(stages)) < spare:
            return simulate_levels(candidate, times, tied_stages, levels)
        return None

    def _traffic(
        self, candidate: Candidate, times: Durations, tied_stages: Sequence[tuple[int, ...]]
    ) -> Traffic | None:
        """Return where a candidate's ranks stand, if anything can slow them there."""
        if not self.sharing:
            return None
        traffic = Traffic(self.sharing, tuple(dict.fromkeys(candidate.devices)))
        places = list(zip(times.ranks, times.stage, strict=True))
        tied = [sorted({rank for rank, stage in places if stage in holders}) for holders in tied_stages]
        return traffic if Lanes(times, traffic, tied).lanes else None

    def rows_of(self, candidate: Candidate, pairs: Container[tuple[int, int]] | None = None) -> Rows:
        """Return a candidate's program, of messages between ``pairs`` of stages only."""
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
