"""Cluster: the devices, and what connects them."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

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
    fault,
)

__all__ = ["PROBED", "Cluster", "Curve", "CurveKind", "Device", "Level", "Link", "Overlap"]

PROBED = "probed"
"""The name of a cluster that `autopar cluster probe` measured; one that a profile came with is `local`."""

Level = Literal["node", "network"]
CurveKind = Literal["p2p", "all_reduce", "all_gather", "reduce_scatter"]


class Device(Record):
    """An accelerator, or a CPU process."""

    type: Name
    """``cpu``, ``cuda``, or the name of a known GPU, such as ``H100-SXM``."""
    memory_bytes: Bytes
    node: Index = 0
    price_per_hour: float | None = Field(default=None, ge=0)


class Link(Record):
    """What connects two devices at one level of the topology."""

    level: Level
    latency_s: Seconds
    bytes_per_s: BytesPerSecond
    shared_by: Count = 1
    duplex: Literal["full", "half"] = "full"
    provenance: Provenance = "estimated"


class Curve(Record):
    """Seconds against message bytes, for one operation among ``ranks`` ranks.

    Sizes are those that nccl-tests state: of the whole vector that is reduced, gathered or scattered, not of a rank's
    part of it.
    """

    kind: CurveKind
    ranks: int = Field(ge=2, lt=2**31)
    level: Level
    sizes: tuple[Bytes, ...] = Field(min_length=1)
    seconds: tuple[Seconds, ...] = Field(min_length=1)
    provenance: Provenance = "measured"

    @model_validator(mode="after")
    def _sizes_ascend(self) -> Self:
        if len(self.sizes) != len(self.seconds):
            fault("seconds", f"{len(self.seconds)} seconds for {len(self.sizes)} sizes")
        if list(self.sizes) != sorted(set(self.sizes)):
            fault("sizes", "sizes must ascend without repeats")
        return self


class Overlap(Record):
    """How computing and communicating slow each other when they run at the same time."""

    level: Level
    compute: float = Field(ge=1)
    """Times as long a computation takes while its device communicates."""
    communication: float = Field(ge=1)
    """Times as long a communication takes while its devices compute."""
    provenance: Provenance = "measured"


class Cluster(Document):
    """Devices in a fixed order, which plans refer to by index."""

    KIND: ClassVar[str] = "cluster"

    format: Literal["autopar.cluster"] = "autopar.cluster"
    version: Literal[1] = 1
    name: Name = "local"
    backend: Name = "gloo"
    devices: tuple[Device, ...] = Field(min_length=1)
    links: tuple[Link, ...] = Field(min_length=1)
    curves: tuple[Curve, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    notes: tuple[Name, ...] = ()

    @model_validator(mode="after")
    def _nodes_are_linked(self) -> Self:
        levels = {link.level for link in self.links}
        if "node" not in levels:
            fault("links", 'no link of level "node"')
        if len({device.node for device in self.devices}) > 1 and "network" not in levels:
            fault("links", 'devices on several nodes need a link of level "network"')
        return self
