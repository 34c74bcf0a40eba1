"""Communication: seconds of messages and collectives, who shares links, and what travels between ranges of layers.

Seconds follow from a cluster's measured curves (:mod:`autopar.planner.costs.curves`), or, where it has none, from
latencies and bandwidths, as rings. Sharing tells which devices send through one port, and how computing and
communicating slow each other. Flows tell which tensors, how many bytes, travel between layers, and which parameters
these share.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, count
from typing import NamedTuple

import numpy as np

from autopar.formats.cluster import Cluster, CurveKind, Device, Level, Link, Overlap
from autopar.formats.document import Provenance
from autopar.formats.profile import Layer, Profile
from autopar.hardware.topology import Place, Topology, place_of_curve
from autopar.planner.candidate import Lead
from autopar.planner.costs import memoize
from autopar.planner.costs.curves import ROUNDS, Collective, CollectiveCurves, MonotoneCurve, Numbers


class LinkModel:
    """Prices of communication between devices; times never fall as messages grow, which the bounds rely on."""

    def __init__(
        self,
        cluster: Cluster,
        devices: Sequence[Device],
        bytes_per_s: float | None = None,
        *,
        latencies: bool = True,
    ) -> None:
        """Read a cluster's links and curves, in place of which every link may have ``bytes_per_s``.

        With ``latencies``, a link that has no curve has its latency.
        """
        self._stand(Topology(cluster, devices))
        self._free = bytes_per_s == float("inf")
        self._ways: dict[Level, list[Link]] = {}
        """With the bandwidth of a transfer, while all that share the link send."""
        self._messages: dict[Level, MonotoneCurve] = {}
        self._collectives: dict[tuple[CurveKind, Level], CollectiveCurves] = {}
        for link in cluster.links:
            rate, known = link.bytes_per_s / _shares(link), "estimated" if bytes_per_s else link.provenance
            latency_s = link.latency_s if latencies else 0.0
            way = {"latency_s": latency_s, "bytes_per_s": bytes_per_s or rate, "provenance": known}
            self._ways.setdefault(link.level, []).append(link.model_copy(update=way))
        if bytes_per_s is None:
            self._add_curves(cluster)

    def _add_curves(self, cluster: Cluster) -> None:
        for curve in cluster.curves:
            # What a curve does not say of large messages, the link of most bandwidth does.
            line = MonotoneCurve(curve, max(way.bytes_per_s for way in self._ways[curve.level]))
            if curve.kind == "p2p":
                self._messages.setdefault(curve.level, line)
                continue
            key = curve.kind, curve.level
            if key not in self._collectives:
                self._collectives[key] = CollectiveCurves(partial(self._ring_s, *key))
            self._collectives[key].add(place_of_curve(curve, cluster), line)

    def among(self, devices: Sequence[int]) -> LinkModel:
        """Return the prices between some of the devices, which are then counted from 0."""
        other = copy(self)
        other._stand(self.topology.among(devices))
        return other

    def _stand(self, topology: Topology) -> None:
        self.topology, self._level = topology, lru_cache(2**14)(topology.level)
        self._place = lru_cache(2**14)(self._new_place)

    def level(self, devices: Sequence[int]) -> Level:
        """Return the widest level that these devices need to reach each other."""
        return self._level(tuple(devices))

    def place(self, devices: Sequence[int]) -> Place:
        """Return where devices stand, as far as prices depend on it."""
        return self._place(tuple(devices))

    def _new_place(self, devices: tuple[int, ...]) -> Place:
        level = self.topology.level(devices)
        return self.topology.place(devices) if self.tells_filling(level) else Place(len(devices), level)

    def best_place(self, ranks: int, level: Level) -> Place:
        """Return what prices may depend on of the best place that so many ranks have whom a level connects.

        The emptiest of their nodes has no more of them than the fewest nodes that hold them, were these filled alike.
        """
        if not self.tells_filling(level):
            return Place(ranks, level)
        sizes = sorted(Counter(self.topology.nodes).values(), reverse=True)
        nodes = max(2, 1 + bisect_left([*accumulate(sizes)], ranks))
        return Place(ranks, level, fewest=max(1, ranks // nodes))

    def tells_filling(self, level: Level) -> bool:
        """Whether it makes a difference how ranks that a level connects fill their nodes."""
        return level != "node" and any(own == level for _, own in self._collectives)

    def message_provenance(self, size_bytes: float, level: Level) -> Provenance:
        """Return where the seconds of a message come from."""
        line = self._messages.get(level)
        if line is not None:
            return line.provenance(size_bytes)
        return min(self._ways[level], key=lambda way: way.latency_s + size_bytes / way.bytes_per_s).provenance

    def collective_provenance(self, kind: Collective, size_bytes: int, place: Place) -> Provenance:
        """Return where the seconds of a collective come from."""
        curves = self._collectives.get((kind, place.level))
        line = None if curves is None else curves.at(place)
        return "estimated" if line is None else line.provenance(size_bytes)

    def messages_s(self, sizes_bytes: Numbers, level: Level) -> Numbers:
        """Return the seconds of point-to-point messages: by the level's curve, else on the quickest of its links."""
        line = self._messages.get(level)
        if line is not None:
            return line(sizes_bytes)
        seconds = [way.latency_s + sizes_bytes / way.bytes_per_s for way in self._ways[level]]
        return np.asarray(np.minimum.reduce(seconds))

    @memoize
    def message_s(self, size_bytes: float, level: Level) -> float:
        """Return the seconds of one point-to-point message."""
        return float(self.messages_s(np.array([float(size_bytes)]), level)[0])

    @memoize
    def collective_s(self, kind: Collective, size_bytes: int, place: Place) -> float:
        """Return the seconds of an all-reduce, all-gather or reduce-scatter of a whole vector of ``size_bytes``.

        Where the level has no curves, it is a ring over the quickest of its links: bytes take (n - 1) / n, latency
        n - 1, and an all-reduce takes both twice (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
        """
        return float(self.collectives_s(kind, np.array([float(size_bytes)]), place)[0])

    @memoize
    def least_per_byte(self, kind: Collective, place: Place) -> float:
        """Return the seconds per byte that no size goes below."""
        curves = self._collectives.get((kind, place.level))
        sizes = np.append(np.zeros(0) if curves is None else curves.sizes_bytes, 2.0**62)
        return float((self.collectives_s(kind, sizes[sizes > 0], place) / sizes[sizes > 0]).min())

    def collectives_s(self, kind: Collective, sizes_bytes: Numbers, place: Place) -> Numbers:
        """Return :meth:`collective_s` of many sizes."""
        if place.ranks < 2:
            return np.zeros(sizes_bytes.shape)
        curves = self._collectives.get((kind, place.level))
        if curves is None:
            seconds = self._ring_s(kind, place.level, sizes_bytes, place.ranks)
        else:
            seconds = curves.seconds(sizes_bytes, place)
        return np.where(sizes_bytes > 0, seconds, 0.0)

    def _ring_s(self, kind: Collective, level: Level, sizes_bytes: Numbers, ranks: int) -> Numbers:
        rounds = ROUNDS[kind] * (ranks - 1)
        moved = rounds / ranks * sizes_bytes
        every = [moved / way.bytes_per_s + rounds * way.latency_s for way in self._ways[level]]
        return np.asarray(np.minimum.reduce(every))

    def includes_copies(self, kind: Collective, level: Level) -> bool:
        """Whether a collective's seconds hold what copying takes: measured ones do; all, if links take no time."""
        return self._free or (kind, level) in self._collectives

    def collective_note(self, kind: Collective, place: Place) -> str | None:
        """Return what is estimated about a collective, or None where it was measured."""
        curves = self._collectives.get((kind, place.level))
        what = f"{kind.replace('_', '-')} among {place.ranks} ranks"
        if curves is None:
            return f"{what} is computed from the {place.level} link's latency and bandwidth"
        if curves.at(place) is not None:
            return None
        if place.most != place.fewest:
            what += f", {place.fewest} to {place.most} on each of {place.nodes} nodes,"
        return f"{what} is estimated from {curves.nearest(place)}"


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


