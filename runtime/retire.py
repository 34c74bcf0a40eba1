"""Retire: when a sent tensor may be let go, known from the program alone.

On gloo, a send's completion cannot be asked for, only waited for, and waiting must not hold up computation. But when
a peer has sent something that its program places behind the receipt of an earlier message, that message has arrived.
"""

from __future__ import annotations

from collections import defaultdict

from autopar.formats.program import RECEIVE, RECEIVE_GRADIENT, SEND, SEND_GRADIENT, Program

__all__ = ["receives_ahead", "retirements"]

_SENDS, _RECEIVES = (SEND, SEND_GRADIENT), (RECEIVE, RECEIVE_GRADIENT)


def retirements(program: Program, rank: int) -> dict[int, list[int]]:
    """Return, for positions of receives in a rank's program, the positions of the sends that are done by then.

    Sends that no later receive proves done are not listed; they are waited for in the next step.
    """
    mine = list(program.ranks[rank])
    sends: dict[int, list[int]] = defaultdict(list)
    receives: dict[int, list[int]] = defaultdict(list)
    for position, action in enumerate(mine):
        if action.kind in _SENDS:
            sends[action.peer].append(position)
        elif action.kind in _RECEIVES:
            receives[action.peer].append(position)
    found: dict[int, list[int]] = defaultdict(list)
    for peer, positions in sends.items():
        theirs = [action.kind in _SENDS for action in program.ranks[peer] if action.peer == rank]
        arrived = answered = 0
        for is_send in theirs:
            if is_send:
                # The peer's answer number ``answered`` comes after it received this rank's first ``arrived`` sends.
                proof = receives[peer][answered]
                answered += 1
                while positions and arrived:
                    found[proof].append(positions.pop(0))
                    arrived -= 1
            else:
                arrived += 1
    return dict(found)


def receives_ahead(program: Program, rank: int, computations: int = 2) -> dict[int, list[int]]:
    """Return, for positions in a rank's program, the receives to post there: so many computations ahead of use."""
    mine = list(program.ranks[rank])
    starts = [0]
    posts: dict[int, list[int]] = defaultdict(list)
    for position, action in enumerate(mine):
        if action.kind in _RECEIVES:
            posts[starts[max(0, len(starts) - 1 - computations)]].append(position)
        elif action.kind not in _SENDS:
            starts.append(position + 1)
    return dict(posts)
