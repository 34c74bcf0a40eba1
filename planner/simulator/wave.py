"""Wave: all stages simulated at once, where some replicas of a stage are always its last; for long chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from autopar.planner.candidate import Candidate
from autopar.planner.costs.durations import Durations

Numbers = npt.NDArray[np.float64]
Holders = Sequence[tuple[int, ...]]
ABSENT_S = float("-inf")
"""Seconds of a message that is never sent: who would receive it waits for nothing."""
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
    state = _ChainState(wave)
    for turn in range(wave.micro_batches + wave.depths[0] - 1):
        if turn < wave.micro_batches:
            state.forward()
        state.backward(turn)
    clock = state.clock + wave.exposed_s
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
        stages, depths = len(wave.depths), np.array(wave.depths[::-1])
        self.clock = np.full(stages, wave.overhead_s)
        self._forward_s, self._inward_s = wave.forward_s, np.append(ABSENT_S, wave.activation_s)
        self._chain = _MaxPlusChain(self._inward_s + self._forward_s)
        self._activation_arrival_s = np.full(stages, ABSENT_S)
        """When the activation that a stage received last arrived."""
        self._back_clock = self.clock[::-1]
        self._backward_s, self._returned_s = wave.backward_s[::-1], np.append(ABSENT_S, wave.gradient_s[::-1])
        lags = np.diff(depths, prepend=depths[0])
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


def chain_times(candidate: Candidate, times: Durations, tied_stages: Holders) -> ChainTimes | None:
    """Return a candidate as a wave, or None where no replica of a stage is always the last one.

    A stage's *laggards* compute as long as its slowest replica, and wait for a message that takes as long as the
    slowest between the two stages and comes from a laggard, both of activations and of gradients. By induction over the
    program's actions, none of a stage's replicas is ever behind its laggards, which act alike: the wave is theirs. Each
    replica must take part in every micro-batch, and messages pass between neighbours only.
    """
    depths = tuple(min(stage.warmup, candidate.micro_batches) for stage in candidate.stages)
    grows = any(before < after for before, after in pairwise(depths))
    slowest_s = _slowest_messages_s(times)
    if grows or any(stage.turning > 1 for stage in candidate.stages) or any(abs(a - b) != 1 for a, b in slowest_s):
        return None
    ranks = [range(start, stop) for start, stop in pairwise(accumulate(candidate.widths, initial=0))]
    forward_s, backward_s, update_s = (
        np.array([max(column[mine.start : mine.stop]) for mine in ranks])
        for column in (times.forward_s, times.backward_s, times.update_s)
    )
    laggards = [
        {rank for rank in mine if (times.forward_s[rank], times.backward_s[rank]) == most}
        for mine, most in zip(ranks, zip(forward_s, backward_s, strict=True), strict=True)
    ]
    exposed_s = _exposed_reduction_s(times, ranks, laggards, backward_s) if _agree(laggards, times, slowest_s) else None
    if exposed_s is None:
        return None
    neighbours = list(pairwise(range(len(ranks))))
    activation_s = np.array([slowest_s.get(pair, ABSENT_S) for pair in neighbours])
    gradient_s = np.array([slowest_s.get(pair[::-1], ABSENT_S) for pair in neighbours])
    shared = tuple(zip(tied_stages, times.tied_s, strict=True))
    columns = (forward_s, backward_s, activation_s, gradient_s, exposed_s, update_s)
    return ChainTimes(candidate.micro_batches, times.overhead_s, depths, *columns, shared)


def _slowest_messages_s(times: Durations) -> dict[tuple[int, int], float]:
    """Return the seconds of the slowest message by (sending stage, receiving stage)."""
    found: dict[tuple[int, int], float] = {}
    for (sender, receiver), seconds in times.message_s.items():
        pair = times.stage[sender], times.stage[receiver]
        found[pair] = max(found.get(pair, seconds), seconds)
    return found


def _agree(laggards: list[set[int]], times: Durations, slowest_s: Mapping[tuple[int, int], float]) -> bool:
    """Leave only those that the slowest messages of laggards reach; return whether every stage has some."""
    senders: dict[tuple[int, int], list[int]] = {}
    """Of the slowest messages, by (sending stage, receiving rank)."""
    for (sender, receiver), seconds in times.message_s.items():
        before, after = times.stage[sender], times.stage[receiver]
        if seconds == slowest_s[before, after]:
            senders.setdefault((before, receiver), []).append(sender)
    # Up and down the chain until nothing moves.
    pairs = sorted(slowest_s)
    count = -1
    while count != (count := sum(map(len, laggards))):
        for before, after in (*pairs, *reversed(pairs)):
            reached = laggards[before]
            laggards[after] = {
                rank for rank in laggards[after] if not reached.isdisjoint(senders.get((before, rank), ()))
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
