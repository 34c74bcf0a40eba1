"""Levels: all actions of a step that may be simulated at once, because none of them waits for another one.

An action's level in the graph of a program's actions is one more than the largest of what it stands behind: what its
rank did before, and what it receives. Here levels are those of whole stages, so that a formula gives them. No duration
is in them; they only say in which order numbers can be had. A forward of micro-batch m on stage s has level s + P m,
its backward has level b(s) + P m, with the least period P for which that order is every rank's own.

A message that passes stages by is often there before what these hand on: only messages that may be late are waited for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.candidate import Candidate
from autopar.planner.costs.durations import Durations

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
    turns = np.array([stage.turns(0, micro_batches) for stage in stages])
    wide = np.array([stage.turning for stage in stages])
    depths = np.minimum(turns, [stage.warmup for stage in stages])
    if candidate.schedule == "gpipe":
        depths = turns
    own, followed = np.arange(len(stages)), depths < turns

    def backward(period: int) -> Whole:
        least = 2 * own + period * wide * (depths - 1) + 1
        return np.asarray(np.maximum.accumulate(least[::-1])[::-1] - own)

    def fits(period: int) -> bool:
        return bool((backward(period) < own + period * wide * depths)[followed].all())

    # Feasible periods have no gaps, and beyond this none follows where none came before.
    most = 2 * len(stages) + 2
    period = 1 + bisect_left(range(1, most + 1), True, key=fits)
    if period > most:
        return None
    levels = backward(period)
    return ActionLevels(period, own, levels, int(levels[0]) + period * (micro_batches - 1) + 1)


def simulate_levels(candidate: Candidate, times: Durations, tied_stages: Holders, levels: ActionLevels) -> float | None:
    """Return the seconds of one step: those that :func:`.simulate.run` gives the expanded program.

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
        if len(stage.devices) > 1:
            mine = stages == index
            clock[mine] = (clock[mine] + exposed_s[mine]).max()
    for holders, seconds in zip(tied_stages, times.tied_s, strict=True):
        members = np.isin(stages, holders)
        clock[members] = clock[members].max() + seconds
    return float((clock + times.update_s).max())


class _Places(NamedTuple):
    """What is run at once: forwards and backwards of ranks, and the messages that these send."""

    own: slice
    ranks: Whole
    seconds: Numbers
    received: slice
    """Columns in which what they wait for arrives."""
    starts: Whole | None
    """Where those of every place start; None where each has one."""
    sent: slice
    sender: Whole
    """Of every message, among these places."""
    target: Whole
    length_s: Numbers
    free_s: Numbers
    """When a message's queue is free; a view of those of all messages."""


