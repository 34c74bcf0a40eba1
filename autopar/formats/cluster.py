"""Cluster: the devices, and what connects them."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from autopar.formats.document import Bytes, BytesPerSecond, Count, Document, Index, Name, Record, Seconds, fault

__all__ = ["Cluster", "Curve", "Device", "Link"]

Level = Literal["node", "network"]


class Device(Record):
    """An accelerator, or a CPU process."""

    type: Name
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
    provenance: Literal["measured", "interpolated", "estimated"] = "estimated"


class Curve(Record):
    """Measured seconds against message bytes, for one operation among ``ranks`` ranks."""

    kind: Literal["p2p", "all_reduce"]
    ranks: int = Field(ge=2, lt=2**31)
    level: Level
    sizes: tuple[Bytes, ...] = Field(min_length=1)
    seconds: tuple[Seconds, ...] = Field(min_length=1)
    provenance: Literal["measured", "interpolated", "estimated"] = "measured"

    @model_validator(mode="after")
    def _sizes_ascend(self) -> Self:
        if len(self.sizes) != len(self.seconds):
            fault("seconds", f"{len(self.seconds)} seconds for {len(self.sizes)} sizes")
        if list(self.sizes) != sorted(set(self.sizes)):
            fault("sizes", "sizes must ascend without repeats")
        return self


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
    notes: tuple[Name, ...] = ()

    @model_validator(mode="after")
    def _nodes_are_linked(self) -> Self:
        levels = {link.level for link in self.links}
        if "node" not in levels:
            fault("links", 'no link of level "node"')
        if len({device.node for device in self.devices}) > 1 and "network" not in levels:
            fault("links", 'devices on several nodes need a link of level "network"')
        return self
