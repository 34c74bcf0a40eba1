"""Wave: all stages simulated at once, where some replicas of a stage are always its last; for long chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from autopar.planner.candidate import Candidate
from autopar.planner.costs.durations import Durations

Numbers = npt.NDArray[np.float64]
Holders = Sequence[tuple[int, ...]]
ABSENT_S = float("-inf")
"""Seconds of a message that is never sent: who would receive it waits for nothing."""
SLIVER = 1e-6
"""Share of a micro-batch that is rounding, where its rows divide freely."""
FEW_STAGES = 24
"""Up to so many, numbers are quicker one by one than arrays of them."""
ROUNDING = 1e-13
"""Share of a backward and its reduction that is rounding."""


@dataclass(frozen=True, eq=False)
class ChainTimes:
    """A chain of stages, by stage in order; every number is that of the stage's slowest replicas."""

    micro_batches: int
    overhead_s: float
    depths: tuple[int, ...]
    """Most micro-batches in flight: from 1 to ``micro_batches``, never growing from stage to stage."""
    forward_s: Numbers
    backward_s: Numbers
    activation_s: Numbers
    """Of the message from stage s to s + 1, shape (stages - 1,); :data:`ABSENT_S` where there is none."""
    gradient_s: Numbers
    """Of the message from stage s + 1 back to s."""
    exposed_s: Numbers
    """From the end of a stage's last backward to the end of its reduction."""
    update_s: Numbers
    tied_reductions: tuple[tuple[tuple[int, ...], float], ...] = ()
    """(stages, seconds) of every parameter shared between stages, in the program's order."""


def simulate_chain(wave: ChainTimes) -> float:
    """Return the seconds of one step: those that :func:`.simulate.run` gives the expanded program.

    A stage of depth k runs B(m) behind F(m + k - 1), and F(m) behind B(m - k). So turn t takes the forward of
    micro-batch t through all stages, and then, on every stage, the backward of micro-batch t - k + 1: neighbours of
    equal depth hand each other the same one in the same turn, a shallower one behind has run it in an earlier turn.

    >>> even, free = np.ones(3), np.zeros(2)
    >>> simulate_chain(ChainTimes(4, 0.0, (3, 2, 1), even, 2 * even, free, free, 0 * even, 0 * even))
    18.0
    """
    state = _ShortChainState(wave) if len(wave.depths) <= FEW_STAGES else _ChainState(wave)
    for turn in range(wave.micro_batches + wave.depths[0] - 1):
        if turn < wave.micro_batches:
            state.forward()
        state.backward(turn)
    clock = np.array(state.clock) + wave.exposed_s
    for holders, seconds in wave.tied_reductions:
        members = list(holders)
        clock[members] = clock[members].max() + seconds
    return float((clock + wave.update_s).max())


class _MaxPlusChain:
    """Solves ends[s] = max(ends[s], ends[s - 1] + links[s]) for all s at once.

    A parallel prefix (Hillis and Steele, "Data parallel algorithms", 1986): after sweep j, whatever is fewer than 2^j
    links away has been heeded. Unlike with running sums of the links, no large numbers cancel each other.
    """

    def __init__(self, links: Numbers) -> None:
        self.sweeps: list[tuple[int, Numbers]] = []
        """(how far back, seconds from there)."""
        reach, span = 1, links
        while reach < len(links) and np.isfinite(span[reach:]).any():
            self.sweeps.append((reach, span))
            span = np.concatenate((np.full(reach, ABSENT_S), span[reach:] + span[:-reach]))
            reach *= 2

    def solve(self, ends: Numbers, first: int = 0) -> None:
        """Solve in place; ``ends[0]`` is that of stage ``first``, which hears of none before it."""
        count = len(ends)
        for reach, span in self.sweeps:
            if reach < count:
                np.maximum(ends[reach:], ends[:-reach] + span[first + reach : first + count], out=ends[reach:])


