"""GPipe: all forwards, then all backwards.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019, figure 2c.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.formats.program import BACKWARD, FORWARD
from autopar.schedules.order import Computation, RankPlace


def order(place: RankPlace) -> Iterator[Computation]:
    """Yield a rank's computations in order; every micro-batch is in flight before the first backward.

    Backwards run in micro-batch order, so that gradients add up in the order of a plain accumulation loop.

    >>> from autopar.schedules.timetable import draw
    >>> print(draw("gpipe", stages=3, micro_batches=3))
    stage 0: F0 F1 F2 .  .  .  .  B0 B1 B2
    stage 1: .  F0 F1 F2 .  .  B0 B1 B2 .
    stage 2: .  .  F0 F1 F2 B0 B1 B2 .  .
    """
    (stage,) = place.stages
    for micro_batch in range(place.micro_batches):
        yield FORWARD, stage, micro_batch
    for micro_batch in range(place.micro_batches):
        yield BACKWARD, stage, micro_batch


def warmups(groups: int, chunks: int, micro_batches: int) -> dict[str, tuple[int, ...]]:
    """Return the named choices of in-flight depth per stage: all micro-batches."""
    return {"all": (micro_batches,) * (groups * chunks)}
