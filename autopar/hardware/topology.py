"""Topology: the devices of a cluster, which level connects some of them, and how these fill their nodes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from itertools import accumulate
from typing import NamedTuple, Self

from autopar.formats.cluster import LEVELS, Cluster, Curve, Device, Level
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


class Place(NamedTuple):
    """Where ranks stand that communicate with each other.

    The last three are 0 where nothing depends on them. Where only how many nodes there are, and the most on one, is 0,
    they are not known, and :attr:`fewest` is the most that it may be.
    """

    ranks: int = 1
    level: Level = "node"
    """That connects them."""
    nodes: int = 0
    fewest: int = 0
    """Ranks on the node that has fewest of them."""
    most: int = 0

    @classmethod
    def even(cls, nodes: int, per_node: int, level: Level = "network") -> Self:
        """Return as many ranks on each of some nodes, which a level connects.

        >>> Place.even(2, 8)
        Place(ranks=16, level='network', nodes=2, fewest=8, most=8)
        """
        return cls(nodes * per_node, level if nodes > 1 else "node", nodes, per_node, per_node)


ALONE = Place()


def place_of_curve(curve: Curve, cluster: Cluster) -> Place:
    """Return where the ranks of a cluster's curve stand.

    Of a curve that does not say how many nodes they stand on, they are on one node, if that is its level. Else they
    are one on each as far as there are nodes, and on as few nodes as hold them, if they are more. Only clusters that
    were made from a name had curves of whole nodes, as soon as ranks fill two.

    >>> from autopar.hardware.clusters import cluster_named
    >>> cluster = cluster_named("4x8xH100:400Gbps")
    >>> named = cluster.curves[-1].model_copy(update={"nodes": None, "ranks": 16})
    >>> place_of_curve(named, cluster)
    Place(ranks=16, level='network', nodes=2, fewest=8, most=8)
    >>> place_of_curve(named.model_copy(update={"ranks": 4, "provenance": "measured"}), cluster)
    Place(ranks=4, level='network', nodes=4, fewest=1, most=1)
    """
    if curve.level == "node":
        return Place.even(1, curve.ranks)
    sizes = sorted(Counter(device.node for device in cluster.devices).values(), reverse=True)
    nodes = curve.nodes or _nodes_of(curve, sizes)
    fewest = curve.ranks // nodes
    fewest = min(fewest, sizes[-1]) if nodes == len(sizes) else fewest
    return Place(curve.ranks, curve.level, nodes, fewest, -(-curve.ranks // nodes))


def _nodes_of(curve: Curve, sizes: Sequence[int]) -> int:
    """Return how many nodes ranks stand on where that is not said; ``sizes`` are those of all nodes, descending."""
    each = sizes[-1]
    if curve.provenance == "estimated" and curve.ranks >= 2 * each and curve.ranks % each == 0:
        return curve.ranks // each
    if curve.ranks <= len(sizes):
        return curve.ranks
    return max(2, min(len(sizes), 1 + bisect_left([*accumulate(sizes)], curve.ranks)))


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

    def place(self, devices: Sequence[int]) -> Place:
        """Return where some devices stand."""
        counts = Counter(map(self.nodes.__getitem__, devices)).values()
        return Place(len(devices), self.level(devices), len(counts), min(counts), max(counts))

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
