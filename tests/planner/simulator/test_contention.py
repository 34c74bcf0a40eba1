"""Contention against a simulator that looks at everything after every event, and against the plain simulation."""

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from autopar.formats.cluster import Cluster, Device, Link, Overlap
from autopar.formats.program import KINDS
from autopar.planner import PlanOptions
from autopar.planner.assemble import assemble
from autopar.planner.candidate import Candidate
from autopar.planner.costs.communication import Sharing
from autopar.planner.costs.durations import Durations, durations
from autopar.planner.costs.model import CostModel
from autopar.planner.simulator.contention import ContentionSimulation
from autopar.planner.simulator.rows import Rows
from autopar.planner.simulator.simulate import Simulator, compile_rows, run, trace
from autopar.schedules.expand import expand
from drawn import random_candidate
from random_problems import hierarchy, random_cluster, random_profile


def _shared(rng: random.Random, cluster: Cluster) -> Cluster:
    """Give a cluster ports that few or many devices share, and slow-downs, or neither."""
    duplex: list[Literal["full", "half"]] = ["full", "half"]
    links = tuple(
        link.model_copy(update={"shared_by": rng.choice([1, 1, 2, 3, 8]), "duplex": rng.choice(duplex)})
        for link in cluster.links
    )
    overlaps = tuple(
        Overlap(level=level, compute=rng.choice([1.0, 1.25]), communication=rng.choice([1.0, 1.5]))
        for level in dict.fromkeys(link.level for link in cluster.links)
        if rng.random() < 0.4
    )
    return cluster.model_copy(update={"links": links, "overlaps": overlaps})


