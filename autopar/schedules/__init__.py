"""Schedules: a plan becomes a program.

One file per schedule; :data:`SCHEDULES` names them all. A schedule orders one stage's forwards and backwards, and
names the in-flight depths it may be run with; :func:`autopar.schedules.expand.expand` adds the messages, the
reductions and the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from autopar.schedules import gpipe, one_forward_one_backward

__all__ = ["SCHEDULES", "Schedule"]


class Schedule(NamedTuple):
    """How a schedule orders a stage, and which in-flight depths it offers."""

    order: Callable[[int, int], Iterator[tuple[str, int]]]
    """(micro_batches, warmup) -> (kind, micro-batch) in order."""
    warmups: Callable[[int, int], dict[str, tuple[int, ...]]]
    """(stages, micro_batches) -> name of the choice -> depth per stage, never growing from stage to stage."""


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(gpipe.order, gpipe.warmups),
    "1f1b": Schedule(one_forward_one_backward.order, one_forward_one_backward.warmups),
}
