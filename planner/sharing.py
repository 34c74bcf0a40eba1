"""Sharing: which devices send through one port, and how computing and communicating slow each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.formats.cluster import Cluster, Device, Level, Link

__all__ = ["Port", "Sharing", "Slowdown", "Traffic"]


class Port(NamedTuple):
    """What several transfers pass through; hashable, so that equal ones are the same."""

    level: Level
    node: int
    number: int
    """Counts the ports of a node at this level."""
    direction: str
    """``out``, ``in``, or ``both`` of a half-duplex link."""


class Slowdown(NamedTuple):
    """Times as long each takes while the other runs on the device."""

    compute: float = 1.0
    communication: float = 1.0


@dataclass(frozen=True)
class Sharing:
    """What a cluster says of links that are shared and of work that overlaps."""

    nodes: tuple[int, ...]
    """Node of every device."""
    places: tuple[int, ...]
    """Position of every device among those of its node."""
    links: dict[Level, Link] = field(default_factory=dict)
    """Those that are shared."""
    slowdowns: dict[Level, Slowdown] = field(default_factory=dict)
    """Those above 1."""

    @classmethod
    def of(cls, cluster: Cluster, devices: Sequence[Device], bytes_per_s: float | None = None) -> Sharing:
        """Return what devices share; with ``bytes_per_s`` assumed of every link, as of the links' prices, no port.

        >>> link = Link(level="node", latency_s=0.0, bytes_per_s=1e9, shared_by=2)
        >>> cluster = Cluster(devices=(Device(type="cpu", memory_bytes=1),) * 4, links=(link,))
        >>> sharing = Sharing.of(cluster, cluster.devices)
        >>> [port.number for device in range(4) for port in sharing.ports("node", device, device)[:1]]
        [0, 0, 1, 1]
        """
        counts: dict[int, int] = {}
        places = []
        for device in devices:
            places.append(counts.get(device.node, 0))
            counts[device.node] = places[-1] + 1
        links: dict[Level, Link] = {}
        for link in cluster.links:
            links.setdefault(link.level, link)
        shared = {level: link for level, link in links.items() if link.shared_by > 1 or link.duplex == "half"}
        slowdowns: dict[Level, Slowdown] = {}
        for each in cluster.overlaps:
            if max(each.compute, each.communication) > 1:
                slowdowns.setdefault(each.level, Slowdown(each.compute, each.communication))
        nodes = tuple(device.node for device in devices)
        return cls(nodes, tuple(places), shared if bytes_per_s is None else {}, slowdowns)

    def among(self, devices: Sequence[int]) -> Sharing:
        """Return what some of the devices share, each at the port that it has."""
        nodes, places = ([each[device] for device in devices] for each in (self.nodes, self.places))
        return replace(self, nodes=tuple(nodes), places=tuple(places))

    def __bool__(self) -> bool:
        return bool(self.links or self.slowdowns)

    def level(self, devices: Sequence[int]) -> Level:
        """Return the level of what connects devices."""
        return "node" if len({self.nodes[device] for device in devices}) <= 1 else "network"

    def ports(self, level: Level, sender: int, receiver: int) -> tuple[Port, ...]:
        """Return what a transfer from one device to another passes through; nothing where the link is not shared."""
        link = self.links.get(level)
        if link is None:
            return ()
        full = link.duplex == "full"
        ends = ((sender, "out" if full else "both"), (receiver, "in" if full else "both"))
        found = (
            Port(level, self.nodes[device], self.places[device] // link.shared_by, direction)
            for device, direction in ends
        )
        return tuple(dict.fromkeys(found))

    def capacity(self, port: Port) -> int:
        """Return how many transfers at a time have the speed that they are priced at.

        The price of a shared link is that of one among ``shared_by`` senders, and in each of two directions where it
        is half-duplex.
        """
        link = self.links[port.level]
        return link.shared_by * (2 if link.duplex == "half" else 1)


class Traffic(NamedTuple):
    """Where the ranks of a program stand in a cluster."""

    sharing: Sharing
    devices: tuple[int, ...]
    """Device of every rank."""
