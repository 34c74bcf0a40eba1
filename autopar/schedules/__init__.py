"""Schedules: a plan becomes a program.

One file per schedule; :data:`SCHEDULES` names them all. A schedule orders the forwards and backwards of one rank, and
names the in-flight depths it may be run with; :func:`autopar.schedules.expand.expand` adds the messages, the reductions
and the update. Which stages share devices is :mod:`autopar.formats.plan`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from autopar.schedules import dualpipe_v, gpipe, interleaved, one_forward_one_backward, zb_h1, zb_h2, zb_v
from autopar.schedules.order import Computation, RankPlace

__all__ = ["SCHEDULES", "Schedule"]


class Schedule(NamedTuple):
    """How a schedule orders a rank, and which in-flight depths it offers."""

    order: Callable[[RankPlace], Iterator[Computation]]
    """What a rank computes, in order."""
    warmups: Callable[[int, int, int], dict[str, tuple[int, ...]]]
    """(groups, stages per group, micro_batches) -> name of the choice -> depth per stage."""
    halves: bool = False
    """Whether it divides backwards into halves, some or all."""


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(gpipe.order, gpipe.warmups),
    "1f1b": Schedule(one_forward_one_backward.order, one_forward_one_backward.warmups),
    "interleaved": Schedule(interleaved.order, interleaved.warmups),
    "zb-h1": Schedule(zb_h1.order, zb_h1.warmups, halves=True),
    "zb-h2": Schedule(zb_h2.order, zb_h2.warmups, halves=True),
    "zb-v": Schedule(zb_v.order, zb_v.warmups, halves=True),
    "dualpipe-v": Schedule(dualpipe_v.order, dualpipe_v.warmups, halves=True),
}
