"""Forwards: the part of a plan's program that evaluates, without backwards and update."""

from __future__ import annotations

from autopar.formats.plan import Plan
from autopar.formats.program import FORWARD, RECEIVE, SEND, Action, Program, RankProgram
from autopar.schedules.expand import entries_of

FORWARDS = (FORWARD, SEND, RECEIVE)
"""Kinds of actions that evaluate."""


def expand_forwards(plan: Plan) -> Program:
    """Return the program of an evaluation: of every rank the forwards, in the schedule's order, and their messages.

    An order of both forwards and backwards that ends is one of the forwards alone that ends.
    """
    return Program(
        tuple(
            RankProgram.of(Action(*entry) for entry in entries if entry[0] in FORWARDS) for entries in entries_of(plan)
        )
    )
