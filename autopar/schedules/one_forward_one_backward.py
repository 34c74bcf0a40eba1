"""1F1B: a warm-up of forwards, then one forward and one backward in turn, with a flush at the end of the step.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", 2021, section 3.2 (early backward
scheduling and its warm-up policies PA and PB).
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.formats.program import BACKWARD, FORWARD
from autopar.schedules.order import Computation, RankPlace


def order(place: RankPlace) -> Iterator[Computation]:
    """Yield a rank's computations in order, with at most the stage's ``warmup`` micro-batches in flight.

    >>> from autopar.schedules.timetable import draw
    >>> print(draw("1f1b", stages=3, micro_batches=4))
    stage 0: F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1: .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    stage 2: .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    """
    (stage,), (warmup,) = place.stages, place.warmups
    for micro_batch in range(warmup):
        yield FORWARD, stage, micro_batch
    for micro_batch in range(place.micro_batches):
        yield BACKWARD, stage, micro_batch
        if warmup + micro_batch < place.micro_batches:
            yield FORWARD, stage, warmup + micro_batch


def warmups(groups: int, chunks: int, micro_batches: int) -> dict[str, tuple[int, ...]]:
    """Return DAPPLE's two choices of in-flight depth per stage.

    With stages s = 1..S, PA keeps min(S - s + 1, M) in flight, which suffices where transfers are short; PB keeps
    min(2 (S - s) + 1, M), which also hides a transfer as long as a forward.

    >>> warmups(3, 1, 8)
    {'PA': (3, 2, 1), 'PB': (5, 3, 1)}
    """
    behind = range(groups * chunks - 1, -1, -1)
    return {
        "PA": tuple(min(count + 1, micro_batches) for count in behind),
        "PB": tuple(min(2 * count + 1, micro_batches) for count in behind),
    }
