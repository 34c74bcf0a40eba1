"""Spent: where the time of every rank went, read from a timeline of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autopar.formats.program import (
    BACKWARDS,
    FORWARD,
    RECEIVE,
    RECEIVE_GRADIENT,
    REDUCE,
    REDUCE_TIED,
    SEND,
    SEND_GRADIENT,
    UPDATE,
    Action,
)
from autopar.formats.timeline import Event, Timeline

_COMPUTE, _UPDATE, _REDUCE, _WAITING, _TRANSFER = range(5)
_PLAIN = {
    FORWARD: _COMPUTE,
    **dict.fromkeys(BACKWARDS, _COMPUTE),
    UPDATE: _UPDATE,
    REDUCE: _REDUCE,
    REDUCE_TIED: _REDUCE,
}
_SENT_AS = {RECEIVE: SEND, RECEIVE_GRADIENT: SEND_GRADIENT}
_Span = tuple[float, float, int]


class Spent(NamedTuple):
    """Seconds of one rank's step; together they are the step.

    Where two things go on at once, the one that is named first counts: what a backward hides costs nothing.
    """

    compute_s: float = 0.0
    """Forwards and backwards, with what they recompute."""
    update_s: float = 0.0
    """The optimizer's step, with what ranks tell each other there."""
    reduce_s: float = 0.0
    """Blocked in a reduction of gradients, until all of its ranks have come and it is done."""
    waiting_s: float = 0.0
    """Blocked in a receive before the peer began to send."""
    transfer_s: float = 0.0
    """Blocked in a receive after that; and, as measured, handing a message over. A simulated send occupies no rank."""
    idle_s: float = 0.0
    """The rest: loading mini-batches, and what ranks do between actions."""


def spent(timeline: Timeline) -> list[Spent]:
    """Return where the time of every rank went in a step."""
    return spent_within([timeline], 0.0, timeline.end_s)


def spent_within(steps: Sequence[Timeline], start_s: float, end_s: float) -> list[Spent]:
    """Return where the time of every rank went between two moments.

    Args:
        steps: timelines on one clock of all steps that have to do with that time; some ranks begin a step while others
            still end the one before.
        start_s: the earlier moment.
        end_s: the later one.
    """
    spans: list[list[_Span]] = [[] for _ in range(max(step.rank_count() for step in steps))]
    for step in steps:
        for rank, start, end, what in _spans(step):
            start, end = max(start, start_s), min(end, end_s)
            if start < end:
                spans[rank].append((start, end, what))
    found = []
    for compute_s, update_s, reduce_s, waiting_s, transfer_s in map(_swept, spans):
        idle_s = max(0.0, end_s - start_s - (compute_s + update_s + reduce_s + waiting_s + transfer_s))
        found.append(Spent(compute_s, update_s, reduce_s, waiting_s, transfer_s, idle_s))
    return found


def sending_of(event: Event) -> tuple[int, Action]:
    """Return the sending rank and the send of a receive."""
    action = event.action
    kind = _SENT_AS[action.kind]
    return action.peer, Action(kind, action.peer_stage, action.micro_batch, event.rank, action.stage, action.version)


def _spans(step: Timeline) -> Iterator[tuple[int, float, float, int]]:
    """Yield (rank, start, end, what it was spent on) of a step's events; a receive is parted where its send began."""
    sends = (SEND, SEND_GRADIENT)
    begun = {(event.rank, event.action): event.start_s for event in step if event.action.kind in sends}
    for event in step:
        rank, action, start, end = event
        if action.kind in _PLAIN:
            yield rank, start, end, _PLAIN[action.kind]
        elif action.kind in _SENT_AS:
            middle = min(max(begun.get(sending_of(event), math.inf), start), end)
            yield rank, start, middle, _WAITING
            yield rank, middle, end, _TRANSFER
        elif step.origin == "measured":
            yield rank, start, end, _TRANSFER


def _swept(spans: Sequence[_Span]) -> list[float]:
    """Return the seconds of every kind of span; of those at one moment, the lowest kind counts."""
    edges = sorted(edge for start, end, what in spans for edge in ((start, 1, what), (end, -1, what)))
    open_now, total, before = [0] * 5, [0.0] * 5, 0.0
    for at, change, what in edges:
        first = next((kind for kind in range(5) if open_now[kind]), None)
        if first is not None:
            total[first] += at - before
        before = at
        open_now[what] += change
    return total
