"""Schedules: a plan becomes a program.

With P groups of devices, M micro-batches, and f, b, i, w the times of a forward, of a whole backward, and of its input
and weight half on a stage, these are the most that a rank waits between its first computation and its last, stages
being alike and messages free (``idle``), and the most of its micro-batches that the s-th stage (from 0) keeps, up to M:

    schedule     idle                               in flight
    gpipe        (P - 1) (f + b)                    M
    1f1b         (P - 1) (f + b)                    P - s (PA), 2 (P - s) - 1 (PB), or any between or beyond
    interleaved  (P - 1) (f + b)                    as its order has it
    zb-h1        (P - 1) (f + i - w)                as 1f1b; with the weight halves to come, P in all at PA
    zb-h2        (P - 1) (f + i - 2 w)              2 (P - s) - 1; with the weight halves to come, 2 P - 1 in all
    zb-v         0 where f = i = w and M >= 2 P     2 P - s
    dualpipe-v   at most (P - 1) (f + 2 b - 3 w)    2 P - s

A stage of a schedule with v stages per group is 1 / v of one without: so are its times, and so is its memory for a
micro-batch. The idle times of ``zb-h1`` and ``zb-h2`` hold where w is no longer than f and i.

- *Halves.* Others wait for the input half of a backward only, and its weight half fills what would be a bubble.
  Together they take longer than a whole backward. The first stage, for whose input half nobody waits, runs whole
  backwards wherever its halves would follow one another; ``dualpipe-v`` splits at a step's beginning and its end only.
- *Order.* Every stage takes its micro-batches' forwards, backwards and weight halves in ascending order, so that
  gradients add up as in a plain loop.
- *Any number of micro-batches.* With fewer than fill the pipeline, ``zb-v`` and ``dualpipe-v`` leave out of the order
  for more what is not there.
- *Replicas.* Groups may differ in width. Those of schedules with several stages per group split micro-batches;
  elsewhere, they may take turns.
- *Names.* Options take torch's names, too, in any case and with or without ``Schedule`` before them. Files have
  autopar's. Pipelines that are never flushed run ``1f1b`` under a weight policy.

One file per schedule, and its variants: interleaved 1F1B is beside 1F1B, the three zero-bubble ones are in one;
:data:`SCHEDULES` names them all. A schedule orders the forwards and backwards of one rank, and names the in-flight
depths it may be run with; :func:`autopar.schedules.expand.expand` adds the messages, the reductions and the update.
``examples/own_schedule.py`` draws and simulates one of your own.
Which stages share devices is :mod:`autopar.formats.plan`'s. Users may spell a schedule as torch.distributed.pipelining
does (:func:`canonical`).
"""

from __future__ import annotations

from typing import NamedTuple

from autopar.errors import UsageError, unknown
from autopar.schedules import dualpipe_v, gpipe, one_forward_one_backward, zero_bubble
from autopar.schedules.order import Order, Warmups, implied_warmups

__all__ = ["SCHEDULES", "TORCH_NAMES", "Schedule", "canonical", "schedule_named"]


class Schedule(NamedTuple):
    """How a schedule orders a rank, and which in-flight depths it offers."""

    order: Order
    warmups: Warmups
    halves: bool = False
    """Whether it divides backwards into halves, some or all."""


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(gpipe.order, gpipe.warmups),
    "1f1b": Schedule(one_forward_one_backward.order, one_forward_one_backward.warmups),
    "interleaved": Schedule(
        one_forward_one_backward.interleaved_order, implied_warmups(one_forward_one_backward.interleaved_order, "loop")
    ),
    "zb-h1": Schedule(zero_bubble.h1_order, one_forward_one_backward.warmups, halves=True),
    "zb-h2": Schedule(zero_bubble.h2_order, zero_bubble.h2_warmups, halves=True),
    "zb-v": Schedule(zero_bubble.v_order, implied_warmups(zero_bubble.v_order, "vee"), halves=True),
    "dualpipe-v": Schedule(dualpipe_v.order, implied_warmups(dualpipe_v.order, "vee"), halves=True),
}

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
    hint = f"; torch's {absent} has no counterpart, near it is {_NEAREST[absent]}" if absent else ""
    message = f"`schedule` must be one of auto, {', '.join(SCHEDULES)}; found {text!r}{hint}"
    raise unknown(UsageError, message, str(text), () if hint else ("auto", *SCHEDULES))