class _Case:
    """A random candidate priced on a random cluster, whose sharing is drawn apart from its prices."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        devices = rng.randint(1, 6)
        cluster = random_cluster(seed, devices)
        if seed % 4 == 0:
            sizes = [1 + rng.randrange(2) for _ in range(devices)]
            cluster = hierarchy(seed, sizes, racks=rng.choice([1, 2, 3]), more_links=True)
        options = PlanOptions(gpus=devices)
        self.costs = CostModel(random_profile(seed, batches=(2, 4, 6, 12)), cluster, options)
        self.candidate: Candidate = random_candidate(rng, self.costs)
        times = durations(self.costs, self.candidate)
        louder = rng.choice([1.0, 1.0, 10.0])
        self.times = replace(times, message_s={pair: s * louder for pair, s in times.message_s.items()})
        self.rows = Simulator(self.costs).rows_of(self.candidate)
        self.cluster = _shared(rng, cluster)
        self.sharing = Sharing.of(self.cluster, self.costs.devices)
        self.devices = tuple(device for stage in self.candidate.stages for device in stage.devices)


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


class _Fluid:
    """Plays a program whose ranks stand on ``places``: after every event, all that is under way is looked at anew."""

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
        self.links = {
            each.level: [link for link in cluster.links if link.level == each.level] for each in cluster.links
        }
        self.overlaps = {overlap.level: overlap for overlap in reversed(cluster.overlaps)}

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

    def _port(self, rank: int, level: str, direction: str, seconds: float) -> tuple[_Port, ...]:
        """A price in seconds tells the bytes, and so which link takes them."""
        links = self.links[level]
        moved = [(seconds - link.latency_s) * link.bytes_per_s / _capacity(link) for link in links]
        at = moved.index(max(moved))
        link = links[at]
        if link.shared_by == 1 and link.duplex == "full":
            return ()
        of_racks = level == "network" and "rack" in self.links
        *before, unit = [each.rack if of_racks else each.node for each in self.devices[: self.places[rank] + 1]]
        way = "both" if link.duplex == "half" else direction
        return ((at, level, unit, before.count(unit) // link.shared_by, way),)

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
        last = kind == "B" and "A" in after and "B" not in after
        self.computing[rank] = job = _Job(seconds - last * self._hidden_s(rank), (rank,), "half" if last else "whole")
        self.jobs.append(job)

    def _hidden_s(self, rank: int) -> float:
        times = self.times
        return max(0.0, min(times.reduce_s[rank] - times.exposed_s[rank], times.backward_s[rank]))

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
            rank = job.ranks[0]
            hidden_s, level = self._hidden_s(rank), self._level(self._group(rank))
            self.computing[rank] = whole = _Job(hidden_s, (rank,), "whole")
            ports = self._both(rank, level, self.times.reduce_s[rank])
            self.jobs += [whole, _Job(hidden_s + self.times.exposed_s[rank], (rank,), "part", level, ports)]
        elif job.done == "whole":
            self.computing[job.ranks[0]] = None
            self.position[job.ranks[0]] += 1
        elif job.done == "part":
            self.parts.add(job.ranks[0])
        else:
            self.passed.add(("T", int(job.done[1:])))


def _capacity(link: Link) -> int:
    return link.shared_by * (2 if link.duplex == "half" else 1)


def _all(cluster: Cluster, compute: float | None, **ports: object) -> Cluster:
    """The cluster, with the same ports for all its links, and the same slow-down of computing at all levels, if any."""
    links = tuple(link.model_copy(update=ports) for link in cluster.links)
    levels = dict.fromkeys(link.level for link in links) if compute else ()
    overlaps = tuple(Overlap(level=level, compute=compute or 1.0, communication=1.0) for level in levels)
    return cluster.model_copy(update={"links": links, "overlaps": overlaps})


def test_without_sharing_or_looked_at_after_every_event_the_step_is_the_same() -> None:
    """Nor where ports are wide enough for all transfers."""
    for seed in range(120):
        case = _Case(seed)
        plain_s = pytest.approx(run(case.rows, case.times), rel=1e-12)
        nothing = Sharing.of(_all(case.cluster, 1.0, shared_by=1, duplex="full"), case.costs.devices)
        assert not nothing
        assert ContentionSimulation(case.rows, case.times, nothing.among(case.devices)).go() == plain_s
        wide = Sharing.of(_all(case.cluster, None, shared_by=100), case.costs.devices)
        assert wide
        assert run(case.rows, case.times, wide.among(case.devices)) == plain_s
    case = _Case(3)
    cluster = _all(case.cluster, None, shared_by=2)
    assert Sharing.of(cluster, case.costs.devices)
    assert not Sharing.of(cluster, case.costs.devices, bytes_per_s=1e9)
    slowed = 0
    for seed in range(240):
        case = _Case(seed)
        fluid = _Fluid(case.rows, case.times, case.cluster, case.costs.devices, case.devices)
        step_s = run(case.rows, case.times, case.sharing.among(case.devices))
        assert step_s == pytest.approx(fluid.step_s(), rel=1e-9)
        plain_s = run(case.rows, case.times)
        assert step_s >= plain_s * (1 - 1e-12)
        slowed += step_s > plain_s * (1 + 1e-9)
    assert slowed > 28


def test_timelines_end_with_the_step_and_limits_give_lower_bounds() -> None:
    for seed in range(60):
        case = _Case(seed)
        made = assemble(case.costs, case.candidate, PlanOptions(), 0.0, (), ())
        sharing = case.sharing.among(case.devices)
        program = expand(made)
        timeline = trace(program, case.times, sharing)
        assert timeline.end_s == pytest.approx(run(compile_rows(program, case.times), case.times, sharing), rel=1e-12)
        sent = {(e.rank, e.action.peer, e.action.kind, e.action.micro_batch): e.end_s for e in timeline}
        for event in timeline:
            assert event.start_s <= event.end_s
            if event.action.kind in ("R", "RG"):
                kind = "S" if event.action.kind == "R" else "SG"
                arrived = sent[event.action.peer, event.rank, kind, event.action.micro_batch]
                assert event.end_s >= arrived - 1e-12
    spared = 0
    for seed in range(60):
        case = _Case(seed)
        simulator = Simulator(case.costs, case.sharing)
        contended = simulator.step_s(case.candidate)
        times = durations(case.costs, case.candidate)
        assert contended == pytest.approx(run(case.rows, times, case.sharing.among(case.devices)), rel=1e-12)
        for factor in (0.5, 0.9, 1.1):
            limit_s = factor * contended
            found = simulator.step_s(case.candidate, limit_s)
            if factor > 1:
                assert found == contended
            else:
                assert limit_s <= found <= contended * (1 + 1e-12)
            spared += found < contended * (1 - 1e-9)
    assert spared > 10