class _ChainState:
    """What one turn leaves to the next. Backwards run from the last stage: their arrays stand in that order."""

    def __init__(self, wave: ChainTimes) -> None:
        self.clock = np.full(len(wave.depths), wave.overhead_s)
        self._forward_s, self._inward_s = wave.forward_s, np.append(ABSENT_S, wave.activation_s)
        self._chain = _MaxPlusChain(self._inward_s + self._forward_s)
        self._activation_arrival_s = np.full(len(wave.depths), ABSENT_S)
        """When the activation that a stage received last arrived."""
        self._start_backwards(wave)

    def _start_backwards(self, wave: ChainTimes) -> None:
        stages, depths = len(wave.depths), np.array(wave.depths[::-1])
        self._back_clock = self.clock[::-1]
        self._backward_s, self._returned_s = wave.backward_s[::-1], np.append(ABSENT_S, wave.gradient_s[::-1])
        lags = np.append(0, np.diff(depths))
        self._back_chain = _MaxPlusChain(np.where(lags == 0, self._returned_s + self._backward_s, ABSENT_S))
        self._gradient_arrival_s = np.full(stages, ABSENT_S)
        # Gradients are remembered for as many turns as the stage before lags behind; such stages read them by turn.
        self._kept_turns = int(lags.max()) + 1
        self._gradient_history = np.full((self._kept_turns, stages), ABSENT_S)
        self._late = np.flatnonzero(lags)
        self._late_lags = lags[self._late]
        turns = np.arange(wave.micro_batches + wave.depths[0])
        self._stop_by_turn = np.searchsorted(depths, turns + 1, side="right").tolist()
        self._first_by_turn = np.searchsorted(depths, turns + 1 - wave.micro_batches, side="right").tolist()

    def forward(self) -> None:
        """Take the next micro-batch's forward through all stages."""
        ends = np.maximum(self.clock, self._activation_arrival_s + self._inward_s) + self._forward_s
        self._chain.solve(ends)
        self._activation_arrival_s[1:] = np.maximum(ends[:-1], self._activation_arrival_s[1:]) + self._inward_s[1:]
        self.clock[:] = ends

    def backward(self, turn: int) -> None:
        """Run one backward on every stage that has one in this turn."""
        first, stop = self._first_by_turn[turn], self._stop_by_turn[turn]
        waits = self._gradient_arrival_s + self._returned_s
        waits[self._late] = self._gradient_history[(turn - self._late_lags) % self._kept_turns, self._late]
        ends = np.maximum(self._back_clock[first:stop], waits[first:stop]) + self._backward_s[first:stop]
        self._back_chain.solve(ends, first)
        self._back_clock[first:stop] = ends
        before = slice(first + 1, stop + 1)
        returned = self._gradient_arrival_s[before]
        np.maximum(returned, ends[: len(returned)], out=returned)
        returned += self._returned_s[before]
        self._gradient_history[turn % self._kept_turns, before] = returned


class _ShortChainState:
    """What :class:`_ChainState` does, number by number: the same sums in the same order."""

    def __init__(self, wave: ChainTimes) -> None:
        stages, depths = len(wave.depths), wave.depths[::-1]
        self.clock, self._last = [wave.overhead_s] * stages, stages - 1
        self._forward_s, self._inward_s = wave.forward_s.tolist(), [ABSENT_S, *wave.activation_s.tolist()]
        self._backward_s, self._returned_s = wave.backward_s[::-1].tolist(), [ABSENT_S, *wave.gradient_s[::-1].tolist()]
        self._lags = [0, *(after - before for before, after in pairwise(depths))]
        self._sweeps = _sweep_lists(np.array(self._inward_s) + wave.forward_s)
        links = np.array(self._returned_s) + wave.backward_s[::-1]
        self._back_sweeps = _sweep_lists(np.where(np.array(self._lags) == 0, links, ABSENT_S))
        self._activation_arrival_s, self._gradient_arrival_s = [ABSENT_S] * stages, [ABSENT_S] * stages
        self._gradient_history = [[ABSENT_S] * stages for _ in range(max(self._lags) + 1)]
        turns = np.arange(wave.micro_batches + depths[-1])
        self._stop_by_turn = np.searchsorted(depths, turns + 1, side="right").tolist()
        self._first_by_turn = np.searchsorted(depths, turns + 1 - wave.micro_batches, side="right").tolist()

    def forward(self) -> None:
        """Take the next micro-batch's forward through all stages."""
        clock, arrived, inward_s = self.clock, self._activation_arrival_s, self._inward_s
        for stage, own_s in enumerate(self._forward_s):
            start = arrived[stage] + inward_s[stage]
            clock[stage] = (start if start > clock[stage] else clock[stage]) + own_s
        for reach, span in self._sweeps:
            for stage in range(self._last, reach - 1, -1):
                heard = clock[stage - reach] + span[stage]
                if heard > clock[stage]:
                    clock[stage] = heard
        for stage in range(1, self._last + 1):
            sent = clock[stage - 1]
            arrived[stage] = (sent if sent > arrived[stage] else arrived[stage]) + inward_s[stage]

    def backward(self, turn: int) -> None:
        """Run one backward on every stage that has one in this turn."""
        clock, returned, last, kept = self.clock, self._gradient_arrival_s, self._last, self._gradient_history
        first, stop = self._first_by_turn[turn], self._stop_by_turn[turn]
        for at in range(first, stop):
            lag = self._lags[at]
            wait = kept[(turn - lag) % len(kept)][at] if lag else returned[at] + self._returned_s[at]
            end = clock[last - at]
            clock[last - at] = (wait if wait > end else end) + self._backward_s[at]
        for reach, span in self._back_sweeps:
            for at in range(stop - 1, first + reach - 1, -1):
                heard = clock[last - at + reach] + span[at]
                if heard > clock[last - at]:
                    clock[last - at] = heard
        own = kept[turn % len(kept)]
        for at in range(first + 1, min(stop, last) + 1):
            sent = clock[last - at + 1]
            own[at] = returned[at] = (sent if sent > returned[at] else returned[at]) + self._returned_s[at]


