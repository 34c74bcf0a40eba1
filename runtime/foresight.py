"""Foresight: what a rank's program tells of its actions before any is performed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.formats.program import (
    BACKWARD,
    BACKWARDS,
    INPUT_BACKWARD,
    RECEIVE,
    RECEIVE_GRADIENT,
    SEND,
    SEND_GRADIENT,
    Action,
)

__all__ = ["Foresight", "foresee"]


@dataclass(frozen=True)
class Foresight:
    """Positions of actions in the program, and what actions there are."""

    last_backward: Mapping[int, int]
    """Stage -> position of its last backward, or half of one."""
    halved: Collection[tuple[int, int]]
    """(stage, micro-batch) of every backward that comes in halves."""
    early: Mapping[int, tuple[int, int]]
    """Position of a receive -> (stage, micro-batch) that is recomputed while the rank waits there."""
    sends: Collection[int]
    """Positions of the sends."""
    last_send: Mapping[tuple[str, int, int], int]
    """(kind, stage, micro-batch) of sends to one or several peers -> position of the last one."""
    carried: Collection[tuple[str, int]]
    """(kind, stage) of the messages that go between ranks."""


def foresee(actions: Sequence[Action], recomputing: Collection[int]) -> Foresight:
    """Return what the actions of a rank tell; ``recomputing`` are the stages that recompute layers."""
    sends = {position: action for position, action in enumerate(actions) if action.kind in (SEND, SEND_GRADIENT)}
    return Foresight(
        last_backward={action.stage: position for position, action in enumerate(actions) if action.kind in BACKWARDS},
        halved={(action.stage, action.micro_batch) for action in actions if action.kind == INPUT_BACKWARD},
        early={position: place for position, place in _followed(actions).items() if place[0] in recomputing},
        sends=sends.keys(),
        last_send={action[:3]: position for position, action in sends.items()},
        carried={(action.kind, action.stage) for action in actions if action.peer >= 0},
    )


def _followed(actions: Sequence[Action]) -> dict[int, tuple[int, int]]:
    """Return (stage, micro-batch) by the positions of receives that nothing but its backward follows.

    While a rank waits there, it may as well recompute; earlier, it would hold more than it does in the backward.
    """
    found: dict[int, tuple[int, int]] = {}
    following: Action | None = None
    for position in reversed(range(len(actions))):
        action = actions[position]
        if action.kind in (RECEIVE, RECEIVE_GRADIENT):
            if following and following.kind in (BACKWARD, INPUT_BACKWARD):
                found[position] = following.stage, following.micro_batch
        elif action.kind not in (SEND, SEND_GRADIENT):
            following = action
    return found
