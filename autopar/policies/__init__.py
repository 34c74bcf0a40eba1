"""Weight policies: which weights the forwards and backwards of a pipeline that is never flushed see.

In: where a stage stands, and a micro-batch. Out: the version of the weights that its forward and its backward see;
version v has v updates. Read ``stash.py`` first; :func:`distances` is what programs are made of.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from autopar.policies import pipemare, predict, stash, two_buffers, vertical_sync
from autopar.policies.place import StagePlace


class Policy(Protocol):
    """A weight policy: one file, free of torch."""

    PREPARES: str
    """Makes ready weights that are no version: ``predict``, those of forwards; ``correct``, of backwards; or none."""

    def forward_version(self, place: StagePlace, micro_batch: int) -> int:
        """Return the version that the forward of a micro-batch sees; below 0 stands for 0.

        Micro-batches are counted through all mini-batches from the last drain on.
        """

    def backward_version(self, place: StagePlace, micro_batch: int) -> int:
        """Return the version that its backward sees."""

    def least_micro_batches(self, first_depth: int) -> int:
        """Return the fewest micro-batches of a mini-batch with which the rule holds."""

    def buffers(self, place: StagePlace) -> int:
        """Return how often a stage keeps as much as its weights, beside their versions."""


POLICIES: dict[str, Policy] = {
    "stash": stash,
    "vertical-sync": vertical_sync,
    "2bw": two_buffers,
    "predict": predict,
    "pipemare": pipemare,
}
"""By the name in a plan."""


class Distances(NamedTuple):
    """How many updates behind the newest weights a micro-batch's forward and backward are, in a full pipeline."""

    forward: int
    backward: int


def distances(policy: Policy, place: StagePlace, index: int) -> Distances:
    """Return the distances of the ``index``-th micro-batch of every mini-batch.

    While the pipeline fills, fewer updates have been made than that says: versions are then counted back from
    those that there are, and none is below 0.

    >>> place = StagePlace(depth=3, first_depth=4, micro_batches=2)
    >>> [distances(POLICIES["stash"], place, index) for index in range(2)]
    [Distances(forward=0, backward=1), Distances(forward=0, backward=1)]
    >>> [distances(POLICIES["vertical-sync"], place, index) for index in range(2)]
    [Distances(forward=1, backward=2), Distances(forward=0, backward=1)]
    """
    newest, later = place.newest_at_forward(index), place.newest_at_backward(index)
    return Distances(newest - policy.forward_version(place, index), later - policy.backward_version(place, index))


def kept_versions(policy: Policy, place: StagePlace) -> int:
    """Return how many versions of its weights a stage keeps, the newest among them."""
    every = [distances(policy, place, index) for index in range(place.micro_batches)]
    return 1 + max(max(each) for each in every)