class _LevelState:
    """What one level leaves to the next.

    A place is a rank's forward or its backward; places stand in the order of (level modulo period, level), so that
    those of one level are neighbours. A message has a column, where its arrival waits, in the row of its receiver's
    level.
    """

    def __init__(self, candidate: Candidate, times: Durations, levels: ActionLevels) -> None:
        self._levels, self._last = levels, levels.period * (candidate.micro_batches - 1)
        self.clock = np.full(len(times.stage), times.overhead_s)
        stages, ranks = np.array(times.stage), np.arange(len(times.stage))
        level = np.concatenate((levels.forward[stages], levels.backward[stages]))
        order = np.lexsort((level, level % levels.period))
        self._level = level[order]
        self._ranks = np.concatenate((ranks, ranks))[order]
        self._seconds = np.array([*times.forward_s, *times.backward_s])[order]
        self._wide = np.array([stage.turning for stage in candidate.stages])[stages][self._ranks]
        self._turn = (ranks - np.searchsorted(stages, stages))[self._ranks] % self._wide
        """Which of the replicas that take turns a place is."""
        self._turning = bool((self._wide > 1).any())
        self._wire(times, stages, np.argsort(order))

    def _wire(self, times: Durations, stages: Whole, position: Whole) -> None:
        """Give every message its column, and its place in the order of the senders."""
        places, count = len(position), len(times.message_s)
        senders, receivers = np.array(list(times.message_s), dtype=np.int64).reshape(-1, 2).T
        back = np.where(stages[senders] > stages[receivers], len(stages), 0)
        sender, receiver = position[senders + back], position[receivers + back]
        lag = self._level[receiver] - self._level[sender]
        # Who receives nothing has a column where nothing arrives.
        idle = np.setdiff1d(np.arange(places), receiver)
        columns = np.concatenate((receiver, idle))
        by_column = np.argsort(columns, kind="stable")
        self._starts = np.searchsorted(columns[by_column], np.arange(places + 1))
        self.columns, self.late = len(columns), int(lag.max(initial=0)) + 1
        by_sender = np.argsort(sender, kind="stable")
        self._sends = np.searchsorted(sender[by_sender], np.arange(places + 1))
        self._sender = sender[by_sender]
        self._target = (lag * self.columns + np.argsort(by_column)[:count])[by_sender]
        self._length_s = np.array(list(times.message_s.values()))[by_sender]
        self._free_s = np.full(count, NEVER_S)
        taken = np.array([times.turns.get(pair, (0, 1)) for pair in times.message_s]).reshape(-1, 2)[by_sender]
        self._first, self._every = taken.T

    def go(self) -> Numbers:
        """Run all levels; return when every rank ends its last backward."""
        arrivals = np.full(self.late * self.columns, NEVER_S)
        levels, period = np.arange(self._levels.total), self._levels.period
        scale = self._levels.total + 1
        keys = self._level % period * scale + self._level
        first = np.searchsorted(keys, levels % period * scale + np.maximum(levels - self._last, 0))
        stop = np.searchsorted(keys, levels % period * scale + levels, side="right")
        some = np.flatnonzero(first < stop)
        places = cache(self._places)
        for level, low, high in zip(some.tolist(), first[some].tolist(), stop[some].tolist(), strict=True):
            self._perform(level, places(low, high), arrivals)
        return self.clock

    def _places(self, low: int, high: int) -> _Places:
        """Return what all levels of the places ``low:high`` have in common."""
        starts, sent = self._starts[low : high + 1], slice(self._sends[low], self._sends[high])
        places = slice(low, high)
        received = slice(int(starts[0]), int(starts[-1]))
        own = None if len(starts) - 1 == received.stop - received.start else starts[:-1] - starts[0]
        sender, free_s = self._sender[sent] - low, self._free_s[sent]
        sends = sender, self._target[sent], self._length_s[sent], free_s
        return _Places(places, self._ranks[places], self._seconds[places], received, own, sent, *sends)

    def _perform(self, level: int, places: _Places, arrivals: Numbers) -> None:
        """Run what has this level."""
        row = level % self.late * self.columns
        waits = arrivals[row + places.received.start : row + places.received.stop]
        if places.starts is not None:
            waits = np.maximum.reduceat(waits, places.starts)
        ranks, free_s = places.ranks, places.free_s
        ends = np.maximum(self.clock.take(ranks), waits)
        ends += places.seconds
        arrives = np.maximum(free_s, ends.take(places.sender))
        arrives += places.length_s
        at = (places.target + row) % len(arrivals)
        if self._turning:
            index = (level - self._level[places.own]) // self._levels.period
            own = index % self._wide[places.own] == self._turn[places.own]
            carried = index[places.sender] % self._every[places.sent] == self._first[places.sent]
            ranks, ends = ranks[own], ends[own]
            free_s[:] = np.where(carried, arrives, free_s)
            arrives = np.where(carried, arrives, NEVER_S)
        else:
            free_s[:] = arrives
        self.clock[ranks] = ends
        arrivals[at] = arrives


def drop_covered_messages(candidate: Candidate, times: Durations) -> Durations:
    """Return durations without the messages that no action ever waits for; the step takes as long without them.

    Let stage p send to c > p + 1, and every stage between to the next one. A row of the message is computed by one
    replica of each stage, so it also comes to its receiver step by step: at the earliest

        path = the seconds of all messages between + the forwards of the stages between

    after the forward on p. The j-th micro-batch from there on comes j x pace later at the earliest, if pace is the
    longest of these messages and of these forwards, the one on p included: each rank and each queue takes one after
    the other. The direct message comes at most its seconds after that forward, and j times as much later if it had to
    queue. Hence it is there in time if its seconds exceed neither path nor pace. Gradients likewise, from c back to p.

    Of replicas and messages of unequal seconds, the shortest count. Where replicas of some stage take turns, all
    messages stay.
    """
    stages = times.stage
    skipping = {pair for pair in times.message_s if abs(stages[pair[0]] - stages[pair[1]]) > 1}
    if not skipping or any(stage.division == "round-robin" for stage in candidate.stages):
        return times
    least_s = _least_s(times, times.forward_s, 1) | _least_s(times, times.backward_s, -1)
    kept = {
        pair: seconds
        for pair, seconds in times.message_s.items()
        if pair not in skipping or seconds > least_s.get((stages[pair[0]], stages[pair[1]]), NEVER_S)
    }
    return replace(times, message_s=kept)


def _least_s(times: Durations, compute_s: Sequence[float], step: int) -> dict[tuple[int, int], float]:
    """Return the smaller of path and pace in one direction, by (sending stage, receiving stage); no path: no entry."""
    own_s: dict[int, float] = {}
    for stage, seconds in zip(times.stage, compute_s, strict=True):
        own_s[stage] = min(own_s.get(stage, seconds), seconds)
    hand_s: dict[int, float] = {}
    """By sending stage, of those that some neighbour sends to."""
    for (sender, receiver), seconds in times.message_s.items():
        stage = times.stage[sender]
        if times.stage[receiver] == stage + step:
            hand_s[stage] = min(hand_s.get(stage, seconds), seconds)
    found = {}
    for first in hand_s:
        path, pace, stage = 0.0, 0.0, first
        while stage in hand_s:
            path += hand_s[stage] + (0.0 if stage == first else own_s[stage])
            pace = max(pace, hand_s[stage], own_s[stage])
            stage += step
            found[first, stage] = min(path, pace)
    return found
