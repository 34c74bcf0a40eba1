"""Stages: what one holds, what crosses between them, and on which devices a schedule lays them out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from autopar.formats.cuts import ParameterCut, SequenceCut
from autopar.formats.document import MOST_RANKS, Bytes, Count, Index, Name, Record, SparseRecord
from autopar.ownership import Division, Replicas, Shard

Layout = Literal["line", "loop", "vee"]
LAYOUTS: dict[str, Layout] = {
    "gpipe": "line",
    "1f1b": "line",
    "interleaved": "loop",
    "zb-h1": "line",
    "zb-h2": "line",
    "zb-v": "vee",
    "dualpipe-v": "vee",
}
"""By schedule; a plan names one of these."""


def layout_of(schedule: str) -> Layout:
    """Return how a schedule lays its stages out."""
    return LAYOUTS.get(schedule, "line")


def chunks_of(layout: Layout) -> int | None:
    """Return how many stages a group holds; None where it is as many as one likes.

    >>> chunks_of("line"), chunks_of("loop"), chunks_of("vee")
    (1, None, 2)
    """
    return {"line": 1, "loop": None, "vee": 2}[layout]


def group_of(layout: Layout, stage: int, groups: int) -> int:
    """Return the group of devices that holds a stage.

    Stages go round the groups (``loop``), or to and fro (``vee``).

    >>> [group_of("loop", stage, 3) for stage in range(6)], [group_of("vee", stage, 3) for stage in range(6)]
    ([0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0])
    """
    turn, at = divmod(stage, groups)
    return groups - 1 - at if layout == "vee" and turn % 2 else at


def groups_of(devices: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Return the stages of every group, given the devices of every stage.

    >>> groups_of([(0, 1), (2,), (2,), (0, 1)])
    ((0, 3), (1, 2))
    """
    found: dict[Hashable, list[int]] = {}
    for stage, each in enumerate(devices):
        found.setdefault(each, []).append(stage)
    return tuple(map(tuple, found.values()))


def layers_text(first: int, stop: int) -> str:
    """Return layers ``first:stop`` in the form that ``autopar plan --stages`` takes: 2-4, or 2 where it is one."""
    return str(first) if stop == first + 1 else f"{first}-{stop - 1}"


Rows = Annotated[float, Field(gt=0, lt=2**31)]


class Stage(SparseRecord):
    """Consecutive layers placed together on one or more devices."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("cuts", "sequence")

    layers: tuple[Name, ...] = Field(min_length=1)
    """Layers, by the names in the profile."""
    devices: tuple[Annotated[int, Field(ge=0, lt=MOST_RANKS)], ...] = Field(min_length=1)
    """Indices into the cluster's devices; replica ``i`` runs on ``devices[i]``, or on the ``i``-th ``tensor_parallel``
    of them."""
    tensor_parallel: Count = 1
    """Devices that run a replica together, a team: each has its part of the layers."""
    cuts: tuple[ParameterCut, ...] = ()
    """Which indices of parameters each rank of a team has; of others it has all. None of Piper's plans, which say how
    many devices run a replica, and not how: such a plan can be neither simulated nor run."""
    sequence: tuple[SequenceCut, ...] = ()
    """Tensors between layers of which each rank of a team has a slice of the sequence; of others it has all."""
    division: Division = "split"
    """How a micro-batch meets the replicas: each takes its share of the rows of every one (``split``), or they take
    whole ones in turn (``round-robin``)."""
    shares: tuple[Count | Rows, ...]
    """Rows of a micro-batch that each replica takes, in row order; a fraction only where the plan is ``divisible``."""
    warmup: Count
    """Most micro-batches in flight on a replica."""
    recompute: tuple[Name, ...] = ()
    """Layers that keep nothing but their inputs, and run forward again before their backward."""
    shard: Shard = "none"
    """What the replicas divide among them: each of ``optimizer`` (state), ``gradients`` and ``parameters`` stands for
    itself and those named before it."""

    types: tuple[Name, ...] = ()
    """Kinds of the devices, each once, as the profile names them; empty where it has costs for one kind only."""

    @property
    def sequence_dims(self) -> dict[str, int]:
        """The dimensions of ``sequence``, by tensor."""
        return {each.tensor: each.dim for each in self.sequence}

    def cut(self, parameter: str) -> ParameterCut | None:
        """Return how a parameter is cut; None where it is whole."""
        return next((cut for cut in self.cuts if cut.parameter == parameter), None)

    @property
    def replication(self) -> Replicas:
        """How it is replicated."""
        return Replicas(self.replicas, self.division, self.shard, self.tensor_parallel, bool(self.sequence))

    @property
    def replicas(self) -> int:
        """How many copies of the stage there are."""
        return len(self.devices) // self.tensor_parallel

    @property
    def rows(self) -> tuple[int, ...]:
        """The shares of a plan that is not ``divisible``."""
        return tuple(int(share) for share in self.shares)

    @property
    def period(self) -> int:
        """Micro-batches from one of a replica's to its next; 1 where all have a share of each."""
        return self.replication.period

    @property
    def in_flight(self) -> int:
        """Most micro-batches in flight on all replicas together."""
        return self.warmup * self.period


class Crossing(Record):
    """A tensor made in one stage and read in later ones."""

    name: Name
    """What it is called."""
    producer: Index
    """Stage that makes it."""
    consumers: tuple[Index, ...] = Field(min_length=1)
    """Later stages that read it, ascending."""
    bytes_per_sample: Bytes
    """Its size, for one sample."""
    dtype: Name
    """As torch names it."""
    gradient: bool
    """Whether a gradient flows back over it."""

    def moved(self, stages: int) -> Self:
        """Return it between stages that are so many further on."""
        consumers = tuple(each + stages for each in self.consumers)
        return self.model_copy(update={"producer": self.producer + stages, "consumers": consumers})


class SharedParameter(Record):
    """A parameter used by layers of several stages; its gradients are summed over all their ranks."""

    parameter: Name
    """By the model's own name."""
    stages: tuple[Index, ...] = Field(min_length=2)
    """Those that use it, ascending."""
    bytes: Bytes
    """Its size."""

    def moved(self, stages: int) -> Self:
        """Return it of stages that are so many further on."""
        return self.model_copy(update={"stages": tuple(each + stages for each in self.stages)})


class SharedLayers(NamedTuple):
    """Layers that the same ranks hold, one of each pipeline."""

    ranks: tuple[int, ...]
    """By pipeline, ascending."""
    layers: tuple[str, ...]
