"""Pattern: a rank's computations without micro-batches, which are numbered in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from autopar.formats.program import BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD
from autopar.schedules.place import Computation


def numbered(pattern: Iterable[tuple[str, int]], micro_batches: int) -> Iterator[Computation]:
    """Yield a pattern's computations with every stage's forwards, backwards and halves numbered from 0.

    Those of micro-batches that there are not are left out: what remains of a sound order is sound.

    >>> list(numbered([("F", 0), ("F", 0), ("B", 0), ("B", 0)], 1))
    [('F', 0, 0), ('B', 0, 0)]
    """
    counts: Counter[tuple[str, int]] = Counter()
    for kind, stage in pattern:
        halves = (INPUT_BACKWARD, WEIGHT_BACKWARD) if kind == BACKWARD else (kind,)
        micro_batch = counts[halves[0], stage]
        counts.update((half, stage) for half in halves)
        if micro_batch < micro_batches:
            yield kind, stage, micro_batch


def joined(computations: Iterable[Computation]) -> Iterator[Computation]:
    """Yield computations with the first stage's backward whole where its halves follow one another.

    Nobody waits for that stage's input half, and a whole backward takes less than its halves.

    >>> list(joined([("I", 1, 0), ("W", 1, 0), ("I", 0, 0), ("W", 0, 0)]))
    [('I', 1, 0), ('W', 1, 0), ('B', 0, 0)]
    """
    held: Computation | None = None
    for computation in computations:
        kind, stage, micro_batch = computation
        if held is not None:
            whole = computation == (WEIGHT_BACKWARD, *held[1:])
            yield (BACKWARD, *held[1:]) if whole else held
            held = None
            if whole:
                continue
        if kind == INPUT_BACKWARD and stage == 0:
            held = computation
        else:
            yield kind, stage, micro_batch
    assert held is None, "a weight half is missing"
