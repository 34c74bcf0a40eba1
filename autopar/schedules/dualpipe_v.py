"""DualPipeV: two stages per rank, laid to and fro; in its middle, a forward of one stage beside the other's backward.

DeepSeek-AI, "DualPipe", 2025 (DualPipeV, "cut in half"). Stages s and 2 P - 1 - s share the devices of group s of P.
Backwards are whole, but where their weight halves fill the pipeline's beginning and its end. What runs side by side
in the original, so that one's messages hide behind the other's computing, follows one another here: messages occupy no
rank. With f, b and w being a forward, backward and weight half of one of its stages, a rank idles between its first
computation and its last for at most the original's (P - 1) ((f + b) + b - 3 w), with f + b one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.formats.program import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD
from autopar.schedules.order import Computation, RankPlace, join_halves, number_micro_batches


def order(place: RankPlace) -> Iterator[Computation]:
    """Yield a rank's computations; depths are what follows from them.

    >>> from autopar.schedules.timetable import draw
    >>> print(draw("dualpipe-v", stages=4, micro_batches=3, groups=2))
    group 0: F0@0 F1@0 F2@0 F0@3 I0@3 W0@3 F1@3 B1@3 B1@3 F2@3 .    B0@0 B0@0 B2@3 B2@3 B1@0 B1@0 .    .    B2@0 B2@0
    group 1: .    F0@1 F0@2 F1@1 F1@2 F2@1 B0@2 B0@2 F2@2 B0@1 B0@1 B1@2 B1@2 B1@1 B1@1 B2@2 B2@2 B2@1 B2@1 .    .
    """
    return join_halves(number_micro_batches(_pattern(place), place.micro_batches))


def _pattern(place: RankPlace) -> Iterator[tuple[str, int]]:
    """Yield the eight phases of the original."""
    down, up = place.stages
    before, behind = place.group + 1, place.groups - place.group - 1
    micro_batches = max(place.micro_batches, 2 * place.groups)
    yield from [(FORWARD, down)] * (2 * behind)
    yield from [(FORWARD, down), (FORWARD, up)] * before
    yield from [(INPUT_BACKWARD, up), (WEIGHT_BACKWARD, up), (FORWARD, up)] * behind
    both = [(FORWARD, down), (BACKWARD, up), (FORWARD, up), (BACKWARD, down)]
    yield from both * (micro_batches - place.groups - behind)
    yield from both[1:] * behind
    draining = [up, down] * before
    yield from ((BACKWARD, stage) for stage in draining[:before])
    yield from ((INPUT_BACKWARD, stage) for stage in draining[before:])
    # Weight halves keep the order of their input halves.
    late = [(WEIGHT_BACKWARD, stage) for stage in draining[before:] + [down] * behind]
    for half in late[:behind]:
        yield half
        yield INPUT_BACKWARD, down
    yield from late[behind:]
