"""Rows: a program as small integers, and what simulators read of it.

From a program come each rank's actions, the ranks that meet in one action, each rank's view with the seconds of its
actions, and the lanes: groups of transfers that always move at one speed, and may slow other groups.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from autopar.formats.cluster import LEVELS, Level, Overlap
from autopar.formats.plan import Plan
from autopar.formats.program import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    KINDS,
    PULL,
    PUSH,
    RECEIVES,
    REDUCE,
    REDUCE_TIED,
    REDUCTIONS,
    SENDS,
    UPDATE,
    WEIGHT_BACKWARD,
    Action,
    Program,
)
from autopar.planner.costs.communication import Port, Sharing
from autopar.planner.costs.durations import Durations
from autopar.schedules.expand import entries_of
from autopar.schedules.order import Entry

Rows = list[list[tuple[int, int, int, int]]]
"""Per rank: (kind's code, micro-batch, peer, own) of every action; a code is the kind's position in ``KINDS``.

``own`` is the replica that acts, and ``peer`` the one at the other end of a message, or -1; replicas count those of all
stages in order, as ranks do where each runs one stage.
"""

CODES = {kind: code for code, kind in enumerate(KINDS)}
REDUCE_CODE, TIED_CODE, UPDATE_CODE = CODES[REDUCE], CODES[REDUCE_TIED], CODES[UPDATE]
PUSH_CODE, PULL_CODE = CODES[PUSH], CODES[PULL]
SEND_CODES, RECEIVE_CODES, JOINT_CODES = (
    tuple(CODES[kind] for kind in kinds) for kinds in (SENDS, RECEIVES, REDUCTIONS)
)
LAST_CODES = (CODES[BACKWARD], CODES[WEIGHT_BACKWARD])
"""What a replica's gradients are made by."""
COMPUTED_CODES = (CODES[FORWARD], CODES[INPUT_BACKWARD], *LAST_CODES)
"""Forwards, backwards and the halves of these."""


def compile_rows(program: Program, times: Durations) -> Rows:
    """Return a program's rows; ``times`` knows the replicas.

    >>> from autopar.formats.program import Action, RankProgram
    >>> program = Program((RankProgram.of([Action("F", 0, 2), Action("S", 0, 2, 1, 1)]),))
    >>> compile_rows(program, Durations(0.0, stage=[0, 1]))
    [[(0, 2, -1, 0), (2, 2, 1, 0)]]
    """
    ranks = zip(times.stage, times.ranks, strict=True)
    return _encode(program.ranks, {stage: replica - rank for replica, (stage, rank) in enumerate(ranks)})


def rows_of(plan: Plan) -> Rows:
    """Return the rows of a plan's program without making the program."""
    firsts = accumulate((stage.replicas for stage in plan.stages), initial=0)
    ahead = [first - teams[0][0] for first, teams in zip(firsts, plan.ownership.replicas, strict=False)]
    return _encode(entries_of(plan), dict(enumerate(ahead)))


def _encode(ranks: Iterable[Iterable[Action | Entry]], ahead: Mapping[int, int]) -> Rows:
    """Return every rank's actions; ``ahead`` is what to add to a rank to get the replica of a stage."""
    return [
        [
            (CODES[kind], micro_batch, peer if peer < 0 else peer + ahead[peer_stage], rank + ahead[stage])
            for kind, stage, micro_batch, peer, peer_stage, *_ in entries
        ]
        for rank, entries in enumerate(ranks)
    ]


class JointReduction:
    """Ranks that reduce together; it is over when all that it misses has come, and may then begin anew."""

    __slots__ = ("code", "end_s", "index", "members", "missing")

    def __init__(self, code: int, index: int) -> None:
        self.code, self.index = code, index
        self.members: list[int] = []
        self.missing, self.end_s = 0, 0.0

    def begin_anew(self) -> None:
        """Miss all members, as for the mini-batch before."""
        self.missing, self.end_s = len(self.members), 0.0


def joint_reductions(rows: Rows, stages: Sequence[int]) -> dict[tuple[int, int], JointReduction]:
    """Return every reduction by (code, stage, or a shared parameter's index), given the stage of every replica."""
    found: dict[tuple[int, int], JointReduction] = {}
    for rank, actions in enumerate(rows):
        # Of several mini-batches, all have the reductions of the last.
        updates = 0
        for code, index, _, own in reversed(actions):
            updates += code == UPDATE_CODE
            if code in COMPUTED_CODES or updates > 1:
                break
            if code in JOINT_CODES:
                key = (code, index if code == TIED_CODE else stages[own])
                meeting = found.setdefault(key, JointReduction(*key))
                meeting.members.append(rank)
                meeting.missing += 1
    return found


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
        self, number: int, passages: list[tuple[Passage, int]], ranks: tuple[int, ...], overlap: Overlap | None
    ) -> None:
        self.number, self.passages, self.ranks = number, passages, ranks
        self.slowdown = (overlap.compute, overlap.communication) if overlap else (1.0, 1.0)
        """Times as long computing, and communicating, take while the other goes on."""
        self.flows: list[tuple[float, int, object]] = []
        """A heap of (progress at the end, serial number, whose transfer)."""
        self.progress_s = self.since_s = 0.0
        self.pace, self.due_s = 1.0, -1.0


