"""A slow simulator of contention: after every event, all that is under way is looked at anew."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.program import KINDS
from autopar.planner.costs.model import Durations
from autopar.planner.simulator.rows import Rows

_Port = tuple[int, str, int, int, str]
"""Number of the link at its level; level, node or rack, number among its ports, direction."""


@dataclass(eq=False)
class _Job:
    """A computation (of one rank, at no level) or a transfer."""

    left_s: float
    ranks: tuple[int, ...]
    done: str
    level: str = ""
    ports: tuple[_Port, ...] = ()
    key: tuple[int, int] = (-1, -1)


class Fluid:
    """Plays a program whose ranks stand on ``places``, positions in ``devices``, of a cluster."""

    def __init__(
        self, rows: Rows, times: Durations, cluster: Cluster, devices: Sequence[Device], places: Sequence[int]
    ) -> None:
        self.rows, self.times, self.devices, self.places = rows, times, devices, places
        count = len(rows)
        self.position, self.now_s = [0] * count, times.overhead_s
        self.jobs: list[_Job] = []
        self.computing: list[_Job | None] = [None] * count
        self.arrived: Counter[tuple[int, int]] = Counter()
        self.waiting: dict[tuple[int, int], deque[int]] = {}
        self.tokens: Counter[tuple[str, int]] = Counter()
        self.passed: set[tuple[str, int]] = set()
        self.parts: set[int] = set()
        self.links: dict[str, list[Link]] = {}
        for link in cluster.links:
            self.links.setdefault(link.level, []).append(link)
        self.overlaps = {}
        for overlap in cluster.overlaps:
            self.overlaps.setdefault(overlap.level, overlap)

    def step_s(self) -> float:
        while True:
            while any(self._go(rank) for rank in range(len(self.rows))):
                pass
            if not self.jobs:
                assert all(at == len(row) for at, row in zip(self.position, self.rows, strict=True))
                return self.now_s
            ends = [job.left_s / self._speed(job) for job in self.jobs]
            first = min(ends)
            self.now_s += first
            for job, end in zip(list(self.jobs), ends, strict=True):
                if end <= first * (1 + 1e-12) + 1e-15:
                    self.jobs.remove(job)
                    self._end(job)
                else:
                    job.left_s -= first * job.left_s / end

    def _speed(self, job: _Job) -> float:
        busy = {other.ranks[0] for other in self.jobs if not other.level}
        if not job.level:
            levels = {other.level for other in self.jobs if other.level and job.ranks[0] in other.ranks}
            return 1 / max([self.overlaps[level].compute for level in levels if level in self.overlaps], default=1.0)
        flows = Counter(port for other in self.jobs for port in other.ports)
        speed = min([1.0, *(_capacity(self.links[job.level][port[0]]) / flows[port] for port in job.ports)])
        slowed = job.level in self.overlaps and any(rank in busy for rank in job.ranks)
        return speed / self.overlaps[job.level].communication if slowed else speed

    def _level(self, ranks: tuple[int, ...]) -> str:
        devices = [self.devices[self.places[rank]] for rank in ranks]
        if len({device.node for device in devices}) == 1:
            return "node"
        return "rack" if "rack" in self.links and len({device.rack for device in devices}) == 1 else "network"

    def _unit(self, device: Device, level: str) -> int:
        return device.rack if level == "network" and "rack" in self.links else device.node

    def _port(self, rank: int, level: str, direction: str, seconds: float) -> tuple[_Port, ...]:
        """A price in seconds tells the bytes, and so which link takes them."""
        links = self.links[level]
        moved = [(seconds - link.latency_s) * link.bytes_per_s / _capacity(link) for link in links]
        at = moved.index(max(moved))
        link = links[at]
        if link.shared_by == 1 and link.duplex == "full":
            return ()
        unit = self._unit(self.devices[self.places[rank]], level)
        before = [self._unit(device, level) for device in self.devices[: self.places[rank]]].count(unit)
        way = "both" if link.duplex == "half" else direction
        return ((at, level, unit, before // link.shared_by, way),)

    def _both(self, rank: int, level: str, seconds: float) -> tuple[_Port, ...]:
        ports = (*self._port(rank, level, "out", seconds), *self._port(rank, level, "in", seconds))
        return tuple(dict.fromkeys(ports))

    def _group(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other, stage in enumerate(self.times.stage) if stage == self.times.stage[rank])

    def _holders(self, index: int) -> tuple[int, ...]:
        code = KINDS.index("T")
        return tuple(rank for rank, row in enumerate(self.rows) if any(a[:2] == (code, index) for a in row))

    def _go(self, rank: int) -> bool:
        """Perform one action, if it may begin or end now."""
        at, row = self.position[rank], self.rows[rank]
        if at == len(row) or self.computing[rank]:
            return False
        kind, index, peer = KINDS[row[at][0]], row[at][1], row[at][2]
        if kind in "FBU":
            self._compute(rank, kind, at)
            return True
        if kind in ("R", "RG"):
            if not self.arrived[peer, rank]:
                return False
            self.arrived[peer, rank] -= 1
        elif kind in ("S", "SG"):
            queue = self.waiting.setdefault((rank, peer), deque())
            queue.append(at)
            if len(queue) == 1:
                self._transfer(rank, peer)
        elif not self._reduced(rank, kind, index):
            return False
        self.position[rank] += 1
        return True

    def _compute(self, rank: int, kind: str, at: int) -> None:
        times = self.times
        seconds = {"F": times.forward_s, "B": times.backward_s, "U": times.update_s}[kind][rank]
        after = [KINDS[code] for code, *_ in self.rows[rank][at + 1 :]]
        hidden = 0.0
        if kind == "B" and "A" in after and "B" not in after:
            hidden = max(0.0, min(times.reduce_s[rank] - times.exposed_s[rank], seconds))
        job = _Job(seconds - hidden, (rank,), "half" if kind == "B" and "A" in after and "B" not in after else "whole")
        self.computing[rank] = job
        self.jobs.append(job)

    def _transfer(self, sender: int, receiver: int) -> None:
        level = self._level((sender, receiver))
        seconds = self.times.message_s[sender, receiver]
        ends = (*self._port(sender, level, "out", seconds), *self._port(receiver, level, "in", seconds))
        ports = tuple(dict.fromkeys(ends))
        self.jobs.append(_Job(seconds, (sender, receiver), "message", level, ports, (sender, receiver)))

    def _reduced(self, rank: int, kind: str, index: int) -> bool:
        """Whether the reduction that a rank stands at is over; the last to come to a shared parameter's begins it."""
        key = (kind, self.times.stage[rank] if kind == "A" else index)
        group = self._group(rank) if kind == "A" else self._holders(index)
        if key in self.passed:
            return True
        there = all(self._has_come(other, kind, index) for other in group)
        if kind == "A":
            return there and all(other in self.parts for other in group)
        if there and not any(job.done == f"T{index}" for job in self.jobs):
            level = self._level(group)
            ports = tuple(port for other in group for port in self._both(other, level, self.times.tied_s[index]))
            self.jobs.append(_Job(self.times.tied_s[index], group, f"T{index}", level, ports))
        return False

    def _has_come(self, rank: int, kind: str, index: int) -> bool:
        at, action = self.position[rank], (KINDS.index(kind), index)
        behind = any(done[:2] == action for done in self.rows[rank][:at])
        return behind or (not self.computing[rank] and self.rows[rank][at][:2] == action)

    def _end(self, job: _Job) -> None:
        if job.done == "message":
            self.arrived[job.key] += 1
            self.waiting[job.key].popleft()
            if self.waiting[job.key]:
                self._transfer(*job.key)
        elif job.done == "half":
            self._second_half(job.ranks[0])
        elif job.done == "whole":
            self.computing[job.ranks[0]] = None
            self.position[job.ranks[0]] += 1
        elif job.done == "part":
            self.parts.add(job.ranks[0])
        else:
            self.passed.add(("T", int(job.done[1:])))

    def _second_half(self, rank: int) -> None:
        times = self.times
        hidden = max(0.0, min(times.reduce_s[rank] - times.exposed_s[rank], times.backward_s[rank]))
        job = _Job(hidden, (rank,), "whole")
        self.computing[rank] = job
        level = self._level(self._group(rank))
        ports = self._both(rank, level, times.reduce_s[rank])
        part = _Job(hidden + times.exposed_s[rank], (rank,), "part", level, ports)
        self.jobs += [job, part]


def _capacity(link: Link) -> int:
    return link.shared_by * (2 if link.duplex == "half" else 1)
