"""Spelling of schedules: autopar's names and those that torch.distributed.pipelining has for them."""

from __future__ import annotations

from autopar.errors import UsageError
from autopar.schedules import SCHEDULES

TORCH_NAMES = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}
"""torch's schedules, whose classes are called so behind ``Schedule``."""
_NEAREST = {"InterleavedZeroBubble": "interleaved or zb-v", "LoopedBFS": "interleaved"}
"""torch's schedules that autopar has not."""


def _plain(text: str) -> str:
    return "".join(each for each in text.casefold() if each.isalnum()).removeprefix("schedule")


_ABSENT = {_plain(name): name for name in _NEAREST}


def canonical(text: str) -> str | None:
    """Return autopar's name of a schedule, however it is spelled; none if it is not known.

    >>> canonical("Schedule1F1B"), canonical("zbvzerobubble"), canonical("ZB_H1"), canonical("Looped")
    ('1f1b', 'zb-v', 'zb-h1', None)
    """
    known = {_plain(name): name for name in SCHEDULES} | {_plain(torch): name for torch, name in TORCH_NAMES.items()}
    return known.get(_plain(text))


def schedule_named(text: str) -> str:
    """Return autopar's name of a schedule, or ``auto``.

    Raises:
        UsageError: it is not known; says which are.
    """
    if isinstance(text, str):
        found = "auto" if _plain(text) == "auto" else canonical(text)
        if found is not None:
            return found
    absent = _ABSENT.get(_plain(text)) if isinstance(text, str) else None
    near = f"; torch's {absent} has no counterpart, near it is {_NEAREST[absent]}" if absent else ""
    raise UsageError(f"`schedule` must be one of auto, {', '.join(SCHEDULES)}; found {text!r}{near}")
