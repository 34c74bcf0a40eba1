"""Topology: the devices of a cluster, and which level connects some of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

from autopar.formats.cluster import LEVELS, Cluster, Device, Level
from autopar.formats.plan import Plan


def devices_of(cluster: Cluster, count: int) -> list[Device]:
    """Return as many devices; those beyond the ones that the cluster lists are like them, in turn.

    >>> from autopar.formats.cluster import Link
    >>> node = Link(level="node", latency_s=0.0, bytes_per_s=1e9)
    >>> two = Cluster(devices=tuple(Device(type="cpu", memory_bytes=size) for size in (1, 2)), links=(node,))
    >>> [device.memory_bytes for device in devices_of(two, 3)]
    [1, 2, 1]
    """
    return [cluster.devices[index % len(cluster.devices)] for index in range(count)]


class Topology:
    """Where devices stand: in a node, which is in a rack.

    Nodes of one rack are connected by the level ``rack`` where the cluster has a link of it, and otherwise like any two
    nodes.

    >>> from autopar.formats.cluster import Link
    >>> devices = [Device(type="cpu", memory_bytes=1, node=node, rack=node // 2) for node in (0, 0, 1, 2)]
    >>> links = [Link(level=level, latency_s=0.0, bytes_per_s=1e9) for level in LEVELS]
    >>> topology = Topology(Cluster(devices=tuple(devices), links=tuple(links)), devices)
    >>> topology.level((0, 1)), topology.level((0, 2)), topology.level((0, 1, 2, 3))
    ('node', 'rack', 'network')
    """

    def __init__(self, cluster: Cluster, devices: Sequence[Device]) -> None:
        self.levels = tuple(level for level in LEVELS if any(link.level == level for link in cluster.links))
        """Those that the cluster has links of, the nearest first."""
        self.nodes = tuple(device.node for device in devices)
        self.racks = tuple(device.rack if "rack" in self.levels else 0 for device in devices)

    @classmethod
    def of(cls, cluster: Cluster, plan: Plan) -> Topology:
        """Return where the devices of a plan stand, those that the cluster does not list among them."""
        return cls(cluster, devices_of(cluster, max(plan.devices) + 1))

    def among(self, devices: Sequence[int]) -> Topology:
        """Return where some of the devices stand, which are then counted from 0."""
        other = copy(self)
        other.nodes = tuple(self.nodes[device] for device in devices)
        other.racks = tuple(self.racks[device] for device in devices)
        return other

    def level(self, devices: Iterable[int]) -> Level:
        """Return the widest level that devices need to reach each other."""
        places = {(self.racks[device], self.nodes[device]) for device in devices}
        if len(places) <= 1:
            return "node"
        if "rack" in self.levels and len({rack for rack, _ in places}) == 1:
            return "rack"
        return "network"

    def pair(self, one: int, other: int) -> Level:
        """Return the level at which two devices reach each other."""
        if self.racks[one] != self.racks[other]:
            return "network"
        if self.nodes[one] == self.nodes[other]:
            return "node"
        return "rack" if "rack" in self.levels else "network"

    def between(self, some: Iterable[int], others: Iterable[int]) -> frozenset[Level]:
        """Return every level at which one of some devices reaches one of others."""
        here, there = self._nodes_by_rack(some), self._nodes_by_rack(others)
        found: set[Level] = set()
        for rack in here.keys() & there.keys():
            if here[rack] & there[rack]:
                found.add("node")
            if len(here[rack] | there[rack]) > 1:
                found.add("rack" if "rack" in self.levels else "network")
        if len(here.keys() | there.keys()) > 1 and here and there:
            found.add("network")
        return frozenset(found)

    def _nodes_by_rack(self, devices: Iterable[int]) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for device in devices:
            found.setdefault(self.racks[device], set()).add(self.nodes[device])
        return found

    def unit(self, device: int, level: Level) -> int:
        """Return what a device shares its way out to a level with: its node, or its rack where links lead out of it."""
        return self.racks[device] if level == "network" and "rack" in self.levels else self.nodes[device]
