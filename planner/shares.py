"""Shares: what the ranks' time in a step goes to."""

from __future__ import annotations

from autopar.formats.predicted import Shares
from autopar.formats.program import RECEIVE, RECEIVE_GRADIENT, SEND, SEND_GRADIENT, Action
from autopar.formats.timeline import Timeline, track_of

_SENT_AS = {RECEIVE: SEND, RECEIVE_GRADIENT: SEND_GRADIENT}

Message = tuple[str, int, int, int, int, int]
"""Kind of the send, micro-batch, sender and its stage, receiver and its stage."""


def shares_of(timeline: Timeline) -> Shares:
    """Return the shares of a simulated timeline, whose events stand in the order of every rank's actions.

    A rank waits for a message from when it comes to receive it; only while the message is under way does this count as
    ``messages``. Of a reduction only what follows the rank's last backward is waited for.
    """
    total = timeline.end_s * timeline.rank_count()
    if total <= 0:
        return Shares(computing=0, messages=0, reduction=0, idle=1)
    begun: dict[Message, float] = {}
    for rank, action, start_s, _ in timeline:
        if track_of(action.kind) == "send":
            begun[action.kind, action.micro_batch, rank, action.stage, action.peer, action.peer_stage] = start_s
    spent = {"compute": 0.0, "receive": 0.0, "reduce": 0.0}
    clock = [0.0] * timeline.rank_count()
    for rank, action, start_s, end_s in timeline:
        track = track_of(action.kind)
        if track == "send":
            continue
        if track == "receive":
            start_s = max(start_s, begun[_sending(rank, action)])
        spent[track] += max(0.0, end_s - max(start_s, clock[rank]))
        clock[rank] = max(clock[rank], end_s)
    computing, messages, reduction = (min(1.0, seconds / total) for seconds in spent.values())
    idle = max(0.0, 1.0 - computing - messages - reduction)
    return Shares(computing=computing, messages=messages, reduction=reduction, idle=idle)


def _sending(rank: int, action: Action) -> Message:
    """Return the send that a receive of a rank waits for."""
    return _SENT_AS[action.kind], action.micro_batch, action.peer, action.peer_stage, rank, action.stage
