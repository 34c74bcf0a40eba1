"""Cluster: the devices, and what connects them."""

from __future__ import annotations

from typing import ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from autopar.formats.document import (
    Bytes,
    BytesPerSecond,
    Count,
    Document,
    Index,
    Name,
    Provenance,
    Record,
    Seconds,
    SparseRecord,
    ascending,
    each_once,
    fault,
)

PROBED = "probed"
"""The name of a cluster that `autopar cluster probe` measured; one that a profile came with is `local`."""

Level = Literal["node", "rack", "network"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""The nearest first: within a node, between the nodes of a rack, between any others."""
CurveKind = Literal["p2p", "all_reduce", "all_gather", "reduce_scatter"]


class Device(SparseRecord):
    """An accelerator, or a CPU process."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("power_w",)

    type: Name
    """``cpu``, ``cuda``, or the name of a known GPU, such as ``H100-SXM``."""
    memory_bytes: Bytes
    """All of its memory."""
    node: Index = 0
    """Which machine it is in, from 0."""
    rack: Index = 0
    """Of the node; tells nodes apart where the cluster has links of level ``rack``."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """In any one currency; null: not known."""
    power_w: float | None = Field(default=None, gt=0, lt=1e6)
    """Of its board under load; null: as its data sheet says, where its type is known."""


class Link(Record):
    """What connects two devices at one level of the topology.

    Several links of one level are ways beside each other: a transfer takes the one that is quickest for its size.
    """

    level: Level
    """What it connects: devices within a node, a rack, or beyond."""
    latency_s: Seconds
    """Before the first byte arrives."""
    bytes_per_s: BytesPerSecond
    """In one direction."""
    shared_by: Count = 1
    """Devices that share it, and divide its bandwidth where they send at once."""
    duplex: Literal["full", "half"] = "full"
    """Whether both directions have the bandwidth at once."""
    provenance: Provenance = "estimated"
    """Where the numbers come from."""


class Curve(SparseRecord):
    """Seconds against message bytes, for one operation among ``ranks`` ranks.

    Sizes are those that nccl-tests state: of the whole vector that is reduced, gathered or scattered, not of a rank's
    part of it.
    """

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("nodes",)

    kind: CurveKind
    """The operation."""
    ranks: int = Field(ge=2, lt=2**31)
    """How many take part."""
    level: Level
    """What connects them."""
    nodes: int | None = Field(default=None, ge=1, lt=2**31)
    """How many nodes the ranks stand on, about as many on each; null: see
    :func:`autopar.hardware.topology.place_of_curve`."""
    sizes: tuple[Bytes, ...] = Field(min_length=1)
    """Of messages, ascending."""
    seconds: tuple[Seconds, ...] = Field(min_length=1)
    """For each size."""
    provenance: Provenance = "measured"
    """Where the numbers come from."""

    @model_validator(mode="after")
    def _sizes_ascend(self) -> Self:
        if len(self.sizes) != len(self.seconds):
            fault("seconds", f"{len(self.seconds)} seconds for {len(self.sizes)} sizes")
        ascending(self.sizes, "sizes", "sizes")
        return self

    @model_validator(mode="after")
    def _nodes_have_ranks(self) -> Self:
        if self.nodes is not None and ((self.level == "node") != (self.nodes == 1) or self.nodes > self.ranks):
            fault("nodes", f'{self.nodes} nodes of {self.ranks} ranks at level "{self.level}"')
        return self


class Overlap(Record):
    """How computing and communicating slow each other when they run at the same time."""

    level: Level
    """What connects the devices."""
    compute: float = Field(ge=1)
    """Times as long a computation takes while its device communicates."""
    communication: float = Field(ge=1)
    """Times as long a communication takes while its devices compute."""
    provenance: Provenance = "measured"
    """Where the numbers come from."""


class Cluster(Document):
    """Devices in a fixed order, which plans refer to by index."""

    format: Literal["autopar.cluster"] = "autopar.cluster"
    version: Literal[1] = 1
    name: Name = "local"
    """What it is called; ``local`` of one that a profile came with."""
    backend: Name = "gloo"
    """What carries tensors between ranks, such as ``gloo`` or ``nccl``."""
    devices: tuple[Device, ...] = Field(min_length=1)
    """In the order to which plans refer."""
    links: tuple[Link, ...] = Field(min_length=1)
    """What connects them."""
    curves: tuple[Curve, ...] = ()
    """Measured times of operations, in place of what links say."""
    overlaps: tuple[Overlap, ...] = ()
    """How computing and communicating slow each other."""
    notes: tuple[Name, ...] = ()
    """What a reader should know."""

    @model_validator(mode="after")
    def _nodes_are_linked(self) -> Self:
        levels = {link.level for link in self.links}
        if "node" not in levels:
            fault("links", 'no link of level "node"')
        racks: dict[int, int] = {}
        for index, device in enumerate(self.devices):
            if racks.setdefault(device.node, device.rack) != device.rack:
                at, found = f"devices[{index}].rack", f"node {device.node} is in rack {racks[device.node]}"
                fault(at, f"{found} by the devices before it, and in rack {device.rack} by this one")
        apart = len(set(racks.values())) if "rack" in levels else len(racks)
        if apart > 1 and "network" not in levels:
            what = "in several racks" if "rack" in levels else "on several nodes"
            fault("links", f'devices {what} need a link of level "network"')
        return self

    @model_validator(mode="after")
    def _curves_are_of_links(self) -> Self:
        levels = {link.level for link in self.links}
        seen: dict[tuple[CurveKind, int, Level, int | None], int] = {}
        for index, curve in enumerate(self.curves):
            if curve.level not in levels:
                fault(f"curves[{index}].level", f'there is a curve, but no link, of level "{curve.level}"')
            p2p = curve.kind == "p2p"
            key = curve.kind, 2 if p2p else curve.ranks, curve.level, None if p2p else curve.nodes
            if seen.setdefault(key, index) != index:
                what = "operation, ranks and level" if curve.nodes is None else "operation, ranks, level and nodes"
                fault(f"curves[{index}]", f"curves[{seen[key]}] is of the same {what}; keep one")
        each_once((overlap.level for overlap in self.overlaps), "overlaps[{}].level", "level")
        return self
