"""1F1B: a warm-up of forwards, then one forward and one backward in turn, with a flush at the end of the step.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", 2021, section 3.2 (early backward
scheduling and its warm-up policies PA and PB).

Interleaved, every rank runs several stages in turn, so that the first micro-batch soon reaches all ranks: Narayanan et
al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2. With P
groups, v stages each, and M micro-batches in rounds of P, a rank idles for (P - 1) (f + b) / v of a step, f and b being
all its stages' forward and backward of a micro-batch: 1F1B's bubble divided by v, for v times the messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

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


def interleaved_order(place: RankPlace) -> Iterator[Computation]:
    """Yield a rank's computations: a warm-up of forwards, then one forward and one backward in turn.

    Micro-batches run in rounds, one for every group's worth of them; a round passes through all stages of a rank before
    the next one begins. Depths are what follows from this.

    >>> from autopar.schedules.timetable import draw
    >>> print(draw("interleaved", stages=4, micro_batches=4, groups=2))
    group 0: F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 .    B2@2 .    B3@2 B2@0 B3@0
    group 1: .    F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1 .
    """
    rounds = list(_rounds(place))
    forwards = [(FORWARD, stage, each) for part in rounds for stage in place.stages for each in part]
    backwards = [(BACKWARD, stage, each) for part in rounds for stage in reversed(place.stages) for each in part]
    ahead = _ahead(place, len(rounds[0]))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


def _rounds(place: RankPlace) -> Iterator[range]:
    """Yield the micro-batches of every round: as many as there are groups, or a few more."""
    count = max(1, place.micro_batches // place.groups)
    edges = [-(-place.micro_batches * index // count) for index in range(count + 1)]
    for start, stop in pairwise(edges):
        yield range(start, stop)


def _ahead(place: RankPlace, first_round: int) -> int:
    """Return how many forwards a rank runs before its first backward."""
    ahead = (len(place.stages) - 1) * first_round + 2 * (place.groups - 1 - place.group)
    return min(ahead, place.micro_batches * len(place.stages))