def _sweep_lists(links: Numbers) -> list[tuple[int, list[float]]]:
    return [(reach, span.tolist()) for reach, span in _MaxPlusChain(links).sweeps]


def applies(candidate: Candidate, times: Durations) -> bool:
    """Whether a candidate's step may be had from :func:`simulate_chain`."""
    return chain_times(candidate, times, [()] * len(times.tied_s)) is not None


def chain_times(candidate: Candidate, times: Durations, tied_stages: Holders) -> ChainTimes | None:
    """Return a candidate as a wave, or None where no replica of a stage is always the last one.

    A stage's *laggards* compute as long as its slowest replica, and wait for a message that takes as long as the
    slowest between the two stages and comes from a laggard, both of activations and of gradients. By induction over the
    program's actions, none of a stage's replicas is ever behind its laggards, which act alike: the wave is theirs. Each
    replica must take part in every micro-batch, and messages pass between neighbours only.
    """
    depths = tuple(min(stage.warmup, candidate.micro_batches) for stage in candidate.stages)
    if any(before < after for before, after in pairwise(depths)) or not _split(candidate):
        return None
    ranks = _ranks(candidate)
    messages = _messages(times, len(ranks))
    if messages is None:
        return None
    forward_s, backward_s, update_s = (
        np.array([max(column[mine.start : mine.stop]) for mine in ranks])
        for column in (times.forward_s, times.backward_s, times.update_s)
    )
    slowest = ((times.forward_s, forward_s), (times.backward_s, backward_s))
    laggards = [
        {rank for rank in mine if all(column[rank] == most[index] for column, most in slowest)}
        for index, mine in enumerate(ranks)
    ]
    exposed_s = _exposed_reduction_s(times, ranks, laggards, backward_s) if _agree(laggards, times, *messages) else None
    if exposed_s is None:
        return None
    shared = tuple(zip(tied_stages, times.tied_s, strict=True))
    columns = (forward_s, backward_s, *messages, exposed_s, update_s)
    return ChainTimes(candidate.micro_batches, times.overhead_s, depths, *columns, shared)


def _split(candidate: Candidate) -> bool:
    """Whether every replica takes a share of every micro-batch."""
    rows = candidate.micro_batch_size
    return all(abs(sum(stage.shares) - rows) <= SLIVER * rows for stage in candidate.stages)


def _ranks(candidate: Candidate) -> list[range]:
    found, start = [], 0
    for stage in candidate.stages:
        found.append(range(start, start + len(stage.devices)))
        start += len(stage.devices)
    return found


def _messages(times: Durations, stages: int) -> tuple[Numbers, Numbers] | None:
    """Return the seconds of the slowest activation and gradient across every boundary; None if some skip a stage."""
    activation_s, gradient_s = np.full(stages - 1, ABSENT_S), np.full(stages - 1, ABSENT_S)
    for (sender, receiver), seconds in times.message_s.items():
        before, after = times.stage[sender], times.stage[receiver]
        if abs(after - before) != 1:
            return None
        slowest = activation_s if after > before else gradient_s
        slowest[min(before, after)] = max(slowest[min(before, after)], seconds)
    return activation_s, gradient_s


def _agree(laggards: list[set[int]], times: Durations, activation_s: Numbers, gradient_s: Numbers) -> bool:
    """Leave only those that the slowest messages of laggards reach; return whether every stage has some."""
    senders: dict[tuple[int, int], list[int]] = {}
    """Of the slowest messages, by (receiving rank, sending stage)."""
    for (sender, receiver), seconds in times.message_s.items():
        before, after = times.stage[sender], times.stage[receiver]
        slowest = activation_s if after > before else gradient_s
        if seconds == slowest[min(before, after)]:
            senders.setdefault((receiver, before), []).append(sender)
    stages = len(laggards)
    heard = [[index - 1] if index and np.isfinite(activation_s[index - 1]) else [] for index in range(stages)]
    for index in np.flatnonzero(np.isfinite(gradient_s)).tolist():
        heard[index].append(index + 1)
    count = -1
    while count != (count := sum(map(len, laggards))):
        for index in (*range(stages), *reversed(range(stages))):
            for stage in heard[index]:
                reached = laggards[stage]
                laggards[index] = {
                    rank for rank in laggards[index] if not reached.isdisjoint(senders.get((rank, stage), ()))
                }
    return all(laggards)


def _exposed_reduction_s(
    times: Durations, ranks: Sequence[range], laggards: Sequence[set[int]], backward_s: Numbers
) -> Numbers | None:
    """Return what is left of every stage's reduction behind its laggards' last backward.

    All replicas begin it at the latest when the laggards do. None where the reduction may wait for another one, which
    computes less and whose gradients are reduced for longer.
    """
    found = np.zeros(len(ranks))
    for index, mine in enumerate(ranks):
        if len(mine) > 1:
            found[index] = max(times.exposed_s[rank] for rank in laggards[index])
            latest = max(times.backward_s[rank] + times.exposed_s[rank] for rank in mine)
            if latest > (backward_s[index] + found[index]) * (1 + ROUNDING):
                return None
    return found
