"""ZB-V: two stages per rank, laid to and fro, with backwards in two halves; as much memory as 1F1B on every rank.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 6. Stages s and 2 P - 1 - s share the devices of group s of
P: the first group begins and ends a micro-batch's way, so that its backward comes early. Where forward, input half and
weight half take equally long and there are 2 P micro-batches or more, a rank idles for nothing but its turn to begin.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.formats.program import FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD
from autopar.schedules.order import Computation, RankPlace, depths, join_halves, number_micro_batches


def order(place: RankPlace) -> Iterator[Computation]:
    """Yield a rank's computations; ``warmups`` are what follows from them.

    >>> from autopar.schedules.timetable import draw
    >>> print(draw("zb-v", stages=4, micro_batches=3, groups=2))
    group 0: F0@0 F1@0 F2@0 F0@3 I0@3 W0@3 F1@3 I1@3 W1@3 B0@0 B0@0 F2@3 I2@3 W2@3 B1@0 B1@0 B2@0 B2@0 .
    group 1: .    F0@1 F0@2 F1@1 F1@2 I0@2 W0@2 F2@1 I0@1 W0@1 F2@2 I1@2 W1@2 I1@1 I2@2 I2@1 W1@1 W2@2 W2@1
    """
    return join_halves(number_micro_batches(_pattern(place), place.micro_batches))


def _pattern(place: RankPlace) -> Iterator[tuple[str, int]]:
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


def warmups(groups: int, chunks: int, micro_batches: int) -> dict[str, tuple[int, ...]]:
    """Return the in-flight depth per stage that the order implies; chunks are two.

    >>> warmups(2, 2, 4)
    {'all': (4, 3, 2, 1)}
    """
    return {"all": depths(order, "vee", groups, chunks, micro_batches)}
