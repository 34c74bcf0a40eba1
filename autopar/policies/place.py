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

    def newest_at_forward(self, micro_batch: int) -> int:
        """Return how many updates there have been when the forward of a micro-batch comes; below 0 stands for 0.

        It comes behind the backward of ``depth`` micro-batches before.
        """
        return (micro_batch - self.depth + 1) // self.micro_batches

    def newest_at_backward(self, micro_batch: int) -> int:
        """Return how many there have been when its backward comes: those of the mini-batches before."""
        return micro_batch // self.micro_batches