@dataclass(frozen=True)
class Sharing:
    """What a cluster says of shared links and of work that overlaps."""

    topology: Topology
    places: dict[Level, tuple[int, ...]]
    """By level, the position of every device among those that share its way out."""
    links: dict[Level, tuple[Link, ...]] = field(default_factory=dict)
    """Those of levels of which one is shared."""
    slowdowns: dict[Level, Overlap] = field(default_factory=dict)
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
        places: dict[Level, tuple[int, ...]] = {}
        links: dict[Level, tuple[Link, ...]] = {}
        for level in topology.levels:
            before: dict[int, Iterator[int]] = defaultdict(count)
            places[level] = tuple(next(before[topology.unit(at, level)]) for at in range(len(devices)))
            own = tuple(link for link in cluster.links if link.level == level)
            if bytes_per_s is None and any(_shares(link) > 1 for link in own):
                links[level] = own
        slowdowns = {each.level: each for each in cluster.overlaps if max(each.compute, each.communication) > 1}
        return cls(topology, places, links, slowdowns)

    def among(self, devices: Sequence[int]) -> Sharing:
        """Return what some of the devices share, each at the port that it has."""
        places = {level: tuple(own[device] for device in devices) for level, own in self.places.items()}
        return replace(self, topology=self.topology.among(devices), places=places)

    def __bool__(self) -> bool:
        return bool(self.links or self.slowdowns)

    def ports(self, level: Level, sender: int, receiver: int, seconds: float) -> tuple[Port, ...]:
        """Return what a transfer of some seconds passes from one device to another; nothing where that is not shared.

        Of several links of a level a transfer passes the one that moves most in its seconds: for a message that the
        links price, that is the one which is quickest for its size.
        """
        links = self.links.get(level)
        if links is None:
            return ()
        at = max(range(len(links)), key=lambda index: _transfer_bytes(links[index], seconds))
        link = links[at]
        if _shares(link) == 1:
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
        """Return how many transfers at a time have the speed that they are priced at."""
        return _shares(self.links[port.level][port.link])


