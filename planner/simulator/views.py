"""View: what one rank performs, laid out for a simulation that turns from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.planner.costs.durations import Durations
from autopar.planner.simulator.lanes import Lanes, Queue
from autopar.planner.simulator.rows import (
    BACKWARD_CODE,
    FORWARD_CODE,
    INPUT_CODE,
    LAST,
    RECEIVES,
    REDUCE_CODE,
    SENDS,
    UPDATE_CODE,
    WEIGHT_CODE,
    Rows,
)


class View(NamedTuple):
    """Columns of a rank's actions; reading a tuple for each of millions would wait for memory."""

    codes: bytes
    queues: list[Queue | None]
    """Of every action that is a message's."""
    seconds: list[float]
    """Of every computation and every send."""
    ends: dict[int, int]
    """Replicas by the positions of their last backwards, where a part of a reduction goes with that, or where the rank
    goes on with another stage."""
    felt: int
    """Position from which on computations are events: before it, nothing slows them and nothing runs beside."""


def views(rows: Rows, times: Durations, wiring: Lanes) -> list[View]:
    """Return the view of every rank."""
    slowed = {rank for lane in wiring.lanes for rank in lane.ranks}
    compute_s = {
        FORWARD_CODE: times.forward_s,
        BACKWARD_CODE: times.backward_s,
        INPUT_CODE: times.input_s,
        WEIGHT_CODE: times.weight_s,
        UPDATE_CODE: times.update_s,
    }
    found = []
    for rank, actions in enumerate(rows):
        codes = bytes(code for code, *_ in actions)
        known = {
            (code, peer, own): compute_s[code][own] if code in compute_s else times.message_s.get((own, peer), 0.0)
            for code, peer, own in {(code, peer, own) for code, _, peer, own in actions}
        }
        seconds = [known[code, peer, own] for code, _, peer, own in actions]
        ends = _ends(actions, wiring)
        felt = 0 if rank in slowed else min(ends, default=len(codes))
        found.append(View(codes, _queues(rank, rows, times, wiring), seconds, ends, felt))
    return found


def _ends(actions: Sequence[tuple[int, int, int, int]], wiring: Lanes) -> dict[int, int]:
    reduced = {own for code, _, _, own in actions if code == REDUCE_CODE}
    several = len({own for *_, own in actions}) > 1
    wanted = {own for own in reduced if several or own in wiring.parts}
    found: dict[int, int] = {}
    for at in range(len(actions) - 1, -1, -1):
        code, _, _, own = actions[at]
        if not wanted:
            break
        if code in LAST and own in wanted:
            found[at] = own
            wanted.remove(own)
    return found


def _queues(rank: int, rows: Rows, times: Durations, wiring: Lanes) -> list[Queue | None]:
    ends: dict[tuple[int, int], Queue] = {}
    for code, peer in {(code, peer) for code, _, peer, _ in rows[rank]}:
        if code in SENDS:
            ends[code, peer] = wiring.queues[rank, times.ranks[peer]]
        elif code in RECEIVES:
            ends[code, peer] = wiring.queues[times.ranks[peer], rank]
    return [ends.get((code, peer)) for code, _, peer, _ in rows[rank]]
