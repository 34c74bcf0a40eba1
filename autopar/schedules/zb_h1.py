"""ZB-H1: 1F1B with backwards in two halves; the weight halves fill what were bubbles, in 1F1B's memory.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2. With P stages, f, i and w being a micro-batch's forward,
input half and weight half, a rank idles for (P - 1) (f + i - w) between its first computation and its last, of 1F1B's
(P - 1) (f + i + w); the s-th stage, from 0, holds activations of P - s micro-batches in flight and of s more whose
weight half is yet to come, no more than 1F1B's first stage.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.formats.program import FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD
from autopar.schedules import one_forward_one_backward
from autopar.schedules.order import Computation, RankPlace, join_halves


def order(place: RankPlace) -> Iterator[Computation]:
    """Yield a rank's computations: 1F1B's, with the weight half as many micro-batches late as stages lie before.

    >>> from autopar.schedules.timetable import draw
    >>> print(draw("zb-h1", stages=3, micro_batches=4))
    stage 0: F0 F1 F2 .  .  B0 B0 F3 B1 B1 B2 B2 B3 B3
    stage 1: .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    stage 2: .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return order_with_delay(place, place.group)


def order_with_delay(place: RankPlace, late: int) -> Iterator[Computation]:
    """Yield 1F1B's order in halves, weight halves being ``late`` micro-batches behind input halves.

    The first stage's are whole where nothing is late.
    """
    return join_halves(_halves(place, late))


def _halves(place: RankPlace, late: int) -> Iterator[Computation]:
    (stage,), (warmup,) = place.stages, place.warmups
    for micro_batch in range(warmup):
        yield FORWARD, stage, micro_batch
    for micro_batch in range(place.micro_batches):
        yield INPUT_BACKWARD, stage, micro_batch
        if micro_batch >= late:
            yield WEIGHT_BACKWARD, stage, micro_batch - late
        if warmup + micro_batch < place.micro_batches:
            yield FORWARD, stage, warmup + micro_batch
    for micro_batch in range(max(0, place.micro_batches - late), place.micro_batches):
        yield WEIGHT_BACKWARD, stage, micro_batch


def warmups(groups: int, chunks: int, micro_batches: int) -> dict[str, tuple[int, ...]]:
    """Return 1F1B's choices of in-flight depth per stage: the paper's is PA."""
    return one_forward_one_backward.warmups(groups, chunks, micro_batches)