class Queue:
    """The messages of an ordered pair of ranks, in the sender's order."""

    __slots__ = ("arrivals", "at", "begun_s", "blocking", "busy", "free_s", "lane", "receiver", "sender", "waiting")

    def __init__(self, sender: int, receiver: int) -> None:
        self.sender, self.receiver = sender, receiver
        self.lane: Lane | None = None
        self.busy = self.blocking = False
        """Whether a transfer is under way; whether the receiver waits for one."""
        self.at, self.begun_s, self.free_s = -1, 0.0, 0.0
        self.waiting: deque[int] = deque()
        """Positions of the sends that wait for the one under way."""
        self.arrivals: deque[float] = deque()


class ReductionPart:
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

    def __init__(self, times: Durations, sharing: Sharing | None, tied_ranks: Sequence[Sequence[int]]) -> None:
        """Lay them out on what ranks share; ``tied_ranks`` hold each parameter shared between stages."""
        self._ranks, self._team = times.ranks, times.team
        self.lanes: list[Lane] = []
        self._lanes_by_course: dict[_Course, Lane] = {}
        slowest: dict[tuple[int, int], float] = {}
        for (sender, receiver), seconds in times.message_s.items():
            pair = self._ranks[sender], self._ranks[receiver]
            slowest[pair] = max(seconds, slowest.get(pair, 0.0))
        self.queues = {pair: Queue(*pair) for pair in slowest}
        """By (sending rank, receiving rank); of messages of several stages, the slowest says where all pass."""
        self.parts: dict[int, ReductionPart] = {}
        """By replica."""
        self.tied_lanes: list[Lane | None] = [None] * len(times.tied_s)
        if sharing:
            self._sharing = sharing
            self._share(times, slowest, tied_ranks)

    def _share(
        self, times: Durations, slowest: dict[tuple[int, int], float], tied_ranks: Sequence[Sequence[int]]
    ) -> None:
        messages = {pair: self._message(*pair, seconds) for pair, seconds in slowest.items()}
        parts = dict(self._reductions(times))
        joint = [self._collective(ranks, ranks, s) for ranks, s in zip(tied_ranks, times.tied_s, strict=True)]
        self._passages = self._crowded_passages([*messages.values(), *parts.values(), *joint])
        for pair, course in messages.items():
            self.queues[pair].lane = self._lane(course)
        last_s = times.last_s or times.backward_s
        for replica, course in parts.items():
            exposed_s = times.exposed_s[replica]
            hidden_s = max(0.0, min(times.reduce_s[replica] - exposed_s, last_s[replica]))
            lane = self._lane(course) if hidden_s + exposed_s > 0 else None
            if lane is not None:
                self.parts[replica] = ReductionPart(replica, hidden_s, hidden_s + exposed_s, lane)
        self.tied_lanes = [self._lane(course) for course in joint]

    def _message(self, sender: int, receiver: int, seconds: float) -> _Course:
        team, other = self._team(sender), self._team(receiver)
        every = ((team[at % len(team)], other[at % len(other)]) for at in range(max(len(team), len(other))))
        lanes = [(self._sharing.topology.pair(*ends), ends) for ends in every]
        ports = tuple(port for level, ends in lanes for port in self._sharing.ports(level, *ends, seconds))
        return _Course(max((level for level, _ in lanes), key=LEVELS.index), ports, (sender, receiver))

    def _collective(self, members: Sequence[int], group: Sequence[int], seconds: float) -> _Course:
        """A rank both sends and receives at the level that connects its group; of teams, all that have its part."""
        level = self._sharing.topology.level(self._team(rank)[0] for rank in group)
        own = (device for rank in members for device in self._team(rank))
        ports = tuple(port for device in own for port in self._sharing.ports(level, device, device, seconds))
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

    def _crowded_passages(self, courses: Sequence[_Course]) -> dict[Port, Passage]:
        """Return the ports where more transfers can meet than the port takes at full speed."""
        most = Counter(port for course in courses for port in course.ports)
        capacities = {port: self._sharing.capacity(port) for port in most}
        return {port: Passage(capacity) for port, capacity in capacities.items() if most[port] > capacity}

    def _lane(self, course: _Course) -> Lane | None:
        overlap = self._sharing.slowdowns.get(course.level)
        ports = tuple(port for port in course.ports if port in self._passages)
        if overlap is None and not ports:
            return None
        key = _Course(course.level, ports, course.ranks if overlap else ())
        if key not in self._lanes_by_course:
            passages = [(self._passages[port], weight) for port, weight in Counter(ports).items()]
            lane = Lane(len(self.lanes), passages, key.ranks, overlap)
            self._lanes_by_course[key] = lane
            self.lanes.append(lane)
            for passage, _ in passages:
                passage.lanes.append(lane)
        return self._lanes_by_course[key]


