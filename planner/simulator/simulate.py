"""Simulate: interpret a program with durations; the planner's judge, and the predicted timeline.

Many actions may be simulated at once that have the same level, because none of them waits for another one. An action's
level in the graph of a program's actions is one more than the largest of what it stands behind: what its rank did
before, and what it receives. Here levels are those of whole stages, so that a formula gives them. No duration is in
them; they only say in which order numbers can be had. A forward of micro-batch m on stage s has level s + P m, its
backward has level b(s) + P m, with the least period P for which that order is every rank's own.

A pipeline that is never flushed is simulated from its fill to its drain; its period is what lies in between.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.formats.plan import Plan
from autopar.formats.program import BACKWARD, FORWARD, UPDATE, Action, Program
from autopar.formats.stage import Crossing, SharedParameter, Stage
from autopar.formats.timeline import Timeline
from autopar.planner.candidate import Candidate, groups, has_chunks, plain
from autopar.planner.costs.communication import Sharing
from autopar.planner.costs.durations import Durations, durations
from autopar.planner.costs.model import CostModel
from autopar.planner.simulator.contention import ContentionSimulation
from autopar.planner.simulator.rows import Lanes, Rows, compile_rows, rows_of
from autopar.progress import Progress, Retold, no_progress
from autopar.schedules.expand import expand
from autopar.schedules.repetition import filling, written_out

Numbers = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
Holders = Sequence[tuple[int, ...]]
NEVER_S = float("-inf")
"""When a message arrives that is not sent: who would receive it waits for nothing."""
SCHEDULES = ("1f1b", "gpipe")
"""Schedules in which F(m) stands behind B(m - k) on a rank, and B(m) behind F(m + k - 1)."""
MOST_LATE = 2**23
"""Arrivals kept until they are read, of eight bytes; steps of more are simulated action by action."""


class ActionLevels(NamedTuple):
    """The levels of all stages."""

    period: int
    """Levels from one micro-batch's to the next one's."""
    forward: Whole
    """By stage, the level of the first micro-batch's forward."""
    backward: Whole
    """By stage, that of its backward; falls from stage to stage."""
    total: int


def action_levels(candidate: Candidate) -> ActionLevels | None:
    """Return the levels of a candidate's program; None of a schedule or depths that have none.

    With k in flight on each of r replicas that take turns (r = 1 where they split), b(s) lies in

        s + P r (k - 1)  <  b(s)  <  s + P r k

    the right side only where some micro-batches come after the k first; and b(s) > b(s + 1).

    >>> from autopar.planner.candidate import CandidateStage
    >>> stages = tuple(CandidateStage(at, at + 1, (at,), (1,), 3 - at) for at in range(3))
    >>> found = action_levels(Candidate(4, 1, "1f1b", stages))
    >>> found.period, found.forward.tolist(), found.backward.tolist(), found.total
    (2, [0, 1, 2], [5, 4, 3], 12)
    """
    if candidate.schedule not in SCHEDULES:
        return None
    micro_batches, stages = candidate.micro_batches, candidate.stages
    turns = np.array([stage.replicas.most(micro_batches) for stage in stages])
    wide = np.array([stage.period for stage in stages])
    depths = turns if candidate.schedule == "gpipe" else np.minimum(turns, [stage.warmup for stage in stages])
    own, followed = np.arange(len(stages)), depths < turns

    def fits(period: int) -> bool:
        levels = _backward_levels(own, wide, depths, period)
        return bool((levels < own + period * wide * depths)[followed].all())

    # Feasible periods have no gaps, and beyond this none follows where none came before.
    most = 2 * len(stages) + 2
    period = 1 + bisect_left(range(1, most + 1), True, key=fits)
    if period > most:
        return None
    levels = _backward_levels(own, wide, depths, period)
    return ActionLevels(period, own, levels, int(levels[0]) + period * (micro_batches - 1) + 1)


def _backward_levels(forward: Whole, wide: Whole, depths: Whole, period: int) -> Whole:
    """Return the least levels of the first micro-batch's backwards, by stage; ``forward`` are those of its forwards."""
    least = 2 * forward + period * wide * (depths - 1) + 1
    return np.asarray(np.maximum.accumulate(least[::-1])[::-1] - forward)


