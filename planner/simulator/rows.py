"""Rows: a program as small integers, which simulators read, and the ranks that meet in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat

from autopar.formats.layout import layout_of
from autopar.formats.plan import Plan
from autopar.formats.program import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    KINDS,
    RECEIVE,
    RECEIVE_GRADIENT,
    REDUCE,
    REDUCE_TIED,
    SEND,
    SEND_GRADIENT,
    UPDATE,
    WEIGHT_BACKWARD,
    Program,
)
from autopar.planner.costs.durations import Durations
from autopar.schedules.expand import entries_of, rank_of

Rows = list[list[tuple[int, int, int, int]]]
"""Per rank: (kind's code, micro-batch, peer, own) of every action; a code is the kind's position in ``KINDS``.

``own`` is the replica that acts, and ``peer`` the one at the other end of a message, or -1; replicas count those of all
stages in order, as ranks do where each runs one stage.
"""

FORWARD_CODE, BACKWARD_CODE, UPDATE_CODE = (KINDS.index(kind) for kind in (FORWARD, BACKWARD, UPDATE))
INPUT_CODE, WEIGHT_CODE = KINDS.index(INPUT_BACKWARD), KINDS.index(WEIGHT_BACKWARD)
SENDS = (KINDS.index(SEND), KINDS.index(SEND_GRADIENT))
RECEIVES = (KINDS.index(RECEIVE), KINDS.index(RECEIVE_GRADIENT))
COMPUTED = (FORWARD_CODE, BACKWARD_CODE, INPUT_CODE, WEIGHT_CODE)
"""Forwards, backwards and the halves of these."""
LAST = (BACKWARD_CODE, WEIGHT_CODE)
"""What a replica's gradients are made by."""
REDUCE_CODE, TIED_CODE = KINDS.index(REDUCE), KINDS.index(REDUCE_TIED)


def compile_rows(program: Program, times: Durations | None = None) -> Rows:
    """Return a program's columns as rows; ``times`` knows the replicas, where ranks run several stages.

    >>> from autopar.formats.program import Action, RankProgram
    >>> compile_rows(Program((RankProgram.of([Action("F", 0, 2), Action("S", 0, 2, 1, 1)]),)))
    [[(0, 2, -1, 0), (2, 2, 1, 0)]]
    """
    if times is None or not times.rank:
        return [
            list(zip(each.kinds, each.micro_batches, each.peers, repeat(rank)))
            for rank, each in enumerate(program.ranks)
        ]
    place_of = times.place_of
    return [
        [
            (code, index, peer if peer < 0 else place_of(peer, peer_stage), place_of(rank, stage))
            for code, stage, index, peer, peer_stage in zip(
                each.kinds, each.stages, each.micro_batches, each.peers, each.peer_stages, strict=True
            )
        ]
        for rank, each in enumerate(program.ranks)
    ]


def rows_of(plan: Plan) -> Rows:
    """Return the rows of a plan's program without making the program."""
    codes = {kind: code for code, kind in enumerate(KINDS)}
    if layout_of(plan.schedule) == "line":
        return [
            [(codes[kind], micro_batch, peer, rank) for kind, _, micro_batch, peer, _ in entries]
            for rank, entries in enumerate(entries_of(plan))
        ]
    # What to add to a rank to get the replica of a stage.
    ahead = [
        first - rank_of(plan, stage, 0)
        for stage, first in enumerate(accumulate((stage.replicas for stage in plan.stages[:-1]), initial=0))
    ]
    return [
        [
            (codes[kind], micro_batch, peer if peer < 0 else peer + ahead[peer_stage], rank + ahead[stage])
            for kind, stage, micro_batch, peer, peer_stage in entries
        ]
        for rank, entries in enumerate(entries_of(plan))
    ]


class Meeting:
    """Ranks that reduce together; it is over when all that it misses has come."""

    __slots__ = ("code", "end_s", "index", "members", "missing")

    def __init__(self, code: int, index: int) -> None:
        self.code, self.index = code, index
        self.members: list[int] = []
        self.missing = 0
        self.end_s = 0.0


def meetings(rows: Rows, stages: Sequence[int]) -> dict[tuple[int, int], Meeting]:
    """Return every reduction by (code, stage, or a shared parameter's index), given the stage of every replica."""
    found: dict[tuple[int, int], Meeting] = {}
    for rank, actions in enumerate(rows):
        for code, index, _, own in reversed(actions):
            if code in COMPUTED:
                break
            if code in (REDUCE_CODE, TIED_CODE):
                key = (code, index if code == TIED_CODE else stages[own])
                meeting = found.setdefault(key, Meeting(*key))
                meeting.members.append(rank)
                meeting.missing += 1
    return found