class View(NamedTuple):
    """Columns of a rank's actions; reading a tuple for each of millions would wait for memory."""

    codes: bytes
    queues: list[Queue | None]
    """Of every action that is a message's."""
    seconds: list[float]
    """Of every computation and every send."""
    ends: dict[int, int]
    """Replicas whose gradients others wait for, by the positions of the last backwards of mini-batches."""
    first_event: int
    """Position from which on computations are events: before it, nothing slows them and nothing runs beside."""


def views(rows: Rows, times: Durations, wiring: Lanes, shift: int = 0) -> list[View]:
    """Return the view of every rank; ``shift`` as of :func:`.simulate.trace`."""
    slowed = {rank for lane in wiring.lanes for rank in lane.ranks}
    compute_s = {CODES[kind]: seconds for kind, seconds in times.compute_s.items()}
    ranks, found = times.ranks, []
    for rank, actions in enumerate(rows):
        codes, micro_batches, peers, owns = zip(*actions, strict=True)
        keys = list(zip(codes, peers, owns, strict=True))
        seconds = dict.fromkeys(keys, 0.0)
        queues: dict[tuple[int, int, int], Queue] = {}
        for key in seconds:
            code, peer, own = key
            if code in SEND_CODES:
                seconds[key], queues[key] = times.message_s[own, peer], wiring.queues[rank, ranks[peer]]
            elif code in RECEIVE_CODES:
                queues[key] = wiring.queues[ranks[peer], rank]
            elif code in compute_s:
                seconds[key] = compute_s[code][own]
        ends = _ends_of_mini_batches(codes, micro_batches, owns, shift) if shift else _ends(codes, owns)
        felt = 0 if rank in slowed else min((at for at in ends if ends[at] in wiring.parts), default=len(codes))
        view = View(bytes(codes), list(map(queues.get, keys)), list(map(seconds.__getitem__, keys)), ends, felt)
        found.append(view)
    return found


def _ends(codes: Sequence[int], owns: Sequence[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    wanted: set[int] = set()
    for at in range(len(codes) - 1, -1, -1):
        code, own = codes[at], owns[at]
        if code == REDUCE_CODE:
            wanted.add(own)
        elif code in LAST_CODES and own in wanted:
            found[at] = own
            wanted.remove(own)
        elif code in COMPUTED_CODES and not wanted:
            break
    return found


def _ends_of_mini_batches(
    codes: Sequence[int], micro_batches: Sequence[int], owns: Sequence[int], shift: int
) -> dict[int, int]:
    """Return the positions of the last backwards of all mini-batches, if they are reduced at all."""
    if REDUCE_CODE not in codes and TIED_CODE not in codes:
        return {}
    return {
        at: owns[at]
        for at, (code, micro_batch) in enumerate(zip(codes, micro_batches, strict=True))
        if code in LAST_CODES and micro_batch % shift == shift - 1
    }