def simulate_levels(candidate: Candidate, times: Durations, tied_stages: Holders, levels: ActionLevels) -> float | None:
    """Return the seconds of one step: those that :func:`run` gives the expanded program.

    ``tied_stages`` are the stages of every parameter shared between stages. None where arrivals would be kept for too
    long.
    """
    state = _LevelState(candidate, times, levels)
    if state.late * state.columns > MOST_LATE:
        return None
    clock = state.go()
    stages = np.array(times.stage)
    exposed_s = np.array(times.exposed_s)
    for index, stage in enumerate(candidate.stages):
        if stage.replicas.width > 1:
            mine = stages == index
            clock[mine] = (clock[mine] + exposed_s[mine]).max()
    for holders, seconds in zip(tied_stages, times.tied_s, strict=True):
        members = np.isin(stages, holders)
        clock[members] = clock[members].max() + seconds
    return float((clock + times.update_s).max())


class _LevelActions(NamedTuple):
    """Forwards and backwards of ranks that are run at once, and the messages that these send."""

    ranks: Whole
    seconds: Numbers
    arrival_columns: slice | Whole
    """Columns in which what they wait for arrives."""
    starts: Whole | None
    """Where those of every action start; None where each has one."""
    messages: slice | Whole
    """Messages."""
    sender: Whole
    """Of every message, among these actions."""
    target: Whole
    """How many columns from the first one of this level's row its arrival waits."""
    length_s: Numbers


