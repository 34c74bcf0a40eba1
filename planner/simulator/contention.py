"""Contention: a program interpreted with durations; transfers may share ports and slow computing, and it them."""

from __future__ import annotations

from collections import defaultdict, deque
from heapq import heappop, heappush
from math import inf

from autopar.planner.costs.communication import Sharing
from autopar.planner.costs.durations import Durations
from autopar.planner.simulator.rows import (
    JOINT_CODES,
    PULL_CODE,
    PUSH_CODE,
    RECEIVE_CODES,
    REDUCE_CODE,
    TIED_CODE,
    JointReduction,
    Lane,
    Lanes,
    Passage,
    Queue,
    ReductionPart,
    Rows,
    joint_reductions,
    views,
)

Span = tuple[float, float]


class _Computation:
    """A computation whose speed may change; ``then`` is the part of a reduction that begins when it ends."""

    __slots__ = ("begun_s", "left_s", "pace", "since_s", "then")

    def __init__(self, left_s: float, now_s: float, begun_s: float, then: ReductionPart | None) -> None:
        self.left_s, self.since_s, self.begun_s, self.then = left_s, now_s, begun_s, then
        self.pace = 0.0
        """0 until the changes of this instant are settled."""


class _SharedSum:
    """The sums of a shared parameter's gradients, mini-batch by mini-batch, where pipelines are never flushed.

    Each begins when the last of its holders has them, and not before the one before has ended; holders go on until
    their updates need it. Sums of what pipelines have changed in a wave are such, too, from push to pull.
    """

    def __init__(self, seconds: float, members: list[int], early: int = 0) -> None:
        """Begin with none; a member asks so often before it needs the first."""
        self._seconds = seconds
        self._begun, self._asked = dict.fromkeys(members, 0), dict.fromkeys(members, -early)
        """By rank, of how many mini-batches it has its gradients, and has asked for the sums."""
        self._latest_s: list[float] = []
        self._ends_s: list[float] = []
        self._waiting: dict[int, list[int]] = {}

    def begin(self, rank: int, moment_s: float) -> list[int]:
        """Note that a rank has its gradient of the next mini-batch; return the ranks that waited for it."""
        number = self._begun[rank]
        self._begun[rank] += 1
        if number == len(self._latest_s):
            self._latest_s.append(-inf)
        self._latest_s[number] = max(self._latest_s[number], moment_s)
        if min(self._begun.values()) <= number:
            return []
        before_s = self._ends_s[-1] if self._ends_s else -inf
        self._ends_s.append(max(self._latest_s[number], before_s) + self._seconds)
        return self._waiting.pop(number, [])

    def ask(self, rank: int) -> bool:
        """Note that a rank needs the next sum; return whether its end is known."""
        number = self._asked[rank]
        self._asked[rank] += 1
        if number < len(self._ends_s):
            return True
        self._waiting.setdefault(number, []).append(rank)
        return False

    def span(self, rank: int) -> Span:
        """Return when the sum that a rank has asked for last began and ended."""
        end_s = self._ends_s[self._asked[rank] - 1] if self._asked[rank] > 0 else -inf
        return (end_s - self._seconds, end_s)


class DeadlockError(AssertionError):
    """Ranks wait for each other for ever: whoever had the program simulated should have checked it."""


