"""Host: how the loaders of a host are started, from a process that computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from autopar.formats.plan import Plan
from autopar.ranks.pool import RankPool
from autopar.runtime.loaders.process import ReadingArguments
from autopar.runtime.loaders.server import ServingArguments, serve


@contextmanager
def spare_process(pool: RankPool | None, plan: Plan, *, wanted: bool) -> Iterator[RankPool | None]:
    """Give a pool with a process that takes part in no job, from which loaders can be forked; None if none is wanted.

    Started early, it imports what loaders need while its host captures the model.

    Args:
        pool: of the ranks, which may have such a process.
        plan: what is carried out.
        wanted: whether there are loaders.
    """
    if not wanted:
        yield None
    elif pool is not None and pool.has_spare:
        yield pool
    else:
        with RankPool(0, threads=plan.threads, imports=[serve.__module__], spare=True) as own:
            yield own


@contextmanager
def loading(
    pool: RankPool | None, folder: Path, count: int, ranks: Sequence[int], reading: ReadingArguments
) -> Iterator[Callable[[], Path | None]]:
    """Have a host's loaders serve its ranks, which have all gone when this ends.

    Args:
        pool: has the process that they are forked from; None: there are none.
        folder: where ranks find them.
        count: of loaders.
        ranks: those of the host.
        reading: what is read.

    Yields:
        What waits until ranks can come, and returns the folder; None where ranks load for themselves.
    """
    if pool is None:
        yield lambda: None
        return
    own = {"folder": str(folder), "loaders": count, "ranks": list(ranks)}
    arguments = ServingArguments(**reading, **own)  # type: ignore[typeddict-item]
    with pool.serving(f"{serve.__module__}:{serve.__name__}", arguments) as wait:

        def come() -> Path:
            wait()
            return folder

        yield come
