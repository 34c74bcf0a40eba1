"""Depths: how many micro-batches the stages of a plan keep in flight, and what they recompute for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from autopar.planner.candidate import Candidate, Family, Placed, with_depths, within
from autopar.planner.costs import CostModel

__all__ = ["DepthChoices", "depth_choices"]

MOST_VECTORS = 20_000
SLOPES = (2.0, 3.0, 1.5, 4.0, 1.0)
"""How many more than the stage behind a stage keeps in flight; 1 and 2 are DAPPLE's PA and PB."""


class DepthChoices(NamedTuple):
    """Candidates that differ in depths."""

    candidates: list[Candidate]
    complete: bool
    """Whether no other depths are possible."""
    closest: tuple[int, Candidate] | None
    """Of the candidates that do not fit, the one that lacks least, and how many bytes."""


def depth_choices(
    costs: CostModel,
    family: Family,
    stages: Sequence[Placed],
    levels: Sequence[Sequence[frozenset[int]]],
    *,
    exact: bool,
) -> DepthChoices:
    """Return the candidates whose stages keep at most their ``warmup`` in flight, and fit.

    ``levels`` are, by stage, sets of layers from which the smallest that fits is recomputed. With ``exact`` these are
    all candidates, unless they are too many.
    """
    most = [stage.warmup for stage in stages]
    complete = True
    if family.schedule == "gpipe":
        vectors = [tuple(stage.turns(0, family.micro_batches) for stage in stages)]
    elif exact and prod(most) <= MOST_VECTORS:
        vectors = list(_all(stages, family.micro_batches, most))
    else:
        vectors = _preferred(stages, family.micro_batches, most)
        complete = prod(most) <= 1
    found: list[Candidate] = []
    closest: tuple[int, Candidate] | None = None
    least = _least(stages, family.micro_batches)
    spare = [] if family.schedule == "gpipe" or least in vectors else [least]
    for vector in (*vectors, *spare):
        if found and vector in spare:
            # What holds least is for plans that fit no other way: a stage that leads another holds more messages.
            continue
        candidate, short = _fitting(costs, family, with_depths(family, stages, vector).stages, levels)
        if short <= 0:
            found.append(candidate)
        elif closest is None or short < closest[0]:
            closest = (short, candidate)
    return DepthChoices(found, complete, closest)


def _all(stages: Sequence[Placed], micro_batches: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every choice of depths; no stage has more in flight than the stage before, which would deadlock."""
    if not stages:
        yield ()
        return
    for others in _all(stages[1:], micro_batches, most[1:]):
        behind = 0
        if others:
            behind = min(micro_batches, stages[1]._replace(warmup=others[0]).in_flight)
        for depth in range(1, most[0] + 1):
            if min(micro_batches, stages[0]._replace(warmup=depth).in_flight) >= behind:
                yield (depth, *others)


def _preferred(stages: Sequence[Placed], micro_batches: int, most: Sequence[int]) -> list[tuple[int, ...]]:
    """Depths that grow steadily from the last stage to the first, as far as they fit; and as deep as fits."""
    found = []
    for slope in (*SLOPES, float(micro_batches)):
        vector: list[int] = []
        allowed = micro_batches
        for index, stage in enumerate(stages):
            width = len(stage.devices) if stage.division == "round-robin" else 1
            wanted = min(allowed, 1 + int(slope * (len(stages) - 1 - index)))
            if slope == micro_batches:
                wanted = allowed
            # Replicas that take turns keep as many between them as one that does not.
            depth = max(1, min(most[index], -(-wanted // width)))
            while depth > 1 and min(micro_batches, depth * width) > allowed:
                depth -= 1
            if min(micro_batches, depth * width) > allowed:
                # Replicas that take turns have one each in flight at least: more than the stage before has.
                break
            vector.append(depth)
            allowed = min(allowed, depth * width)
        if len(vector) == len(stages) and tuple(vector) not in found:
            found.append(tuple(vector))
    return found


def _least(stages: Sequence[Placed], micro_batches: int) -> tuple[int, ...]:
    """Return the least depths that do not deadlock."""
    vector: list[int] = []
    behind = 1
    for stage in reversed(stages):
        width = len(stage.devices) if stage.division == "round-robin" else 1
        vector.insert(0, -(-behind // width))
        behind = min(micro_batches, vector[0] * width)
    return tuple(vector)


def _fitting(
    costs: CostModel, family: Family, stages: Sequence[Placed], levels: Sequence[Sequence[frozenset[int]]]
) -> tuple[Candidate, int]:
    """Return the candidate that recomputes least, and by how many bytes it does not fit."""
    worst = -(2**62)
    chosen = list(stages)
    for index in range(len(chosen)):
        short = 0
        for level in levels[index]:
            recompute = within(level, chosen[index].first, chosen[index].stop)
            chosen[index] = chosen[index]._replace(recompute=recompute)
            short = costs.shortfall(Candidate(*family, tuple(chosen)), index)
            if short <= 0:
                break
        worst = max(worst, short)
    return Candidate(*family, tuple(chosen)), worst
