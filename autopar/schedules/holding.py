"""Holding: of how many micro-batches a rank's stage keeps something at once, as its order has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from autopar.formats.program import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    RECEIVE,
    RECEIVE_GRADIENT,
    SEND,
    SEND_GRADIENT,
    WEIGHT_BACKWARD,
    Action,
)

if TYPE_CHECKING:
    from autopar.schedules.place import Computation


def in_flight(order: Iterable[Action] | Iterable[Computation]) -> dict[int, int]:
    """Return, by stage, the most micro-batches whose forward is done and whose backward is not.

    Of a backward in two halves, the first counts.

    >>> in_flight([("F", 0, 0), ("F", 0, 1), ("I", 0, 0), ("I", 0, 1), ("W", 0, 0), ("W", 0, 1)])
    {0: 2}
    """
    depth: Counter[int] = Counter()
    deepest: dict[int, int] = {}
    for kind, stage, *_ in order:
        if kind == FORWARD:
            depth[stage] += 1
            deepest[stage] = max(deepest.get(stage, 0), depth[stage])
        elif kind in (BACKWARD, INPUT_BACKWARD):
            depth[stage] -= 1
    return deepest


class Holding(NamedTuple):
    """The most of every kind that a stage holds on a rank; they need not come at the same time."""

    micro_batches: int = 0
    """Whose forward is done and whose backward is not complete, in both of its halves."""
    pending: int = 0
    """Micro-batches whose input half is done and whose weight half is not."""
    received: int = 0
    """Messages that were received and not yet computed with."""
    unsent: int = 0
    """Messages that were computed and not yet sent."""


_CHANGES = {
    FORWARD: (1, 0, 0, 0),
    BACKWARD: (-1, 0, 0, 0),
    INPUT_BACKWARD: (0, 1, 0, 0),
    WEIGHT_BACKWARD: (-1, -1, 0, 0),
    RECEIVE: (0, 0, 1, 0),
    RECEIVE_GRADIENT: (0, 0, 1, 0),
    SEND: (0, 0, 0, -1),
    SEND_GRADIENT: (0, 0, 0, -1),
}
_MESSAGES = {
    FORWARD: (RECEIVE, SEND),
    BACKWARD: (RECEIVE_GRADIENT, SEND_GRADIENT),
    INPUT_BACKWARD: (RECEIVE_GRADIENT, SEND_GRADIENT),
}
"""What a computation takes, and what it makes."""


def holdings(order: Iterable[Action] | Iterable[Computation]) -> dict[int, Holding]:
    """Return, by stage, the most that a rank's actions, or its computations alone, have it hold.

    >>> holdings([("F", 0, 0), ("F", 0, 1), ("I", 0, 0), ("I", 0, 1), ("W", 0, 0), ("W", 0, 1)])
    {0: Holding(micro_batches=2, pending=2, received=0, unsent=0)}
    """
    actions = [(kind, stage, micro_batch) for kind, stage, micro_batch, *_ in order if kind in _CHANGES]
    counts = Counter(actions)
    now: dict[int, Sequence[int]] = {}
    most: dict[int, Holding] = {}
    for kind, stage, micro_batch in actions:
        change = _CHANGES[kind]
        if kind in _MESSAGES:
            taken, made = (counts[message, stage, micro_batch] for message in _MESSAGES[kind])
            change = (*change[:2], change[2] - taken, change[3] + made)
        now[stage] = [count + more for count, more in zip(now.get(stage, (0,) * 4), change, strict=True)]
        most[stage] = Holding(*map(max, most.get(stage, Holding()), now[stage]))
    return most
