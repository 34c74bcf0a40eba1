"""Work: what loaders have to read for the ranks of a host, divided into tasks.

A sample is read once a host, and its rows go to every rank that needs them. Where the model file has no ``collate``,
rows of a micro-batch may be read by several loaders, which are joined again behind that: samples are only stacked. Else
a task is what ``collate`` is given: a micro-batch, or with ``whole_batches`` a mini-batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from autopar.formats.plan import Plan
from autopar.options.train import Count

_MINI_BATCHES_AHEAD = 2
"""At least so many are read before they are asked for, and as many as give every loader a task."""
_MOST_PER_RANK = 8
"""As many loaders a rank are started where nobody says how many."""


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_of(loaders: Count, device_type: str, ranks: int, processor_count: int) -> int:
    """Return how many loaders a host has.

    Where that is left open: none where ranks compute on its processors; else as many as there are processors beyond one
    for each rank, and at most eight a rank.

    Args:
        loaders: what the user asks for.
        device_type: what ranks compute on.
        ranks: how many the host has.
        processor_count: likewise, processors.

    >>> [count_of("auto", *host) for host in (("cpu", 2, 16), ("cuda", 1, 16), ("cuda", 8, 48), ("cuda", 4, 4))]
    [0, 8, 40, 0]
    """
    if loaders != "auto":
        return loaders
    return 0 if device_type == "cpu" else max(0, min(processor_count - ranks, _MOST_PER_RANK * ranks))


class RankRows(NamedTuple):
    """Rows of a micro-batch that a rank needs."""

    rank: int
    micro_batch: int
    start: int
    stop: int


@dataclass(frozen=True)
class ReadingTask:
    """What one loader reads at once."""

    step: int
    micro_batch: int | None
    """None: all of the mini-batch."""
    start: int
    """The first row that is read, of the micro-batch."""
    stop: int
    """The one behind the last."""
    shares: tuple[RankRows, ...]
    """Who is sent which rows."""
    exact: bool
    """Whether this is what a rank would read by itself, so that what is wrong with it is what the rank would find."""

    @property
    def rows(self) -> tuple[int, int, int]:
        """The micro-batch, and its rows."""
        assert self.micro_batch is not None
        return self.micro_batch, self.start, self.stop


@dataclass(frozen=True)
class ReadingDivision:
    """How the work for a host's ranks is divided."""

    plan: Plan
    ranks: tuple[int, ...]
    """Those that read inputs of the model."""
    loaders: int
    collates: bool
    whole: bool
    """Whether ``collate`` is given mini-batches."""

    @property
    def ahead(self) -> int:
        """Return how many mini-batches are read before they are asked for."""
        tasks = len(self.tasks(0, 0)) if self.ranks else 1
        return max(_MINI_BATCHES_AHEAD, -(-self.loaders // max(1, tasks)))

    def readers(self, step: int, first: int) -> list[int]:
        """Return the ranks that have a mini-batch; replicas that take turns began with ``first``."""
        every = map(self.plan.ownership.ranks.__getitem__, self.ranks)
        return [own.rank for own in every if own.has(step, first)]

    def tasks(self, step: int, first: int) -> list[ReadingTask]:
        """Return what has to be read of a mini-batch, in the order of its rows."""
        readers = self.readers(step, first)
        if self.whole:
            shares = tuple(share for m in range(self.plan.micro_batches) for share in self._shares(readers, m))
            return [ReadingTask(step, None, 0, self.plan.batch, shares, exact=True)] if shares else []
        return [task for m in range(self.plan.micro_batches) for task in self._tasks(step, m, readers)]

    def again(self, step: int, micro_batch: int, rank: int) -> ReadingTask:
        """Return the task of reading what a rank would read by itself, and nothing else."""
        (share,) = self._shares([rank], micro_batch)
        return ReadingTask(step, micro_batch, share.start, share.stop, (share,), exact=True)

    def _shares(self, readers: Sequence[int], micro_batch: int) -> list[RankRows]:
        every = map(self.plan.ownership.ranks.__getitem__, readers)
        having = (own for own in every if micro_batch in own.micro_batches)
        return [RankRows(own.rank, micro_batch, own.rows.start, own.rows.stop) for own in having]

    def _tasks(self, step: int, micro_batch: int, readers: Sequence[int]) -> Iterator[ReadingTask]:
        shares = self._shares(readers, micro_batch)
        if not shares:
            return
        if self.collates:
            yield ReadingTask(step, micro_batch, 0, self.plan.micro_batch_size, tuple(shares), exact=True)
            return
        most = -(-self.plan.batch // self.loaders)
        for start, stop in _join_ranges({(share.start, share.stop) for share in shares}):
            parts = -(-(stop - start) // most)
            edges = [start + (stop - start) * part // parts for part in range(parts + 1)]
            for low, high in pairwise(edges):
                yield self._part(step, micro_batch, low, high, shares)

    def _part(self, step: int, micro_batch: int, start: int, stop: int, shares: Sequence[RankRows]) -> ReadingTask:
        """Return the task of reading some rows."""
        cut = [share._replace(start=max(start, share.start), stop=min(stop, share.stop)) for share in shares]
        some = tuple(share for share in cut if share.start < share.stop)
        exact = all((share.start, share.stop) == (start, stop) for share in shares)
        return ReadingTask(step, micro_batch, start, stop, some, exact)


def _join_ranges(ranges: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of rows, those that overlap or touch as one.

    >>> _join_ranges({(0, 2), (2, 5), (3, 4), (7, 8)})
    [(0, 5), (7, 8)]
    """
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
