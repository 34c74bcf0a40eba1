"""View: what one rank performs, laid out for a simulation that turns from rank to rank."""

from __future__ import annotations

from typing import NamedTuple

from autopar.planner.durations import Durations
from autopar.planner.lanes import Lanes, Queue
from autopar.planner.rows import BACKWARD_CODE, FORWARD_CODE, RECEIVES, SENDS, UPDATE_CODE, Rows

__all__ = ["View", "views"]


class View(NamedTuple):
    """Columns of a rank's actions; reading a tuple for each of millions would wait for memory."""

    codes: bytes
    queues: list[Queue | None]
    """Of every action that is a message's."""
    compute_s: dict[int, float]
    """By the code of a computation."""
    last: int
    """Position of the last backward, if a part of a reduction goes with it, or else behind all actions."""
    felt: int
    """Position from which on computations are events: before it, nothing slows them and nothing runs beside."""


def views(rows: Rows, times: Durations, wiring: Lanes) -> list[View]:
    """Return the view of every rank."""
    slowed = {rank for lane in wiring.lanes for rank in lane.ranks}
    found = []
    for rank, actions in enumerate(rows):
        compute_s = {FORWARD_CODE: times.forward_s[rank], BACKWARD_CODE: times.backward_s[rank]}
        compute_s[UPDATE_CODE] = times.update_s[rank]
        codes = bytes(code for code, _, _ in actions)
        last = codes.rfind(BACKWARD_CODE) if rank in wiring.parts else len(codes)
        queues = _queues(rank, rows, wiring)
        found.append(View(codes, queues, compute_s, last, 0 if rank in slowed else last))
    return found


def _queues(rank: int, rows: Rows, wiring: Lanes) -> list[Queue | None]:
    ends: dict[tuple[int, int], Queue] = {}
    for code, peer in {(code, peer) for code, _, peer in rows[rank]}:
        if code in SENDS:
            ends[code, peer] = wiring.queues[rank, peer]
        elif code in RECEIVES:
            ends[code, peer] = wiring.queues[peer, rank]
    return [ends.get((code, peer)) for code, _, peer in rows[rank]]
