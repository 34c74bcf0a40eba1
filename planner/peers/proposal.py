"""Proposal: the stages that a peer's planner chose, without micro-batches and schedule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


class Proposal(NamedTuple):
    """Stages that end before the layers ``cuts``, and the devices of each."""

    cuts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]

    @property
    def widest(self) -> int:
        """Return the most replicas of a stage."""
        return max(map(len, self.devices))


def in_order(cuts: Sequence[int], widths: Sequence[int]) -> Proposal:
    """Return a proposal whose stages take devices in cluster order.

    >>> in_order((3, 5), (2, 1))
    Proposal(cuts=(3, 5), devices=((0, 1), (2,)))
    """
    edges = [0, *accumulate(widths)]
    return Proposal(tuple(cuts), tuple(tuple(range(start, stop)) for start, stop in pairwise(edges)))
