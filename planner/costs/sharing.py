"""Sharing: which devices send through one port, and how computing and communicating slow each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.formats.cluster import Cluster, Device, Level, Link
from autopar.hardware.topology import Topology


class Port(NamedTuple):
    """What several transfers pass through; hashable, so that equal ones are the same."""

    level: Level
    link: int
    """Counts the links of the level."""
    unit: int
    """Node, or rack, see :meth:`Topology.unit`."""
    number: int
    """Counts the ports of a unit at this link."""
    direction: str
    """``out``, ``in``, or ``both`` of a half-duplex link."""


class Slowdown(NamedTuple):
    """Times as long each takes while the other runs on the device."""

    compute: float = 1.0
    communication: float = 1.0


@dataclass(frozen=True)
class Sharing:
    """What a cluster says of links that are shared and of work that overlaps."""

    topology: Topology
    places: dict[Level, tuple[int, ...]]
    """By level, the position of every device among those that share its way out."""
    links: dict[Level, tuple[Link, ...]] = field(default_factory=dict)
    """Those of levels of which one is shared."""
    slowdowns: dict[Level, Slowdown] = field(default_factory=dict)
    """Those above 1."""

    @classmethod
    def of(cls, cluster: Cluster, devices: Sequence[Device], bytes_per_s: float | None = None) -> Sharing:
        """Return what devices share; with ``bytes_per_s`` assumed of every link, as of the links' prices, no port.

        >>> link = Link(level="node", latency_s=0.0, bytes_per_s=1e9, shared_by=2)
        >>> cluster = Cluster(devices=(Device(type="cpu", memory_bytes=1),) * 4, links=(link,))
        >>> sharing = Sharing.of(cluster, cluster.devices)
        >>> [port.number for device in range(4) for port in sharing.ports("node", device, device, 1.0)[:1]]
        [0, 0, 1, 1]
        """
        topology = Topology(cluster, devices)
        places = {
            level: _counted([topology.unit(at, level) for at in range(len(devices))]) for level in topology.levels
        }
        links: dict[Level, tuple[Link, ...]] = {}
        for level in topology.levels if bytes_per_s is None else ():
            own = tuple(link for link in cluster.links if link.level == level)
            if any(link.shared_by > 1 or link.duplex == "half" for link in own):
                links[level] = own
        slowdowns: dict[Level, Slowdown] = {}
        for each in cluster.overlaps:
            if max(each.compute, each.communication) > 1:
                slowdowns.setdefault(each.level, Slowdown(each.compute, each.communication))
        return cls(topology, places, links, slowdowns)

    def among(self, devices: Sequence[int]) -> Sharing:
        """Return what some of the devices share, each at the port that it has."""
        places = {level: tuple(own[device] for device in devices) for level, own in self.places.items()}
        return replace(self, topology=self.topology.among(devices), places=places)

    def __bool__(self) -> bool:
        return bool(self.links or self.slowdowns)

    def level(self, devices: Sequence[int]) -> Level:
        """Return the level of what connects devices."""
        return self.topology.level(devices)

    def ports(self, level: Level, sender: int, receiver: int, seconds: float) -> tuple[Port, ...]:
        """Return what a transfer of some seconds passes from one device to another; nothing where that is not shared.

        Of several links of a level a transfer passes the one that moves most in its seconds: for a message that the
        links price, that is the one which is quickest for its size.
        """
        links = self.links.get(level)
        if links is None:
            return ()
        at = max(range(len(links)), key=lambda index: _moved(links[index], seconds))
        link = links[at]
        if link.shared_by == 1 and link.duplex == "full":
            return ()
        full = link.duplex == "full"
        ends = ((sender, "out" if full else "both"), (receiver, "in" if full else "both"))
        places, unit = self.places[level], self.topology.unit
        found = (
            Port(level, at, unit(device, level), places[device] // link.shared_by, direction)
            for device, direction in ends
        )
        return tuple(dict.fromkeys(found))

    def capacity(self, port: Port) -> int:
        """Return how many transfers at a time have the speed that they are priced at.

        The price of a shared link is that of one among ``shared_by`` senders, and in each of two directions where it
        is half-duplex.
        """
        return _shares(self.links[port.level][port.link])


def _shares(link: Link) -> int:
    return link.shared_by * (2 if link.duplex == "half" else 1)


def _moved(link: Link, seconds: float) -> float:
    """Return the bytes that a transfer moves in some seconds; the link's latency may leave it less than none."""
    return (seconds - link.latency_s) * link.bytes_per_s / _shares(link)


def _counted(units: Sequence[int]) -> tuple[int, ...]:
    counts: Counter[int] = Counter()
    places = []
    for unit in units:
        places.append(counts[unit])
        counts[unit] += 1
    return tuple(places)


class Traffic(NamedTuple):
    """Where the ranks of a program stand in a cluster."""

    sharing: Sharing
    devices: tuple[int, ...]
    """Device of every rank."""
