"""Awaited: the messages that may be waited for; what passes stages by is often there before what they hand on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.planner.candidate import Candidate
from autopar.planner.costs.durations import Durations


def awaited(candidate: Candidate, times: Durations) -> Durations:
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
    forth = _Chain(times, times.forward_s, 1)
    back = _Chain(times, times.backward_s, -1)
    kept = {
        pair: seconds
        for pair, seconds in times.message_s.items()
        if pair not in skipping
        or not (forth if stages[pair[0]] < stages[pair[1]] else back).covers(stages[pair[0]], stages[pair[1]], seconds)
    }
    return replace(times, message_s=kept)


class _Chain:
    """What comes from stage to stage in one direction, at the earliest."""

    def __init__(self, times: Durations, compute_s: Sequence[float], step: int) -> None:
        self._step = step
        self._compute_s: dict[int, float] = {}
        for stage, seconds in zip(times.stage, compute_s, strict=True):
            self._compute_s[stage] = min(self._compute_s.get(stage, seconds), seconds)
        self._message_s: dict[int, float] = {}
        """By sending stage, of those that some neighbour sends to."""
        for (sender, receiver), seconds in times.message_s.items():
            stage = times.stage[sender]
            if times.stage[receiver] == stage + step:
                self._message_s[stage] = min(self._message_s.get(stage, seconds), seconds)
        self._known: dict[tuple[int, int], float] = {}

    def covers(self, sender: int, receiver: int, seconds: float) -> bool:
        """Whether a message between two stages is there before what the stages between hand on."""
        if (sender, receiver) not in self._known:
            self._known[sender, receiver] = self._least(sender, receiver)
        return seconds <= self._known[sender, receiver]

    def _least(self, sender: int, receiver: int) -> float:
        """Return the smaller of path and pace; less than any message's seconds if there is no path."""
        path = pace = 0.0
        for stage in range(sender, receiver, self._step):
            if stage not in self._message_s:
                return -1.0
            hand_s, own_s = self._message_s[stage], self._compute_s[stage]
            path += hand_s + (0.0 if stage == sender else own_s)
            pace = max(pace, hand_s, own_s)
        return min(path, pace)
