"""Depths: how deep a stage of a pipeline that is never flushed is, and how far its weights are behind by that.

In: micro-batches in flight, and of a mini-batch. Out: how many updates there have been when a forward or a backward
comes, how late an update is, and how many updates a forward is ahead of; the same whichever weights are then seen,
which the policies say (:mod:`autopar.policies`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol


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


class _Rule(Protocol):
    """A weight policy, as far as depths ask it."""

    @property
    def sums_gradients(self) -> bool:
        """Whether updates come so late that sums over stages have ended by then."""

    def lag(self, stage: StageDepths) -> int:
        """Return how many micro-batches later than it could be an update is."""

    def forward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """Return the version that the forward of a micro-batch sees."""

    def backward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """Return the version that its backward sees."""


def stage_depths(
    policy: _Rule,
    depths: Sequence[int],
    micro_batches: int,
    shared_by: Iterable[Sequence[int]] = (),
    ahead: Ahead = "counted",
) -> list[StageDepths]:
    """Return how deep every stage is, and how late its updates come.

    Stages that share a parameter add up its gradients, which are there when the first of them has its own. Until then,
    the others do not wait: they go on for as many micro-batches as backwards are apart.

    Args:
        policy: of the pipeline.
        depths: micro-batches in flight of every stage.
        micro_batches: of a mini-batch.
        shared_by: of every parameter that stages share, these stages.
        ahead: how far ``predict`` predicts.

    >>> from autopar.policies import POLICIES
    >>> [each.lag for each in stage_depths(POLICIES["stash"], [4, 3, 2, 1], 1, [[0, 3]])]
    [0, 0, 0, 2]
    """
    found = [StageDepths(depth, depths[0], micro_batches) for depth in depths]
    if ahead == "xpipe":
        count = len(depths)
        found = [each._replace(ahead=xpipe_constants(at, count, micro_batches)) for at, each in enumerate(found)]
    lags = [policy.lag(each) for each in found]
    # Where updates are late anyway, the sums have ended by then.
    for first, *others in shared_by if not policy.sums_gradients else ():
        for stage in others:
            lags[stage] = max(lags[stage], -(-(depths[first] - depths[stage]) // 2))
    return [each._replace(lag=lag) for each, lag in zip(found, lags, strict=True)]


class Distances(NamedTuple):
    """How many updates behind the newest weights a micro-batch's forward and backward are, in a full pipeline."""

    forward: int
    backward: int


def distances(policy: _Rule, stage: StageDepths, index: int) -> Distances:
    """Return the distances of the ``index``-th micro-batch of every mini-batch.

    While the pipeline fills, fewer updates have been made than that says: versions are then counted back from
    those that there are, and none is below 0.

    >>> from autopar.policies import POLICIES
    >>> stage = StageDepths(depth=3, first_depth=4, micro_batches=2)
    >>> [distances(POLICIES["stash"], stage, index) for index in range(2)]
    [Distances(forward=0, backward=1), Distances(forward=0, backward=1)]
    >>> [distances(POLICIES["vertical-sync"], stage, index) for index in range(2)]
    [Distances(forward=1, backward=2), Distances(forward=0, backward=1)]
    """
    newest, later = stage.newest_at_forward(index), stage.newest_at_backward(index)
    return Distances(newest - policy.forward_version(stage, index), later - policy.backward_version(stage, index))


def kept_versions(policy: _Rule, stage: StageDepths) -> int:
    """Return how many versions of its weights a stage keeps, the newest among them."""
    every = [distances(policy, stage, index) for index in range(stage.micro_batches)]
    return 1 + max(max(each) for each in every)
