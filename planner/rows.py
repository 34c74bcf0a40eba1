"""Rows: a program as small integers, which simulators read, and the ranks that meet in it."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.formats.plan import Plan
from autopar.formats.program import (
    BACKWARD,
    FORWARD,
    KINDS,
    RECEIVE,
    RECEIVE_GRADIENT,
    REDUCE,
    REDUCE_TIED,
    SEND,
    SEND_GRADIENT,
    UPDATE,
    Program,
)
from autopar.schedules.expand import entries_of

__all__ = [
    "BACKWARD_CODE",
    "FORWARD_CODE",
    "RECEIVES",
    "REDUCE_CODE",
    "SENDS",
    "TIED_CODE",
    "UPDATE_CODE",
    "Meeting",
    "Rows",
    "compile_rows",
    "meetings",
    "rows_of",
]

Rows = list[list[tuple[int, int, int]]]
"""Per rank: (kind's code, micro-batch, peer) of every action; a code is the kind's position in ``KINDS``."""

FORWARD_CODE, BACKWARD_CODE, UPDATE_CODE = (KINDS.index(kind) for kind in (FORWARD, BACKWARD, UPDATE))
SENDS = (KINDS.index(SEND), KINDS.index(SEND_GRADIENT))
RECEIVES = (KINDS.index(RECEIVE), KINDS.index(RECEIVE_GRADIENT))
REDUCE_CODE, TIED_CODE = KINDS.index(REDUCE), KINDS.index(REDUCE_TIED)


def compile_rows(program: Program) -> Rows:
    """Return a program's columns as rows.

    >>> from autopar.formats.program import Action, RankProgram
    >>> compile_rows(Program((RankProgram.of([Action("F", 0, 2), Action("S", 0, 2, 1, 1)]),)))
    [[(0, 2, -1), (2, 2, 1)]]
    """
    return [list(zip(rank.kinds, rank.micro_batches, rank.peers, strict=True)) for rank in program.ranks]


def rows_of(plan: Plan) -> Rows:
    """Return the rows of a plan's program without making the program."""
    codes = {kind: code for code, kind in enumerate(KINDS)}
    return [
        [(codes[kind], micro_batch, peer) for kind, _, micro_batch, peer, _ in entries] for entries in entries_of(plan)
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
    """Return every reduction by (code, stage, or a shared parameter's index), given the stage of every rank."""
    found: dict[tuple[int, int], Meeting] = {}
    for rank, actions in enumerate(rows):
        for code, index, _ in reversed(actions):
            if code in (FORWARD_CODE, BACKWARD_CODE):
                break
            if code in (REDUCE_CODE, TIED_CODE):
                key = (code, index if code == TIED_CODE else stages[rank])
                meeting = found.setdefault(key, Meeting(*key))
                meeting.members.append(rank)
                meeting.missing += 1
    return found