def _shares(link: Link) -> int:
    """Return among how many a link is divided: its senders, and of a half-duplex one those of either direction."""
    return link.shared_by * (2 if link.duplex == "half" else 1)


def _transfer_bytes(link: Link, seconds: float) -> float:
    """Return the bytes that a transfer moves in some seconds; the link's latency may leave it less than none."""
    return (seconds - link.latency_s) * link.bytes_per_s / _shares(link)


class Flow(NamedTuple):
    """What travels from one range of layers to another, per sample."""

    tensors: int
    bytes_per_sample: int
    gradients: int
    """How many of the tensors have a gradient that comes back."""
    gradient_bytes_per_sample: int


class FlowTensor(NamedTuple):
    """A tensor by the positions of its layers; the producer of a model input is -1."""

    name: str
    producer: int
    consumers: tuple[int, ...]
    bytes_per_sample: int
    gradient: bool


class TiedLayers(NamedTuple):
    """A parameter that several layers use."""

    number: int
    """Index into ``Profile.tied``."""
    layers: tuple[int, ...]
    bytes: int
    trainable: bool

    def share_of(self, layer: Layer) -> float:
        """Return the share that it has of a layer's trained parameters."""
        return min(1.0, self.bytes / layer.trainable_bytes) if self.trainable and layer.trainable_bytes else 0.0


