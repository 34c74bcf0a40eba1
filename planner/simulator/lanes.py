"""Lanes: the transfers of a program that may slow each other, grouped into those that always move at one speed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autopar.formats.cluster import Level
from autopar.planner.costs.durations import Durations
from autopar.planner.costs.sharing import Port, Slowdown, Traffic


class Passage:
    """A port in use: ``flows`` transfers pass it at ``speed`` times what they are priced at."""

    __slots__ = ("capacity", "flows", "lanes", "speed")

    def __init__(self, capacity: int) -> None:
        self.capacity, self.flows, self.speed = capacity, 0, 1.0
        self.lanes: list[Lane] = []


class Lane:
    """Transfers through the same ports between the same devices: all under way have made the same progress per second.

    A transfer that begins when the lane's progress is p ends when it is p + its seconds, so that a change of speed
    moves one event and not one per transfer (the virtual time of processor sharing).
    """

    __slots__ = ("due_s", "flows", "number", "pace", "passages", "progress_s", "ranks", "since_s", "slowdown")

    def __init__(
        self, number: int, passages: list[tuple[Passage, int]], ranks: tuple[int, ...], slowdown: Slowdown
    ) -> None:
        self.number, self.passages, self.ranks, self.slowdown = number, passages, ranks, slowdown
        self.flows: list[tuple[float, int, object]] = []
        """A heap of (progress at the end, serial number, whose transfer)."""
        self.progress_s = self.since_s = 0.0
        self.pace, self.due_s = 1.0, -1.0


class Queue:
    """The messages of an ordered pair of ranks, in the sender's order."""

    __slots__ = ("arrived", "at", "begun_s", "busy", "free_s", "lane", "receiver", "sender", "waiting")

    def __init__(self, sender: int, receiver: int, lane: Lane | None) -> None:
        self.sender, self.receiver, self.lane = sender, receiver, lane
        self.busy, self.at, self.begun_s, self.free_s = False, -1, 0.0, 0.0
        self.waiting: deque[int] = deque()
        """Positions of the sends that wait for the one under way."""
        self.arrived: deque[float] = deque()


class Part:
    """A replica's part in its stage's reduction: ``hidden_s`` of it runs during the last backward."""

    __slots__ = ("begun_s", "hidden_s", "lane", "replica", "seconds")

    def __init__(self, replica: int, hidden_s: float, seconds: float, lane: Lane) -> None:
        self.replica, self.hidden_s, self.seconds, self.lane = replica, hidden_s, seconds, lane
        self.begun_s = 0.0


class _Course(NamedTuple):
    """What a transfer passes, and whom it concerns."""

    level: Level
    ports: tuple[Port, ...]
    """A port stands here as often as the transfer passes it."""
    ranks: tuple[int, ...]


class Lanes:
    """All queues and reductions of a program; those that nothing can slow have no lane."""

    def __init__(self, times: Durations, traffic: Traffic, tied: Sequence[Sequence[int]]) -> None:
        """``tied`` are the ranks that hold each parameter shared between stages."""
        self._sharing, self._devices = traffic
        self._ranks = times.ranks
        self.lanes: list[Lane] = []
        self._known: dict[_Course, Lane] = {}
        slowest: dict[tuple[int, int], float] = {}
        for (sender, receiver), seconds in times.message_s.items():
            pair = self._ranks[sender], self._ranks[receiver]
            slowest[pair] = max(seconds, slowest.get(pair, 0.0))
        messages = {pair: self._message(*pair, seconds) for pair, seconds in slowest.items()}
        parts = dict(self._reductions(times))
        joint = [self._collective(ranks, ranks, s) for ranks, s in zip(tied, times.tied_s, strict=True)]
        self._passages = self._crowded([*messages.values(), *parts.values(), *joint])
        self.queues = {pair: Queue(*pair, self._lane(course)) for pair, course in messages.items()}
        """By (sending rank, receiving rank); of messages of several stages, the slowest says where all pass."""
        self.parts: dict[int, Part] = {}
        """By replica."""
        last_s = times.last_s or times.backward_s
        for replica, course in parts.items():
            exposed_s = times.exposed_s[replica]
            hidden_s = max(0.0, min(times.reduce_s[replica] - exposed_s, last_s[replica]))
            lane = self._lane(course) if hidden_s + exposed_s > 0 else None
            if lane is not None:
                self.parts[replica] = Part(replica, hidden_s, hidden_s + exposed_s, lane)
        self.tied = [self._lane(course) for course in joint]

    def _message(self, sender: int, receiver: int, seconds: float) -> _Course:
        ends = self._devices[sender], self._devices[receiver]
        level = self._sharing.level(ends)
        return _Course(level, self._sharing.ports(level, *ends, seconds), (sender, receiver))

    def _collective(self, members: Sequence[int], group: Sequence[int], seconds: float) -> _Course:
        """A rank both sends and receives at the level that connects its group."""
        level = self._sharing.level([self._devices[rank] for rank in group])
        places = [self._devices[rank] for rank in members]
        ports = tuple(port for device in places for port in self._sharing.ports(level, device, device, seconds))
        return _Course(level, ports, tuple(members))

    def _reductions(self, times: Durations) -> Iterator[tuple[int, _Course]]:
        """Yield (replica, course) for all replicas of stages that have several."""
        groups: dict[int, list[int]] = {}
        for replica, stage in enumerate(times.stage):
            groups.setdefault(stage, []).append(replica)
        for group in groups.values():
            ranks = [self._ranks[replica] for replica in group]
            for replica, rank in zip(group, ranks, strict=True) if len(group) > 1 else ():
                yield replica, self._collective((rank,), ranks, times.reduce_s[replica])

    def _crowded(self, courses: Sequence[_Course]) -> dict[Port, Passage]:
        """Return the ports where more transfers can meet than the port takes at full speed."""
        most = Counter(port for course in courses for port in course.ports)
        capacities = {port: self._sharing.capacity(port) for port in most}
        return {port: Passage(capacity) for port, capacity in capacities.items() if most[port] > capacity}

    def _lane(self, course: _Course) -> Lane | None:
        slowdown = self._sharing.slowdowns.get(course.level)
        ports = tuple(port for port in course.ports if port in self._passages)
        if slowdown is None and not ports:
            return None
        key = _Course(course.level, ports, course.ranks if slowdown else ())
        if key not in self._known:
            passages = [(self._passages[port], weight) for port, weight in Counter(ports).items()]
            lane = Lane(len(self.lanes), passages, key.ranks, slowdown or Slowdown())
            self._known[key] = lane
            self.lanes.append(lane)
            for passage, _ in passages:
                passage.lanes.append(lane)
        return self._known[key]
