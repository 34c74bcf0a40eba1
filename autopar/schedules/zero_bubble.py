"""Zero bubble: backwards in two halves, whose weight halves fill what were bubbles. ZB-H1, ZB-H2 and ZB-V.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023. With P stages, f, i and w are a micro-batch's forward, input half
and weight half.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.formats.program import FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD
from autopar.schedules import one_forward_one_backward
from autopar.schedules.order import Computation, RankPlace, join_halves, number_micro_batches


def h1_order(place: RankPlace) -> Iterator[Computation]:
    """Yield a rank's computations: 1F1B's, with the weight half as many micro-batches late as stages lie before.

    ZB-H1 takes 1F1B's memory. A rank idles for (P - 1) (f + i - w) between its first computation and its last, of
    1F1B's (P - 1) (f + i + w); the s-th stage, from 0, holds activations of P - s micro-batches in flight and of s more
    whose weight half is yet to come, no more than 1F1B's first stage (section 2).

    >>> from autopar.schedules.timetable import draw
    >>> print(draw("zb-h1", stages=3, micro_batches=4))
    stage 0: F0 F1 F2 .  .  B0 B0 F3 B1 B1 B2 B2 B3 B3
    stage 1: .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    stage 2: .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return join_halves(_halves(place, place.group))


def _halves(place: RankPlace, late: int) -> Iterator[Computation]:
    """Yield 1F1B's order in halves, weight halves being ``late`` micro-batches behind input halves."""
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


def h2_order(place: RankPlace) -> Iterator[Computation]:
    """Yield a rank's computations: ZB-H1's, with weight halves late by two micro-batches for every stage before.

    ZB-H2 is ZB-H1 at twice the depth; no rank idles between its first computation and its last. A rank idles for
    (P - 1) (f + i - 2 w) and holds activations of up to 2 P - 1 micro-batches. Ranks end as they began, one after the
    other: the step's end gains on ZB-H1 where i > w, or where messages take long, and the next step begins earlier
    (section 2).

    >>> from autopar.schedules.timetable import draw
    >>> print(draw("zb-h2", stages=3, micro_batches=6))
    stage 0: F0 F1 F2 F3 F4 B0 B0 F5 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 .  .
    stage 1: .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
    stage 2: .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
    """
    return join_halves(_halves(place, 2 * place.group))


def h2_warmups(groups: int, chunks: int, micro_batches: int) -> dict[str, tuple[int, ...]]:
    """Return the paper's in-flight depth per stage, DAPPLE's PB.

    >>> h2_warmups(3, 1, 8)
    {'PB': (5, 3, 1)}
    """
    return {"PB": one_forward_one_backward.warmups(groups, chunks, micro_batches)["PB"]}


def v_order(place: RankPlace) -> Iterator[Computation]:
    """Yield a rank's computations: of two stages, laid to and fro, in as much memory as 1F1B on every rank.

    Stages s and 2 P - 1 - s share the devices of group s of P: the first group begins and ends a micro-batch's way, so
    that its backward comes early. Where forward, input half and weight half take equally long and there are 2 P
    micro-batches or more, a rank idles for nothing but its turn to begin (section 6). Depths are what follows.

    >>> from autopar.schedules.timetable import draw
    >>> print(draw("zb-v", stages=4, micro_batches=3, groups=2))
    group 0: F0@0 F1@0 F2@0 F0@3 I0@3 W0@3 F1@3 I1@3 W1@3 B0@0 B0@0 F2@3 I2@3 W2@3 B1@0 B1@0 B2@0 B2@0 .
    group 1: .    F0@1 F0@2 F1@1 F1@2 I0@2 W0@2 F2@1 I0@1 W0@1 F2@2 I1@2 W1@2 I1@1 I2@2 I2@1 W1@1 W2@2 W2@1
    """
    return join_halves(number_micro_batches(_v_pattern(place), place.micro_batches))


def _v_pattern(place: RankPlace) -> Iterator[tuple[str, int]]:
    down, up = place.stages
    before, behind = place.group, place.groups - place.group
    # As few as fill the pipeline; those that there are not are left out.
    micro_batches = max(place.micro_batches, 2 * place.groups - 1)
    downward = [(FORWARD, down), (INPUT_BACKWARD, down), (WEIGHT_BACKWARD, down)]
    upward = [(FORWARD, up), (INPUT_BACKWARD, up), (WEIGHT_BACKWARD, up)]
    yield from downward[:1] * (2 * behind - 1)
    yield from (upward[:1] + downward[:1]) * before
    yield from upward * behind
    yield from (downward + upward) * (micro_batches - place.groups - behind + 1)
    yield from (downward[1:] + upward) * (behind - 1)
    yield from (downward[1:2] + upward[1:2]) * before
    yield from downward[1:] * behind
    yield from upward[2:] * before
    yield from downward[2:] * before