class Flows:
    """Tensors and tied parameters of a profile, by the positions of their layers."""

    def __init__(self, profile: Profile) -> None:
        position = {layer.name: index for index, layer in enumerate(profile.layers)}
        self.crossing: list[FlowTensor] = []
        self.inputs: list[FlowTensor] = []
        for tensor in profile.tensors:
            consumers = tuple(sorted({position[name] for name in tensor.consumers}))
            made = -1 if tensor.producer is None else position[tensor.producer]
            entry = FlowTensor(tensor.name, made, consumers, tensor.bytes_per_sample, tensor.gradient)
            (self.inputs if tensor.producer is None else self.crossing).append(entry)
        self.made_by: list[list[FlowTensor]] = [[] for _ in profile.layers]
        """By layer, the tensors that it makes and another reads."""
        self.received_by: list[list[FlowTensor]] = [[] for _ in profile.layers]
        """By layer, the tensors that it reads and another makes."""
        for entry in self.crossing:
            self.made_by[entry.producer].append(entry)
            for consumer in entry.consumers:
                self.received_by[consumer].append(entry)
        self.tied = [
            TiedLayers(index, tuple(sorted({position[name] for name in tied.layers})), tied.bytes, tied.trainable)
            for index, tied in enumerate(profile.tied)
        ]
        pairs = [(number, each.producer, to) for number, each in enumerate(self.crossing) for to in each.consumers]
        self._numbers, self._producers, self._consumers = np.array(pairs, dtype=np.int64).reshape(-1, 3).T
        """Of every tensor and layer that reads it."""

    def made(self, first: int, stop: int) -> Iterator[FlowTensor]:
        """Yield the tensors that a stage makes and other layers read."""
        return chain.from_iterable(self.made_by[first:stop])

    @memoize
    def constants(self, first: int, stop: int) -> tuple[FlowTensor, ...]:
        """Return the tensors that a stage makes, other layers read, and no gradient comes back of."""
        return tuple(tensor for tensor in self.made(first, stop) if not tensor.gradient)

    @memoize
    def forked_tensors(self, first: int, stop: int) -> tuple[FlowTensor, ...]:
        """Return the tensors that a stage makes and several layers read."""
        return tuple(tensor for tensor in self.made(first, stop) if len(tensor.consumers) > 1)

    def returned_again(self, first: int, stop: int, cuts: Sequence[int]) -> int:
        """Return the bytes per sample of gradients that come back of a stage's tensors, beyond one of each.

        Later stages end before the layers ``cuts``, which ascend.
        """
        extra = 0
        for tensor in self.forked_tensors(first, stop):
            if tensor.gradient and tensor.consumers[-1] >= stop:
                readers = {bisect_right(cuts, consumer) for consumer in tensor.consumers if consumer >= stop}
                extra += max(0, len(readers) - 1) * tensor.bytes_per_sample
        return extra

    def unanswered_bytes(self, first: int, stop: int, cuts: Sequence[int]) -> int:
        """Return the bytes per sample that a stage sends to later ones that send nothing back, though others do.

        Where none does, it is 0: that is a matter of the stage alone.
        """
        sent = [tensor for tensor in self.constants(first, stop) if tensor.consumers[-1] >= stop]
        answering = {
            bisect_right(cuts, consumer)
            for tensor in (self.made(first, stop) if sent else ())
            for consumer in tensor.consumers
            if tensor.gradient and consumer >= stop
        }
        return sum(
            tensor.bytes_per_sample
            for tensor in (sent if answering else ())
            if any(bisect_right(cuts, consumer) not in answering for consumer in tensor.consumers if consumer >= stop)
        )

    def answered_late(self, first: int, stop: int, leads: Sequence[Lead]) -> int:
        """Return the bytes per sample of gradients that are on their way for longer than one to the stage before.

        ``leads`` are of all stages before; none: these are not known.
        """
        stops, extra = [lead.stop for lead in leads], 0
        for tensor in self.far_tensors(first, stop) if leads else ():
            turns = leads[bisect_right(stops, tensor.producer)].turns
            extra += max(0, turns - leads[-1].turns) * tensor.bytes_per_sample
        return extra

    @memoize
    def far_tensors(self, first: int, stop: int) -> tuple[FlowTensor, ...]:
        """Return the tensors that a stage reads, and sends a gradient of to another layer than the one before it."""
        read = chain.from_iterable(self.received_by[first:stop])
        far = (tensor for tensor in read if tensor.gradient and tensor.producer < first - 1)
        return tuple({tensor.name: tensor for tensor in far}.values())

    @memoize
    def between(self, first: int, stop: int, next_first: int, next_stop: int) -> Flow:
        """Return what layers ``first:stop`` make and layers ``next_first:next_stop`` read."""
        made = self.made(first, stop)
        return _flow([each for each in made if any(next_first <= reader < next_stop for reader in each.consumers)])

    @cached_property
    def crossing_bytes(self) -> tuple[Numbers, Numbers]:
        """Bytes per sample that cross every position, forth and as gradients; not a number where nothing does."""
        # Of either direction, bytes and how many tensors they are of.
        changes = np.zeros((len(self.made_by) + 1, 2, 2))
        for tensor in self.crossing:
            amount = tensor.bytes_per_sample, 1
            changes[tensor.producer + 1, : 1 + tensor.gradient] += amount
            changes[tensor.consumers[-1] + 1, : 1 + tensor.gradient] -= amount
        size, tensors = np.cumsum(changes, axis=0).T
        forth, back = np.where(tensors > 0, size, np.nan)
        return forth, back

    def exchanges(self, stops: Sequence[int]) -> list[tuple[int, int, Flow]]:
        """Return (producer, consumer, what travels) for stages that end before the layers ``stops``."""
        stage_of = np.repeat(np.arange(len(stops)), np.diff(stops, prepend=0))
        made, read = stage_of[self._producers], stage_of[self._consumers]
        crosses = np.flatnonzero(made != read)
        # A stage is sent a tensor once, however many of its layers read it.
        keys = np.unique((made[crosses] * len(stops) + read[crosses]) * len(self.crossing) + self._numbers[crosses])
        groups: dict[int, list[int]] = {}
        for key in keys.tolist():
            groups.setdefault(key // len(self.crossing), []).append(key % len(self.crossing))
        return [
            (*divmod(pair, len(stops)), _flow([self.crossing[number] for number in numbers]))
            for pair, numbers in groups.items()
        ]


def _flow(tensors: Sequence[FlowTensor]) -> Flow:
    back = [tensor.bytes_per_sample for tensor in tensors if tensor.gradient]
    return Flow(len(tensors), sum(tensor.bytes_per_sample for tensor in tensors), len(back), sum(back))
