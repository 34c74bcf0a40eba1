"""ZB-H2: ZB-H1 at twice the depth; no rank idles between its first computation and its last.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2. With P stages, f, i and w being a micro-batch's forward,
input half and weight half, a rank idles for (P - 1) (f + i - 2 w) and holds activations of up to 2 P - 1 micro-batches.
Ranks end as they began, one after the other: the step's end gains on ZB-H1 where i > w, or where messages take long,
and the next step begins earlier.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.schedules import one_forward_one_backward, zb_h1
from autopar.schedules.order import Computation, RankPlace


def order(place: RankPlace) -> Iterator[Computation]:
    """Yield a rank's computations: ZB-H1's, with weight halves late by two micro-batches for every stage before.

    >>> from autopar.schedules.timetable import draw
    >>> print(draw("zb-h2", stages=3, micro_batches=6))
    stage 0: F0 F1 F2 F3 F4 B0 B0 F5 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 .  .
    stage 1: .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
    stage 2: .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
    """
    return zb_h1.order_with_delay(place, 2 * place.group)


def warmups(groups: int, chunks: int, micro_batches: int) -> dict[str, tuple[int, ...]]:
    """Return the paper's in-flight depth per stage, DAPPLE's PB.

    >>> warmups(3, 1, 8)
    {'PB': (5, 3, 1)}
    """
    return {"PB": one_forward_one_backward.warmups(groups, chunks, micro_batches)["PB"]}
