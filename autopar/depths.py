"""Depths: how deep a stage of a pipeline that is never flushed is, and how far its weights are behind by that.

In: micro-batches in flight, and of a mini-batch. Out: how many updates there have been when a forward or a backward
comes, how late an update is, and how many updates a forward is ahead of; the same whichever weights are then seen,
which the policies say (:mod:`autopar.policies`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class UpdatesAhead(NamedTuple):
    """How many updates ahead weights are predicted; 0: the newest are seen."""

    forward: int
    backward: int


class StageDepths(NamedTuple):
    """How deep a stage of a pipeline that is never flushed is."""

    depth: int
    """Its micro-batches in flight, K_s."""
    first_depth: int
    """The first stage's, K_0."""
    micro_batches: int
    """Of a mini-batch, T: there is an update for every T of them."""
    lag: int = 0
    """Micro-batches whose backwards come between a mini-batch's last one and its update."""
    ahead: UpdatesAhead | None = None
    """Of ``predict``: how far predictions are ahead; None: as far as is counted."""

    @property
    def gradients(self) -> int:
        """Of how many mini-batches gradients are kept at a time."""
        return 1 - (-self.lag // self.micro_batches)

    def newest_at_forward(self, micro_batch: int) -> int:
        """Return how many updates there have been when the forward of a micro-batch comes; below 0 stands for 0.

        It comes behind the backward of ``depth`` micro-batches before.
        """
        return (micro_batch - self.depth - self.lag + 1) // self.micro_batches

    def newest_at_backward(self, micro_batch: int) -> int:
        """Return how many there have been when its backward comes: without a lag, those of the mini-batches before."""
        return (micro_batch - self.lag) // self.micro_batches


def sum_lag(stage: StageDepths) -> int:
    """Return how many micro-batches behind its last backward a stage begins the sum over all ranks.

    That is when the first stage, whose last backward is the last of all, does: a micro-batch before its own update.
    Between stages, backwards of a micro-batch are half as many others apart as the stages' depths.

    >>> [sum_lag(StageDepths(depth, 4, 4)) for depth in (4, 3, 2, 1)]
    [0, 0, 1, 1]
    """
    own = max(0, stage.first_depth - stage.depth)
    return max(0, stage.micro_batches - stage.first_depth) + own // 2


Ahead = Literal["counted", "xpipe"]
"""Where the d of :class:`autopar.policies.Predict` is from."""


def updates_ahead(stage: StageDepths) -> UpdatesAhead:
    """Return the d of :class:`autopar.policies.Predict`: the stage's own, or what is counted."""
    return stage.ahead or UpdatesAhead(-(-(stage.depth + stage.lag - 1) // stage.micro_batches), 0)


def xpipe_constants(stage: int, stages: int, micro_batches: int) -> UpdatesAhead:
    """Return XPipe's d of a stage.

    >>> [xpipe_constants(stage, 4, 4) for stage in range(2)]
    [UpdatesAhead(forward=2, backward=1), UpdatesAhead(forward=1, backward=1)]
    """
    twice = 2 * micro_batches
    forward = 2 * (stages + micro_batches - 2) - stage
    backward = 2 * (micro_batches + stage // 2 - 1)
    return UpdatesAhead((forward + micro_batches) // twice, (backward + micro_batches) // twice)


def delay(stage: StageDepths) -> float:
    """Return PipeMare's tau_s.

    >>> [delay(StageDepths(depth, 5, 4)) for depth in (5, 3, 1)]
    [1.0, 0.5, 0.0]
    """
    every = range(stage.micro_batches)
    return sum(-stage.newest_at_forward(each) for each in every) / len(every)


class Distances(NamedTuple):
    """How many updates behind the newest weights a micro-batch's forward and backward are, in a full pipeline."""

    forward: int
    backward: int
