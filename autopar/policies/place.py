"""StagePlace: what a weight policy knows of a stage."""

from __future__ import annotations

from typing import NamedTuple


class StagePlace(NamedTuple):
    """Where a stage stands in a pipeline that is never flushed."""

    depth: int
    """Its micro-batches in flight, K_s."""
    first_depth: int
    """The first stage's, K_0."""
    micro_batches: int
    """Of a mini-batch, T: there is an update for every T of them."""
