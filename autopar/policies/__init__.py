"""Weight policies: which weights the forwards and backwards of a pipeline that is never flushed see.

Version v of a stage's weights has v updates. Micro-batches m count through all mini-batches t, T of them each. K_s of
them are in flight on stage s, counted from 0. On stage s, forward and backward of m see the version

    stash           max(0, floor((m - K_s + 1) / T)): the newest when the forward comes
    vertical-sync   max(0, floor((m - K_0 + 1) / T)): the one that the first stage sees of m, on all stages
    2bw             max(0, t - 1): the one before the newest update of all
    predict         forward: predicted from the newest; backward: the newest, or predicted, too
    pipemare        forward: the newest; backward: the newest, corrected

and under ``sync``, with a flush at the end of every step, all see those of the step.

In: how deep a stage is, and a micro-batch. Out: the version of the weights that its forward and its backward see. Read
``policy.py`` first; :func:`distances` is what programs are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autopar.policies.pipemare import PipeMare
from autopar.policies.policy import Policy, StageDepths
from autopar.policies.predict import Ahead, Predict, xpipe_constants
from autopar.policies.stash import Stash
from autopar.policies.two_buffers import TwoBuffers
from autopar.policies.vertical_sync import VerticalSync

POLICIES: dict[str, Policy] = {
    "stash": Stash(),
    "vertical-sync": VerticalSync(),
    "2bw": TwoBuffers(),
    "predict": Predict(),
    "pipemare": PipeMare(),
}
"""By the name in a plan."""


def stage_depths(
    policy: Policy,
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


def distances(policy: Policy, stage: StageDepths, index: int) -> Distances:
    """Return the distances of the ``index``-th micro-batch of every mini-batch.

    While the pipeline fills, fewer updates have been made than that says: versions are then counted back from
    those that there are, and none is below 0.

    >>> stage = StageDepths(depth=3, first_depth=4, micro_batches=2)
    >>> [distances(POLICIES["stash"], stage, index) for index in range(2)]
    [Distances(forward=0, backward=1), Distances(forward=0, backward=1)]
    >>> [distances(POLICIES["vertical-sync"], stage, index) for index in range(2)]
    [Distances(forward=1, backward=2), Distances(forward=0, backward=1)]
    """
    newest, later = stage.newest_at_forward(index), stage.newest_at_backward(index)
    return Distances(newest - policy.forward_version(stage, index), later - policy.backward_version(stage, index))


def kept_versions(policy: Policy, stage: StageDepths) -> int:
    """Return how many versions of its weights a stage keeps, the newest among them."""
    every = [distances(policy, stage, index) for index in range(stage.micro_batches)]
    return 1 + max(max(each) for each in every)