class ContentionSimulation:
    """One simulation, event by event.

    A rank runs ahead of the clock until it does what others may feel: begin a transfer on a lane, or compute while a
    lane may slow it. All changes of one instant are settled together, so that their order does not matter. Where ranks
    share nothing there are no lanes, and they only wait for each other. Sums of shared parameters of pipelines that are
    never flushed have none, either.
    """

    def __init__(
        self, rows: Rows, times: Durations, sharing: Sharing | None, tracing: bool = False, shift: int = 0
    ) -> None:
        count = len(rows)
        self.rows, self.times, self.sharing = rows, times, sharing
        self.meetings = joint_reductions(rows, times.stage)
        tied = {key[1]: meeting.members for key, meeting in self.meetings.items() if key[0] == TIED_CODE}
        self.wiring = Lanes(times, sharing, [tied.get(index, ()) for index in range(len(times.tied_s))])
        self.touching: list[list[Lane]] = [[] for _ in rows]
        """Lanes that slow a rank's computing, or are slowed by it."""
        for lane in self.wiring.lanes:
            for rank in lane.ranks:
                self.touching[rank].append(lane)
        self.views = views(rows, times, self.wiring, shift)
        self.sums = {at: _SharedSum(times.tied_s[at], members) for at, members in tied.items()} if shift else {}
        self.sums_of = [[own_sum for at, own_sum in self.sums.items() if rank in tied[at]] for rank in range(count)]
        """By rank."""
        every = [(_SharedSum(each.seconds, list(each.ranks), each.early_pulls), each.ranks) for each in times.waves]
        self.waves = [[own_sum for own_sum, ranks in every if rank in ranks] for rank in range(count)]
        """By rank, the sums of waves."""
        self.missing_waves = [0] * count
        """By rank, of how many of them a pull waits to know the end."""
        self.backward_ends_s: dict[int, deque[float]] = defaultdict(deque)
        """When the last backwards of replicas ended, as long as their reductions have not."""
        self.part_ends_s: dict[int, deque[float]] = defaultdict(deque)
        """The same of what replicas have in reductions on lanes."""
        self.awaiting: set[int] = set()
        """Replicas that wait for the end of their part."""
        self.reduced_s: dict[int, float] = {}
        """When the last backwards ended of what is being reduced."""
        self.reduction_end_s = [-inf] * count
        """The end of every rank's latest reduction."""
        self.clock, self.position = [times.overhead_s] * count, [0] * count
        self.work: list[_Computation | None] = [None] * count
        self.busy = [False] * count
        """Whether a rank computed when the last instant was settled."""
        self.due_s = [-1.0] * count
        self.now_s, self.serial = 0.0, 0
        self.events: list[tuple[float, int]] = []
        """A heap of (seconds, rank or -1 - lane); void where the rank or lane is due at another time."""
        self.ready: list[int] = []
        self.crowded_passages: list[Passage] = []
        self.changed_lanes: dict[Lane, None] = {}
        self.changed_ranks: dict[int, None] = {}
        self.spans: list[list[Span]] | None = [[(0.0, 0.0)] * len(row) for row in rows] if tracing else None

    def go(self) -> float:
        """Run all ranks to their ends; return the seconds of the step."""
        events, due_s, ready, advance = self.events, self.due_s, self.ready, self._advance
        ready.extend(range(len(self.rows) - 1, -1, -1))
        while True:
            while ready:
                advance(ready.pop())
            if (self.changed_lanes or self.changed_ranks or self.crowded_passages) and (
                not events or events[0][0] > self.now_s
            ):
                self._settle()
            if not events:
                break
            time_s, subject = heappop(events)
            if subject < 0:
                lane = self.wiring.lanes[-1 - subject]
                if lane.due_s == time_s:
                    self.now_s = time_s
                    self._finish(lane)
            elif due_s[subject] == time_s:
                self.now_s, due_s[subject] = time_s, -1.0
                if self.work[subject] is None or self._over(subject):
                    advance(subject)
        stuck = [rank for rank, actions in enumerate(self.rows) if self.position[rank] < len(actions)]
        if stuck:
            raise DeadlockError(f"deadlock in a program that was not checked: ranks {stuck}")
        return max(self.clock)

    def _call(self, rank: int, time_s: float) -> None:
        self.due_s[rank] = time_s
        heappush(self.events, (time_s, rank))

    def _over(self, rank: int) -> bool:
        """End a computation; return False where its second half, with a reduction beside it, begins."""
        work, now_s = self.work[rank], self.now_s
        assert work is not None
        self.changed_ranks[rank] = None
        if work.then is not None:
            work.then.begun_s = now_s
            self._begin(work.then.lane, work.then.seconds, work.then)
            self.work[rank] = _Computation(work.then.hidden_s, now_s, work.begun_s, None)
            return False
        own = self.views[rank].ends.get(self.position[rank])
        if own is not None:
            self._note_end(rank, own, now_s)
        self.work[rank] = None
        if self.spans is not None:
            self.spans[rank][self.position[rank]] = (work.begun_s, now_s)
        self.clock[rank] = now_s
        self.position[rank] += 1
        return True

    def _advance(self, rank: int) -> None:
        """Perform actions until one has to wait; long, since calls would take longer than what they do."""
        codes, queues, seconds, ends, felt = self.views[rank]
        clock, spans = self.clock[rank], self.spans
        for at in range(self.position[rank], len(codes)):
            code, queue = codes[at], queues[at]
            begun = clock
            if queue is None:
                if code in JOINT_CODES:
                    self.clock[rank], self.position[rank] = clock, at
                    self._meet(rank, code, *self.rows[rank][at][1::2])
                    return
                if code == PULL_CODE:
                    self.clock[rank], self.position[rank] = clock, at
                    self._pull(rank)
                    return
                if code == PUSH_CODE:
                    clock += seconds[at]
                    self._push(rank, clock)
                elif at >= felt:
                    self.clock[rank], self.position[rank] = clock, at
                    self._compute(rank, seconds[at])
                    return
                else:
                    clock += seconds[at]
                    if at in ends:
                        self._note_end(rank, ends[at], clock)
            elif code in RECEIVE_CODES:
                if not queue.arrivals:
                    queue.blocking = True
                    break
                arrived = queue.arrivals.popleft()
                if arrived > clock:
                    clock = arrived
            else:
                if queue.lane is None:
                    if queue.free_s > begun:
                        begun = queue.free_s
                    queue.free_s = begun + seconds[at]
                    self._deliver(queue, at, begun, queue.free_s)
                elif clock > self.now_s:
                    self._call(rank, clock)
                    break
                elif queue.busy:
                    queue.waiting.append(at)
                else:
                    self._send(queue, queue.lane, at)
                continue
            if spans is not None:
                spans[rank][at] = (begun, clock)
        else:
            at = len(codes)
        self.clock[rank], self.position[rank] = clock, at

    def _compute(self, rank: int, seconds: float) -> None:
        """Begin a computation that may be slowed, or that a reduction accompanies, when the rank's time has come."""
        clock = self.clock[rank]
        if clock > self.now_s:
            self._call(rank, clock)
            return
        own = self.views[rank].ends.get(self.position[rank])
        part = None if own is None else self.wiring.parts.get(own)
        left_s = seconds if part is None else seconds - part.hidden_s
        self.work[rank] = _Computation(left_s, self.now_s, clock, part)
        self.changed_ranks[rank] = None

    def _send(self, queue: Queue, lane: Lane, at: int) -> None:
        queue.busy, queue.at, queue.begun_s = True, at, self.now_s
        self._begin(lane, self.views[queue.sender].seconds[at], queue)

    def _deliver(self, queue: Queue, at: int, begun_s: float, end_s: float) -> None:
        """End the message that the sender's action at a position sends."""
        queue.arrivals.append(end_s)
        if self.spans is not None:
            self.spans[queue.sender][at] = (begun_s, end_s)
        if queue.blocking:
            queue.blocking = False
            self.ready.append(queue.receiver)

    def _begin(self, lane: Lane, seconds: float, owner: object) -> None:
        """Begin a transfer at this moment."""
        now_s, flows = self.now_s, lane.flows
        lane.progress_s = lane.progress_s + (now_s - lane.since_s) * lane.pace if flows else 0.0
        lane.since_s = now_s
        self.serial += 1
        heappush(flows, (lane.progress_s + seconds, self.serial, owner))
        if self._count(lane, 1) or lane.ranks:
            self.changed_lanes[lane] = None
        elif len(flows) == 1:
            # At full speed until a port gets crowded: by far the most frequent case, with nothing to be settled.
            lane.pace, lane.due_s = 1.0, now_s + seconds
            heappush(self.events, (lane.due_s, -1 - lane.number))
        elif flows[0][1] == self.serial:
            self.changed_lanes[lane] = None

    def _finish(self, lane: Lane) -> None:
        """End the transfers of a lane that are due, and begin those that waited for them."""
        flows, owners = lane.flows, []
        lane.progress_s, lane.since_s, lane.due_s = flows[0][0], self.now_s, -1.0
        while flows and flows[0][0] <= lane.progress_s:
            owners.append(heappop(flows)[2])
        self._count(lane, -len(owners))
        if flows:
            self.changed_lanes[lane] = None
        for owner in owners:
            if isinstance(owner, Queue):
                self._deliver(owner, owner.at, owner.begun_s, self.now_s)
                owner.busy = bool(owner.waiting)
                if owner.waiting:
                    self._send(owner, lane, owner.waiting.popleft())
            elif isinstance(owner, ReductionPart):
                self._end_part(owner.replica)
            elif isinstance(owner, JointReduction):
                self._part(owner, self.now_s)

    def _count(self, lane: Lane, more: int) -> bool:
        """Count ``more`` transfers where a lane passes; return whether the speed there is yet to be settled."""
        crowded = False
        for passage, weight in lane.passages:
            before = passage.flows
            passage.flows += more * weight
            if before > passage.capacity or passage.flows > passage.capacity:
                self.crowded_passages.append(passage)
                crowded = True
        for rank in lane.ranks:
            self.changed_ranks[rank] = None
        return crowded

    def _settle(self) -> None:
        """Give everything that this instant has changed its speed from here on."""
        now_s, stirred = self.now_s, self.changed_lanes
        for passage in self.crowded_passages:
            speed = min(1.0, passage.capacity / passage.flows) if passage.flows else 1.0
            if speed != passage.speed:
                passage.speed = speed
                stirred.update(dict.fromkeys(passage.lanes))
        for rank in self.changed_ranks:
            self._turn(rank)
        for lane in stirred:
            if lane.flows:
                lane.progress_s += (now_s - lane.since_s) * lane.pace
                lane.since_s, lane.pace = now_s, self._pace(lane)
                due_s = now_s + max(0.0, lane.flows[0][0] - lane.progress_s) / lane.pace
                if due_s != lane.due_s:
                    lane.due_s = due_s
                    heappush(self.events, (due_s, -1 - lane.number))
        self.crowded_passages.clear()
        stirred.clear()
        self.changed_ranks.clear()

    def _pace(self, lane: Lane) -> float:
        pace = 1.0
        for passage, _ in lane.passages:
            if passage.speed < pace:
                pace = passage.speed
        if any(self.busy[rank] for rank in lane.ranks):
            pace /= lane.slowdown[1]
        return pace

    def _turn(self, rank: int) -> None:
        """Note whether a rank computes, and how fast."""
        work, now_s = self.work[rank], self.now_s
        if self.busy[rank] != (work is not None):
            self.busy[rank] = work is not None
            self.changed_lanes.update(dict.fromkeys(self.touching[rank]))
        if work is None:
            return
        pace = 1 / max((lane.slowdown[0] for lane in self.touching[rank] if lane.flows), default=1.0)
        if pace != work.pace:
            work.left_s -= (now_s - work.since_s) * work.pace
            work.since_s, work.pace = now_s, pace
            self._call(rank, now_s + max(0.0, work.left_s) / pace)

    def _meet(self, rank: int, code: int, index: int, own: int) -> None:
        clock = self.clock[rank]
        if code == REDUCE_CODE:
            ended = self.reduced_s[own] = self.backward_ends_s[own].popleft()
            if own not in self.wiring.parts:
                self._token(self.meetings[code, self.times.stage[own]], ended + self.times.exposed_s[own])
            elif self.part_ends_s[own]:
                self._token(self.meetings[code, self.times.stage[own]], self.part_ends_s[own].popleft())
            else:
                self.awaiting.add(own)
        elif self.sums:
            if self.sums[index].ask(rank):
                self._end_sum(rank, self.sums[index])
        elif self.wiring.tied_lanes[index] is not None and clock > self.now_s:
            self._call(rank, clock)
        else:
            self._token(self.meetings[code, index], clock)

    def _push(self, rank: int, clock: float) -> None:
        """Note that a rank has pushed its next wave."""
        for own_sum in self.waves[rank]:
            for waiting in own_sum.begin(rank, clock):
                self.missing_waves[waiting] -= 1
                if not self.missing_waves[waiting]:
                    self._end_pull(waiting)

    def _pull(self, rank: int) -> None:
        """Ask for the next wave's sums."""
        self.missing_waves[rank] = sum(not own_sum.ask(rank) for own_sum in self.waves[rank])
        if not self.missing_waves[rank]:
            self._end_pull(rank)

    def _end_pull(self, rank: int) -> None:
        """Let a rank go on that has pulled a wave, the ends of whose sums are known."""
        at, begun_s = self.position[rank], self.clock[rank]
        ends_s = [own_sum.span(rank)[1] for own_sum in self.waves[rank]]
        self.clock[rank] = max([begun_s, *ends_s]) + self.views[rank].seconds[at]
        if self.spans is not None:
            self.spans[rank][at] = (begun_s, self.clock[rank])
        self.position[rank] += 1
        self.ready.append(rank)

    def _note_end(self, rank: int, own: int, clock: float) -> None:
        """Note that a replica has its gradients of a mini-batch."""
        self.backward_ends_s[own].append(clock)
        for shared in self.sums_of[rank]:
            for waiting in shared.begin(rank, clock):
                self._end_sum(waiting, shared)

    def _end_sum(self, rank: int, own_sum: _SharedSum) -> None:
        """Let a rank go on that has asked for a sum, the end of which is known."""
        begun_s, end_s = own_sum.span(rank)
        self.clock[rank] = max(self.clock[rank], end_s)
        if self.spans is not None:
            self.spans[rank][self.position[rank]] = (begun_s, self.clock[rank])
        self.position[rank] += 1
        self.ready.append(rank)

    def _end_part(self, own: int) -> None:
        """Note that what a replica has in a reduction has passed its lane."""
        if own in self.awaiting:
            self.awaiting.remove(own)
            self._token(self.meetings[REDUCE_CODE, self.times.stage[own]], self.now_s)
        else:
            self.part_ends_s[own].append(self.now_s)

    def _token(self, meeting: JointReduction, time_s: float) -> None:
        """Count what a meeting has waited for."""
        meeting.end_s = max(meeting.end_s, time_s)
        meeting.missing -= 1
        if meeting.missing:
            return
        if meeting.code == REDUCE_CODE:
            # A rank's stages are reduced one after the other.
            rank = meeting.members[0]
            own = self.rows[rank][self.position[rank]][3]
            self._part(meeting, max(meeting.end_s, self.reduction_end_s[rank] + self.times.reduce_s[own]))
            return
        lane, seconds = self.wiring.tied_lanes[meeting.index], self.times.tied_s[meeting.index]
        if lane is None:
            self._part(meeting, meeting.end_s + seconds)
        else:
            self._begin(lane, seconds, meeting)

    def _part(self, meeting: JointReduction, end_s: float) -> None:
        """Let the ranks of a meeting go on."""
        for rank in meeting.members:
            self.clock[rank] = max(self.clock[rank], end_s)
            if self.spans is not None:
                begun_s, _ = self._reduction(meeting, rank, end_s)
                self.spans[rank][self.position[rank]] = (begun_s, self.clock[rank])
            if meeting.code == REDUCE_CODE:
                self.reduction_end_s[rank] = end_s
            self.position[rank] += 1
            self.ready.append(rank)
        meeting.begin_anew()

    def _reduction(self, meeting: JointReduction, rank: int, end_s: float) -> Span:
        times, index = self.times, meeting.index
        if meeting.code == TIED_CODE:
            if self.sharing:
                return (meeting.end_s, end_s)
            length_s, earliest_s = times.tied_s[index], self.clock[rank]
        else:
            own = self.rows[rank][self.position[rank]][3]
            part = self.wiring.parts.get(own)
            if part is not None:
                return (part.begun_s, end_s)
            last_s = times.last_s or times.backward_s
            length_s, earliest_s = times.reduce_s[own], self.reduced_s[own] - last_s[own]
        return (min(end_s, max(end_s - length_s, earliest_s)), end_s)