class _LevelState:
    """What one level leaves to the next.

    A place is a rank's forward or its backward; places stand in the order of (level modulo period, level), so that
    those of one level are neighbours. A message has a column, where its arrival waits, in the row of its receiver's
    level; there are as many rows as arrivals may wait levels, used in turn.
    """

    def __init__(self, candidate: Candidate, times: Durations, levels: ActionLevels) -> None:
        self._levels, self._count = levels, candidate.micro_batches
        self.clock = np.full(len(times.stage), times.overhead_s)
        stages, ranks = np.array(times.stage), np.arange(len(times.stage))
        level = np.concatenate((levels.forward[stages], levels.backward[stages]))
        order = np.lexsort((level, level % levels.period))
        self._level = level[order]
        self._ranks = np.concatenate((ranks, ranks))[order]
        self._seconds = np.array([*times.forward_s, *times.backward_s])[order]
        self._wide = np.array([stage.period for stage in candidate.stages])[stages][self._ranks]
        self._turn = (ranks - np.searchsorted(stages, stages))[self._ranks] % self._wide
        """Which of the replicas that take turns a place is."""
        self._wire(times, stages, np.argsort(order))

    def _wire(self, times: Durations, stages: Whole, position: Whole) -> None:
        """Give every message its column, and its place in the order of the senders."""
        places, count = len(position), len(times.message_s)
        senders, receivers = np.array(list(times.message_s), dtype=np.int64).reshape(-1, 2).T
        back = np.where(stages[senders] > stages[receivers], len(stages), 0)
        sender, receiver = position[senders + back], position[receivers + back]
        lag = self._level[receiver] - self._level[sender]
        # Who receives nothing has a column where nothing arrives.
        self._idle = np.setdiff1d(np.arange(places), receiver)
        columns = np.concatenate((receiver, self._idle))
        by_column = np.argsort(columns, kind="stable")
        column = np.argsort(by_column)
        self._starts = np.searchsorted(columns[by_column], np.arange(places + 1))
        self.columns, self.late = len(columns), int(lag.max(initial=0)) + 1
        by_sender = np.argsort(sender, kind="stable")
        self._sends = np.searchsorted(sender[by_sender], np.arange(places + 1))
        self._sender, self._receiver = sender[by_sender], receiver[by_sender]
        self._column, self._idle_column = column[:count][by_sender], column[count:]
        self._target = lag[by_sender] * self.columns + self._column
        self._length_s = np.array(list(times.message_s.values()))[by_sender]
        self._free_s = np.full(count, NEVER_S)
        taken = np.array([times.turns.get(pair, (0, 1)) for pair in times.message_s], dtype=np.int64)
        self._first, self._every = taken.reshape(-1, 2)[by_sender].T

    def go(self) -> Numbers:
        """Run all levels; return when every rank ends its last backward."""
        arrivals = np.full(self.late * self.columns, NEVER_S)
        for level, actions in self._in_turn() if (self._wide > 1).any() else self._all_alike():
            self._perform(level, actions, arrivals)
        return self.clock

    def _all_alike(self) -> Iterator[tuple[int, _LevelActions]]:
        """Yield the levels of ranks that all take part in every micro-batch: many have the same places."""
        levels, period = np.arange(self._levels.total), self._levels.period
        scale = self._levels.total + 1
        keys = self._level % period * scale + self._level
        last = levels - period * (self._count - 1)
        first = np.searchsorted(keys, levels % period * scale + np.maximum(last, 0))
        stop = np.searchsorted(keys, levels % period * scale + levels, side="right")
        some = np.flatnonzero(first < stop)
        actions = cache(self._actions)
        for level, low, high in zip(some.tolist(), first[some].tolist(), stop[some].tolist(), strict=True):
            yield level, actions(low, high)

    def _actions(self, low: int, high: int) -> _LevelActions:
        """Return what levels of the places ``low:high`` run."""
        starts, sent = self._starts[low : high + 1], slice(self._sends[low], self._sends[high])
        received = slice(int(starts[0]), int(starts[-1]))
        own = None if len(starts) - 1 == received.stop - received.start else starts[:-1] - starts[0]
        sends = sent, self._sender[sent] - low, self._target[sent], self._length_s[sent]
        return _LevelActions(self._ranks[low:high], self._seconds[low:high], received, own, *sends)

    def _in_turn(self) -> Iterator[tuple[int, _LevelActions]]:
        """Yield the levels where replicas take turns: the actions of all are laid out at once."""
        period, places = self._levels.period, len(self._level)
        place, index = _turns_taken(self._turn, self._wide, self._count)
        level = self._level[place] + period * index
        order = np.lexsort((place, level))
        place, index, level = place[order], index[order], level[order]
        every, first = np.unique(level, return_index=True)
        stop = np.append(first[1:], len(place))
        # Which action of its level each is, by place and micro-batch.
        which = np.empty((places, self._count), dtype=np.int64)
        which[place, index] = np.arange(len(place)) - np.repeat(first, stop - first)
        sent, carried = _turns_taken(self._first, self._every, self._count)
        sent_level = self._level[self._sender[sent]] + period * carried
        order = np.argsort(sent_level, kind="stable")
        sender, message = which[self._sender[sent], carried][order], sent[order]
        sends = np.searchsorted(sent_level[order], np.append(every, every[-1] + 1))
        column, starts = self._read_in_turn(place, level, sent, carried)
        reads = np.append(starts[first], len(column))
        ranks, seconds = self._ranks[place], self._seconds[place]
        target, length_s = self._target[message], self._length_s[message]
        bounds = (each.tolist() for each in (every, first, stop, sends[:-1], sends[1:], reads[:-1], reads[1:]))
        for number, low, high, out, last_out, into, last_into in zip(*bounds, strict=True):
            mine, own = slice(low, high), slice(out, last_out)
            begun = None if high - low == last_into - into else starts[mine] - into
            outgoing = message[own], sender[own], target[own], length_s[own]
            yield number, _LevelActions(ranks[mine], seconds[mine], column[into:last_into], begun, *outgoing)

    def _read_in_turn(self, place: Whole, level: Whole, messages: Whole, numbers: Whole) -> tuple[Whole, Whole]:
        """Return the columns that actions read, in their order, and where those of each start.

        ``place`` and ``level`` are those of the actions; of every message and the micro-batches that it carries,
        ``messages`` and ``numbers``.
        """
        idle = np.flatnonzero(np.isin(place, self._idle))
        receiver, where = self._receiver[messages], self._idle_column[np.searchsorted(self._idle, place[idle])]
        came = np.append(self._level[receiver] + self._levels.period * numbers, level[idle])
        keys = came * len(self._level) + np.append(receiver, place[idle])
        order = np.argsort(keys, kind="stable")
        column = np.append(self._column[messages], where)[order]
        return column, np.searchsorted(keys[order], level * len(self._level) + place)

    def _perform(self, level: int, actions: _LevelActions, arrivals: Numbers) -> None:
        """Run what has this level."""
        row = level % self.late * self.columns
        waits = arrivals[row : row + self.columns][actions.arrival_columns]
        if actions.starts is not None:
            waits = np.maximum.reduceat(waits, actions.starts)
        ends = np.maximum(self.clock.take(actions.ranks), waits)
        ends += actions.seconds
        arrives = np.maximum(self._free_s[actions.messages], ends.take(actions.sender))
        arrives += actions.length_s
        self.clock[actions.ranks] = ends
        self._free_s[actions.messages] = arrives
        arrivals[(actions.target + row) % len(arrivals)] = arrives


