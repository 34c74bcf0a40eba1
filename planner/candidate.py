"""Candidate: a plan under consideration, without its numbers; and the families that candidates come in."""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

from autopar.errors import UsageError
from autopar.planner.options import PlanOptions
from autopar.schedules import SCHEDULES
from autopar.schedules.route import even_shares

__all__ = ["MOST_MICRO_BATCHES", "Candidate", "Family", "Placed", "divisors", "families", "place"]


MOST_MICRO_BATCHES = 4096
"""Counts above are searched only when asked for: a step of theirs is mostly latency, and long to simulate."""


class Placed(NamedTuple):
    """One stage of a candidate: layers ``first`` to ``stop - 1`` on ``devices``."""

    first: int
    stop: int
    devices: tuple[int, ...]
    shares: tuple[int, ...]
    warmup: int


class Family(NamedTuple):
    """What the search's outer loop runs over: all but the stages."""

    micro_batches: int
    micro_batch_size: int
    schedule: str
    depths: tuple[int, ...]
    """Most micro-batches in flight on a stage, by the number of stages behind it."""


class Candidate(NamedTuple):
    """A plan under consideration."""

    micro_batches: int
    micro_batch_size: int
    schedule: str
    stages: tuple[Placed, ...]

    def text(self) -> str:
        """Return the stages in the form that ``autopar plan --stages`` takes."""
        parts = []
        for stage in self.stages:
            last = stage.stop - 1
            layers = str(last) if stage.first == last else f"{stage.first}-{last}"
            parts.append(f"{layers}:{len(stage.devices)}")
        return ",".join(parts)


def place(family: Family, cuts: tuple[int, ...], widths: tuple[int, ...]) -> Candidate:
    """Return a candidate whose stages end before the layers ``cuts`` and take devices in cluster order.

    >>> place(Family(2, 4, "1f1b", (1, 2)), (3, 5), (2, 1)).text()
    '0-2:2,3-4:1'
    """
    stages = []
    first = device = 0
    for index, (stop, width) in enumerate(zip(cuts, widths, strict=True)):
        shares = even_shares(family.micro_batch_size, width)
        depth = family.depths[len(cuts) - 1 - index]
        stages.append(Placed(first, stop, tuple(range(device, device + width)), shares, depth))
        first, device = stop, device + width
    return Candidate(family.micro_batches, family.micro_batch_size, family.schedule, tuple(stages))


def divisors(batch: int) -> list[int]:
    """Return every micro-batch count of a batch, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [count for count in range(1, isqrt(batch) + 1) if batch % count == 0]
    return sorted({*small, *(batch // count for count in small)})


def families(batch: int, most_stages: int, options: PlanOptions) -> list[Family]:
    """Return every family that the options admit; those that hold less in flight stand first, so that they win ties.

    Raises:
        UsageError: the micro-batches asked for do not divide the batch.
    """
    every = divisors(batch)
    if options.micro_batches is not None and options.micro_batches not in every:
        asked = options.micro_batches
        near = sorted(sorted(every, key=lambda count: abs(count - asked))[:3])
        raise UsageError(
            f"--micro-batches {asked} does not divide the batch {batch}; near ones do: {', '.join(map(str, near))}"
        )
    counts = [count for count in every if count <= MOST_MICRO_BATCHES]
    if options.micro_batches is not None:
        counts = [options.micro_batches]
    names = sorted(SCHEDULES) if options.schedule == "auto" else [options.schedule]
    found: list[Family] = []
    for count in counts:
        seen: set[tuple[str, tuple[int, ...]]] = set()
        for name in names:
            for depths in SCHEDULES[name].warmups(most_stages, count).values():
                # In every schedule the depth depends on the stages behind alone; one micro-batch has a single order.
                backwards = depths[::-1]
                key = (name if count > 1 else "any", backwards)
                if key in seen:
                    continue
                seen.add(key)
                found.append(Family(count, batch // count, name, backwards))
    return found