def _turns_taken(first: Whole, every: Whole, count: int) -> tuple[Whole, Whole]:
    """Return who takes which of ``count`` micro-batches: each from a first one on, every so many.

    >>> which, turn = _turns_taken(np.array([0, 1]), np.array([2, 3]), 5)
    >>> which.tolist(), turn.tolist()
    ([0, 0, 0, 1, 1], [0, 2, 4, 1, 4])
    """
    counts = np.maximum(0, -(-(count - first) // every))
    which = np.repeat(np.arange(len(first)), counts)
    turn = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return which, first[which] + every[which] * turn


# Microseconds of one core: only their ratios matter, and only to which simulator is asked.
COST_ACTION, COST_LEVEL = 0.65, 8.0
COST_BEFORE = 250.0
"""Of laying out what is simulated at once."""
MOST_KEPT = 2**21
"""Actions of expanded programs that are kept, some hundred bytes each."""


def run(rows: Rows, times: Durations, sharing: Sharing | None = None) -> float:
    """Return the seconds of one step.

    A rank performs its actions in order. The messages of an ordered pair of ranks form one queue, which a message
    occupies for its transfer; a send occupies its queue and not its rank; a receive waits for its message. By
    ``sharing``, whose devices are the ranks', transfers share ports, and computing and communicating slow each other.
    """
    return ContentionSimulation(rows, times, sharing).go()


def trace(program: Program, times: Durations, sharing: Sharing | None = None, shift: int = 0) -> Timeline:
    """Return the timeline of one step, or of many mini-batches that follow each other without a flush.

    Args:
        program: of all of it.
        times: its durations.
        sharing: as of :func:`run`.
        shift: micro-batches of a mini-batch, where there are many of them; else 0.
    """
    simulation = ContentionSimulation(compile_rows(program, times), times, sharing, tracing=True, shift=shift)
    simulation.go()
    timeline = Timeline("simulated")
    for rank, (actions, spans) in enumerate(zip(program.ranks, simulation.spans or (), strict=True)):
        for action, (start, end) in zip(actions, spans, strict=True):
            timeline.add(rank, action, start, end)
    return timeline


def trace_plan(plan: Plan, program: Program, times: Durations, sharing: Sharing) -> Timeline:
    """Return a plan's timeline, of which all ranks of a team have the same."""
    if not times.teams:
        return trace_repetitions(plan, program, times, sharing)
    together = by_teams(plan)
    found = trace_repetitions(together, expand(together), times, sharing)
    return of_every_rank(found, written_out(program, plan, mini_batches(plan)), times.teams)


def by_teams(plan: Plan) -> Plan:
    """Return a plan with one device in place of each team, whose ranks go as one."""
    each = (
        stage.model_copy(
            update={
                "devices": stage.devices[:: stage.tensor_parallel],
                "tensor_parallel": 1,
                "cuts": (),
                "sequence": (),
            }
        )
        for stage in plan.stages
    )
    return plan.model_copy(update={"stages": tuple(each)})


def of_every_rank(timeline: Timeline, program: Program, teams: Sequence[Sequence[int]]) -> Timeline:
    """Return a timeline of teams as one of all their ranks, whose actions ``program`` has."""
    own = {rank: at for at, team in enumerate(teams) for rank in team}
    spans = defaultdict[tuple[int, Action], list[tuple[float, float]]](list)
    for event in timeline:
        # Of several mini-batches, updates and reductions are alike.
        spans[event.rank, event.action].append((event.start_s, event.end_s))
    found = Timeline(timeline.origin)
    for rank, actions in enumerate(program.ranks):
        begun = Counter[Action]()
        for action in actions:
            together = action if action.peer < 0 else action._replace(peer=own[action.peer])
            found.add(rank, action, *spans[own[rank], together][begun[action]])
            begun[action] += 1
    return found


class _CandidateSetup(NamedTuple):
    """What of a candidate does not depend on depths."""

    times: Durations
    tied_stages: list[tuple[int, ...]]
    """The stages of every shared parameter."""
    sharing: Sharing | None
    """Of its ranks, if anything can slow them there."""


class Simulator:
    """Simulates candidates; programs that differ in their layers only are expanded once.

    Large ones need no program: many actions are simulated at once, wherever that is quicker. Where devices share links,
    or computing and communicating slow each other, a program is interpreted event by event.
    """

    def __init__(self, costs: CostModel, sharing: Sharing | None = None, progress: Progress = no_progress) -> None:
        """Judge by a cost model; ``sharing`` takes the place of what its cluster says of shared links and overlap."""
        self.costs = costs
        self.progress = Retold(progress)
        """For whoever searches with this simulator to say how far they are; told again with every candidate."""
        self.sharing = costs.sharing if sharing is None else sharing
        self._rows: dict[object, Rows] = {}
        self._action_count = 0
        self._latest: tuple[Candidate, _CandidateSetup] | None = None

    def priced_by(self, costs: CostModel) -> Simulator:
        """Return the simulator of other prices of the same layers; what was expanded serves both."""
        other = copy(self)
        other.costs, other._latest = costs, None
        return other

    def step_s(self, candidate: Candidate, below_s: float = math.inf) -> float:
        """Return a candidate's seconds per step.

        Where they are not below ``below_s``, a lower bound may be returned that is not, either: contention never
        shortens a step, and what nothing slows is soon simulated.
        """
        self.progress.again()
        setup = self._setup_of(candidate)
        if setup.sharing is None or below_s < math.inf:
            alone_s = self._alone_s(candidate, setup)
            if setup.sharing is None or alone_s >= below_s:
                return alone_s
        return run(self.rows_of(candidate), setup.times, setup.sharing)

    def _setup_of(self, candidate: Candidate) -> _CandidateSetup:
        """Return what candidates that differ in depths have in common; the last one is remembered."""
        stages = tuple(stage._replace(warmup=0) for stage in candidate.stages)
        key = candidate._replace(stages=stages)
        if self._latest is None or self._latest[0] != key:
            times = durations(self.costs, candidate)
            tied_stages = [holders for _, holders in self.costs.tied_between(candidate.stages)]
            self._latest = key, _CandidateSetup(times, tied_stages, self._shared(candidate, times, tied_stages))
        return self._latest[1]

    def _alone_s(self, candidate: Candidate, setup: _CandidateSetup) -> float:
        """Return the seconds of a step that nothing slows."""
        step_s = self._at_once(candidate, setup.times, setup.tied_stages) if plain(candidate.schedule) else None
        return run(self.rows_of(candidate), setup.times) if step_s is None else step_s

    def _at_once(self, candidate: Candidate, times: Durations, tied_stages: Sequence[tuple[int, ...]]) -> float | None:
        """Simulate many actions at once; None where one by one is quicker."""
        count, stages = candidate.micro_batches, candidate.stages
        # Twice a forward for a backward, and a send for a receive; replicas in turn do so many among them.
        taken = sum(1 / times.turns[pair][1] if pair in times.turns else 1 for pair in times.message_s)
        computed = sum(stage.replicas.width // stage.period for stage in stages)
        spare = COST_ACTION * 2 * count * (computed + taken) - COST_BEFORE
        levels = action_levels(candidate) if COST_LEVEL * 2 * count < spare else None
        # Levels without actions cost nothing.
        if levels is not None and COST_LEVEL * min(levels.total, 2 * count * len(stages)) < spare:
            return simulate_levels(candidate, times, tied_stages, levels)
        return None

    def _shared(self, candidate: Candidate, times: Durations, tied_stages: Holders) -> Sharing | None:
        """Return what a candidate's ranks share, if anything can slow them there."""
        if not self.sharing:
            return None
        sharing = self.sharing.among(candidate.used_devices)
        places = list(zip(times.ranks, times.stage, strict=True))
        tied = [sorted({rank for rank, stage in places if stage in holders}) for holders in tied_stages]
        return sharing if Lanes(times, sharing, tied).lanes else None

    def rows_of(self, candidate: Candidate) -> Rows:
        """Return a candidate's program."""
        stages, (flows, tied) = candidate.stages, _exchanges(self.costs, candidate)
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
    """Return a candidate as a plan with one tensor per pair of stages; a message bundles its tensors anyway.

    A team is one device: its ranks go as one.
    """
    return Plan.model_construct(
        schedule=candidate.schedule,
        micro_batches=candidate.micro_batches,
        micro_batch_size=candidate.micro_batch_size,
        stages=tuple(
            Stage.model_construct(
                devices=stage.firsts, shares=stage.shares, warmup=stage.warmup, division=stage.division
            )
            for stage in candidate.stages
        ),
        tensors=tuple(
            Crossing.model_construct(producer=producer, consumers=(consumer,), gradient=gradient)
            for producer, consumer, gradient in flows
        ),
        tied=tuple(SharedParameter.model_construct(stages=holders) for holders in tied_stages),
    )


def outline(costs: CostModel, candidate: Candidate) -> Plan:
    """Return :func:`skeleton` with everything that the stages of a candidate send, and share."""
    return skeleton(candidate, *_exchanges(costs, candidate))


def _exchanges(costs: CostModel, candidate: Candidate) -> tuple[Sequence[tuple[int, int, bool]], Holders]:
    """Return what stages send each other, as :func:`skeleton` takes it, and those that share each parameter."""
    every = costs.flows.exchanges(candidate.cuts)
    flows = tuple((producer, consumer, flow.gradients > 0) for producer, consumer, flow in every)
    return flows, tuple(holders for _, holders in costs.tied_between(candidate.stages))


CYCLE = 12
"""Mini-batches that the period is the mean of, at least; what repeats after 2, 3, 4 or 6 of them is met."""


class PipelineTimes(NamedTuple):
    """How a pipeline that is never flushed goes on."""

    period_s: float
    """From one mini-batch to the next, once it is filled."""
    fill_s: float
    """From the beginning to the first backward of the last stage."""
    drain_s: float
    """From the end of the first stage's last forward to the end."""


def cycle(plan: Plan) -> int:
    """Return how many mini-batches the period of a plan is the mean of: whole repetitions."""
    return -(-CYCLE // plan.span) * plan.span


def mini_batches(plan: Plan) -> int:
    """Return how many mini-batches are simulated: the pipeline fills, goes on for two cycles, and drains; or a step."""
    every = range(filling(plan) - plan.span + 2 * cycle(plan))
    return len(next(plan.policy.between_drains(every)))


def trace_repetitions(plan: Plan, program: Program, times: Durations, sharing: Sharing | None = None) -> Timeline:
    """Return the timeline of a pipeline from its fill to its drain, or of a step; micro-batches count through."""
    written = written_out(program, plan, mini_batches(plan))
    return trace(written, times_of_repetitions(plan, times), sharing, plan.policy.shift(plan.micro_batches))


def times_of_repetitions(plan: Plan, times: Durations) -> Durations:
    """Return durations of which every update takes what a step takes beside its actions, where there is no flush."""
    if not plan.lead:
        return times
    update_s = [seconds + times.overhead_s for seconds in times.update_s]
    return replace(times, overhead_s=0.0, update_s=update_s, prepare_s=times.update_s)


def pipeline_times(timeline: Timeline, plan: Plan) -> PipelineTimes:
    """Return the period, fill and drain of what :func:`trace_repetitions` has made of it."""
    last_stage, updates = len(plan.stages) - 1, defaultdict[tuple[int, int], list[float]](list)
    for event in timeline:
        if event.action.kind == UPDATE:
            updates[event.action.stage, event.rank].append(event.end_s)
    # Behind it, the first stage has fewer forwards than a full pipeline's. Without gradients that go back, a stage may
    # be faster than those behind it for as long as there are samples: the slowest sets the pace.
    ended, several = mini_batches(plan) - plan.lead, cycle(plan)
    period_s = 0.0
    for (stage, _), ends in updates.items():
        ends.sort()
        period = plan.stages[stage].period
        cycle_s = ends[ended // period - 1] - ends[(ended - several) // period - 1]
        period_s = max(period_s, cycle_s / several)
    places = [(event.action.kind, event.action.stage, event) for event in timeline]
    fill_s = min(event.start_s for kind, stage, event in places if (kind, stage) == (BACKWARD, last_stage))
    drained_s = max(event.end_s for kind, stage, event in places if (kind, stage) == (FORWARD, 0))
    return PipelineTimes(period_s, fill_s, timeline.end_s - drained_s)
