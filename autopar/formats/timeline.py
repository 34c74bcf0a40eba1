"""Timeline: when every action ran, predicted or measured; written as a Chrome trace.

Read from one are the time that every action takes by itself, apart from what it waits for, where the time of every rank
went, and what the step was spent on along its critical path.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, PlainValidator

from autopar.errors import FileError
from autopar.formats.document import MOST_RANKS, Bytes, Record, read_text, write_text
from autopar.formats.program import (
    BACKWARDS,
    FORWARD,
    KINDS,
    PULL,
    RECEIVES,
    REDUCTIONS,
    SENDS,
    UPDATES,
    Action,
)
from autopar.formats.report import CauseTimes, KindTimes

Origin = Literal["simulated", "measured", "rehearsed"]
"""Predicted; or recorded by ranks, of a model's layers or of stand-ins in virtual time."""
_TRACKS = ("compute", "send", "receive", "reduce")
_COMPUTATIONS = (FORWARD, *BACKWARDS, *UPDATES)
_KINDS_OF_TRACKS = (_COMPUTATIONS, SENDS, RECEIVES, (*REDUCTIONS, PULL))
_TRACK = {kind: track for track, kinds in zip(_TRACKS, _KINDS_OF_TRACKS, strict=True) for kind in kinds}


def track_of(kind: str) -> str:
    """Return the track of :data:`_TRACKS` on which an action of this kind is drawn."""
    return _TRACK[kind]


class Event(NamedTuple):
    """One action of one rank, with its times in seconds from the step's start."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Events of one step, as columns."""

    origin: Origin
    ranks: array[int] = field(default_factory=lambda: array("i"))
    actions: list[Action] = field(default_factory=list)
    starts_s: array[float] = field(default_factory=lambda: array("d"))
    ends_s: array[float] = field(default_factory=lambda: array("d"))
    memory: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """By rank, when how many bytes were held, at every change; empty where nobody counted."""
    limits_bytes: dict[int, int] = field(default_factory=dict)
    """By rank, what its device has for them."""
    loading: list[tuple[int, float, float]] = field(default_factory=list)
    """(rank, start, end) of when ranks waited for mini-batches; of a step, also before its first action."""

    def add(self, rank: int, action: Action, start_s: float, end_s: float) -> None:
        """Append an event; the one way a timeline grows while it is being made."""
        self.ranks.append(rank)
        self.actions.append(action)
        self.starts_s.append(start_s)
        self.ends_s.append(end_s)

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[Event]:
        return map(Event, self.ranks, self.actions, self.starts_s, self.ends_s)

    @property
    def end_s(self) -> float:
        """When the last event ends: the step time."""
        return max(self.ends_s, default=0.0)

    def rank_count(self) -> int:
        return max(self.ranks, default=-1) + 1

    def peaks_bytes(self) -> dict[int, int]:
        """Return the most bytes that every rank held, of ranks whose bytes were counted."""
        return {rank: max(size for _, size in moments) for rank, moments in self.memory.items()}

    def busy_s(self) -> list[float]:
        """Seconds that each rank computes."""
        busy = [0.0] * self.rank_count()
        for rank, action, start, end in self:
            if _TRACK[action.kind] == "compute":
                busy[rank] += end - start
        return busy

    def bubble(self) -> float:
        """Share of the ranks' time in which they compute nothing."""
        total = self.end_s * self.rank_count()
        return max(0.0, 1.0 - sum(self.busy_s()) / total) if total > 0 else 0.0

    def save(self, path: str | Path, *, overwrite: bool = True) -> None:
        """Write a Chrome trace (opens in Perfetto): a process per rank, a thread per track, times in microseconds.

        Flows lead from every send to its receive.
        """
        header: list[dict[str, Any]] = []
        for rank in range(self.rank_count()):
            header.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
            for index, track in enumerate(_TRACKS):
                header.append({"ph": "M", "pid": rank, "tid": index, "name": "thread_name", "args": {"name": track}})
        events = [
            {
                "ph": "X",
                "pid": event.rank,
                "tid": _TRACKS.index(_TRACK[event.action.kind]),
                "name": str(event.action),
                "cat": _TRACK[event.action.kind],
                "ts": round(event.start_s * 1e6, 3),
                "dur": round((event.end_s - event.start_s) * 1e6, 3),
            }
            for event in sorted(self, key=lambda event: (event.start_s, event.end_s, event.rank))
        ]
        counters = [
            {"ph": "C", "pid": rank, "name": _MEMORY, "ts": round(at_s * 1e6, 3), "args": {"bytes": size}}
            for rank, moments in self.memory.items()
            for at_s, size in moments
        ]
        lines = ",\n".join(json.dumps(entry) for entry in chain(header, events, self._flows(), counters))
        limits = {"limits_bytes": {str(rank): size for rank, size in self.limits_bytes.items()}} if counters else {}
        other = json.dumps({"format": "autopar.trace", "version": 1, "origin": self.origin, **limits})
        text = f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [\n{lines}\n]}}\n'
        write_text(path, text, overwrite=overwrite)

    def _flows(self) -> Iterator[dict[str, Any]]:
        """Yield both ends of every message, each within the span of its action, where viewers look for them."""
        sends = {(event.rank, event.action): event for event in self if event.action.kind in SENDS}
        receives = (event for event in self if event.action.kind in RECEIVES)
        for number, receive in enumerate(receives):
            send = sends.get(sending_of(receive))
            if send is not None and send.start_s <= receive.end_s:
                arriving_s = (max(send.start_s, receive.start_s) + receive.end_s) / 2
                yield {"ph": "s", **_flow_end(send, send.start_s, number)}
                yield {"ph": "f", "bp": "e", **_flow_end(receive, arriving_s, number)}

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read a trace that :meth:`save` wrote.

        Raises:
            FileError: the file is missing, or is not a trace of autopar; names the JSON path.
        """
        path = Path(path)
        trace = _Trace.parse(read_text(path, "trace"), path)
        timeline = cls(trace.otherData.origin)
        timeline.limits_bytes.update({int(rank): size for rank, size in trace.otherData.limits_bytes.items()})
        for each in trace.traceEvents:
            if isinstance(each, _MemoryCounter):
                timeline.memory.setdefault(each.pid, []).append((each.ts / 1e6, each.args.bytes))
            elif isinstance(each, _ActionSpan):
                timeline.add(each.pid, each.name, each.ts / 1e6, (each.ts + each.dur) / 1e6)
        if timeline.rank_count() > len(timeline):
            raise FileError(
                f"{path}: $.traceEvents: {len(timeline)} events are too few for {timeline.rank_count()} ranks"
            )
        return timeline


def _flow_end(event: Event, at_s: float, number: int) -> dict[str, Any]:
    track = _TRACKS.index(_TRACK[event.action.kind])
    ts = round(at_s * 1e6, 3)
    return {"pid": event.rank, "tid": track, "name": "message", "cat": "message", "id": number, "ts": ts}


_MEMORY = "memory"
_Microseconds = Annotated[float, Field(ge=0, lt=1e18)]
_Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]


class _TraceRecord(Record):
    """A piece of a Chrome trace, to which programs that draw it may have added keys."""

    model_config = ConfigDict(extra="ignore")


class _Label(_TraceRecord):
    """What a rank or a track is called."""

    ph: Literal["M"]


class _ActionSpan(_TraceRecord):
    """An action and its times."""

    ph: Literal["X"]
    pid: _Rank
    name: Annotated[Action, PlainValidator(lambda text: Action.parse(str(text)))]
    ts: _Microseconds
    dur: _Microseconds


class _FlowEnd(_TraceRecord):
    """Where a message begins (``s``) or ends (``f``); its actions say the same."""

    ph: Literal["s", "f"]


class _HeldBytes(_TraceRecord):
    bytes: Bytes


class _MemoryCounter(_TraceRecord):
    """The bytes that a rank held from a moment on."""

    ph: Literal["C"]
    pid: _Rank
    name: Literal["memory"]
    ts: _Microseconds
    args: _HeldBytes


class _TraceHeader(_TraceRecord):
    format: Literal["autopar.trace"]
    version: Literal[1]
    origin: Origin
    limits_bytes: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Bytes] = Field(default_factory=dict)


_Piece = _Label | _ActionSpan | _FlowEnd | _MemoryCounter


class _Trace(_TraceRecord):
    otherData: _TraceHeader  # noqa: N815
    traceEvents: tuple[Annotated[_Piece, Field(discriminator="ph")], ...]  # noqa: N815


_COMPUTE, _LOADING, _UPDATE, _REDUCE, _WAITING, _TRANSFER = range(6)
_PLAIN = {
    **dict.fromkeys(_COMPUTATIONS, _COMPUTE),
    **dict.fromkeys(UPDATES, _UPDATE),
    **dict.fromkeys((*REDUCTIONS, PULL), _REDUCE),
}
_SENT_AS = dict(zip(RECEIVES, SENDS, strict=True))
_Span = tuple[float, float, int]


class TimeUse(NamedTuple):
    """Seconds of one rank's step; together they are the step.

    Where two things go on at once, the one that is named first counts: what a backward hides costs nothing.
    """

    compute_s: float = 0.0
    """Forwards and backwards, with what they recompute."""
    loading_s: float = 0.0
    """Waiting for a mini-batch, and nothing to compute meanwhile."""
    update_s: float = 0.0
    """The optimizer's step, with what ranks tell each other there."""
    reduce_s: float = 0.0
    """Blocked in a reduction of gradients, until all of its ranks have come and it is done."""
    waiting_s: float = 0.0
    """Blocked in a receive before the peer began to send."""
    transfer_s: float = 0.0
    """Blocked in a receive after that; and, as measured, handing a message over. A simulated send occupies no rank."""
    idle_s: float = 0.0
    """The rest: what ranks do between actions."""


def time_use(timeline: Timeline) -> list[TimeUse]:
    """Return where the time of every rank went in a step."""
    return time_use_between([timeline], 0.0, timeline.end_s)


def time_use_between(steps: Sequence[Timeline], start_s: float, end_s: float) -> list[TimeUse]:
    """Return where the time of every rank went between two moments.

    Args:
        steps: timelines on one clock of all steps that have to do with that time; some ranks begin a step while others
            still end the one before.
        start_s: the earlier moment.
        end_s: the later one.
    """
    spans: list[list[_Span]] = [[] for _ in range(max(step.rank_count() for step in steps))]
    for step in steps:
        for rank, start, end, what in _spans(step):
            start, end = max(start, start_s), min(end, end_s)
            if start < end:
                spans[rank].append((start, end, what))
    known = map(_time_by_activity, spans)
    return [TimeUse._make([*each, max(0.0, end_s - start_s - sum(each))]) for each in known]


def sending_of(event: Event) -> tuple[int, Action]:
    """Return the sending rank and the send of a receive."""
    action = event.action
    kind = _SENT_AS[action.kind]
    return action.peer, Action(kind, action.peer_stage, action.micro_batch, event.rank, action.stage, action.version)


def _spans(step: Timeline) -> Iterator[tuple[int, float, float, int]]:
    """Yield (rank, start, end, what it was spent on) of a step's events; a receive is parted where its send began."""
    begun = {(event.rank, event.action): event.start_s for event in step if event.action.kind in SENDS}
    for rank, start, end in step.loading:
        yield rank, start, end, _LOADING
    for event in step:
        rank, action, start, end = event
        if action.kind in _PLAIN:
            yield rank, start, end, _PLAIN[action.kind]
        elif action.kind in _SENT_AS:
            middle = min(max(begun.get(sending_of(event), math.inf), start), end)
            yield rank, start, middle, _WAITING
            yield rank, middle, end, _TRANSFER
        elif step.origin != "simulated":
            yield rank, start, end, _TRANSFER


def _time_by_activity(spans: Sequence[_Span]) -> list[float]:
    """Return the seconds of every kind of span; of those at one moment, the lowest kind counts."""
    edges = sorted(edge for start, end, what in spans for edge in ((start, 1, what), (end, -1, what)))
    count = _TRANSFER + 1
    open_now, total, before = [0] * count, [0.0] * count, 0.0
    for at, change, what in edges:
        first = next((kind for kind in range(count) if open_now[kind]), None)
        if first is not None:
            total[first] += at - before
        before = at
        open_now[what] += change
    return total


OwnTimes = Mapping[tuple[int, Action], float]
"""Seconds by rank and action; a message has those from its send to its arrival, under the send."""


def own_times(timeline: Timeline) -> dict[tuple[int, Action], float]:
    """Return how long every action of a timeline takes by itself.

    A computation and an update take as long as they last. A reduction takes from when the last of its ranks has come.
    A measured message takes from its send to its receive's end, and is left out where that does not tell: where the
    receiver was not waiting yet, or the message before it was still under way.
    """
    found: dict[tuple[int, Action], float] = {}
    come: dict[tuple[str, int], float] = {}
    for event in timeline:
        if event.action.kind in REDUCTIONS:
            key = event.action.reduction
            come[key] = max(come.get(key, event.start_s), event.start_s)
    is_measured = timeline.origin != "simulated"
    for event in timeline:
        if event.action.kind in REDUCTIONS:
            found[event.rank, event.action] = max(0.0, event.end_s - come[event.action.reduction])
        elif event.action.kind in _COMPUTATIONS or (event.action.kind in SENDS and not is_measured):
            found[event.rank, event.action] = event.end_s - event.start_s
    return found | _messages(timeline) if is_measured else found


def medians(steps: Iterable[OwnTimes]) -> dict[tuple[int, Action], float]:
    """Return the median of every action over several steps."""
    found: dict[tuple[int, Action], list[float]] = defaultdict(list)
    for step in steps:
        for key, seconds in step.items():
            found[key].append(seconds)
    return {key: median(values) for key, values in found.items()}


def compare_times(measured_times: OwnTimes, predicted_times: OwnTimes) -> tuple[KindTimes, ...]:
    """Return measured over predicted by kind of action, of the actions that both know and that take time."""
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for key, predicted_s in predicted_times.items():
        if key in measured_times and predicted_s > 0:
            pairs[key[1].kind].append((measured_times[key], predicted_s))
    return tuple(
        KindTimes(
            kind=kind,  # type: ignore[arg-type]  # checked there
            actions=len(pairs[kind]),
            measured_s=median(measured_s for measured_s, _ in pairs[kind]),
            predicted_s=median(predicted_s for _, predicted_s in pairs[kind]),
            ratio=median(measured_s / predicted_s for measured_s, predicted_s in pairs[kind]),
        )
        for kind in KINDS
        if kind in pairs
    )


def _messages(timeline: Timeline) -> dict[tuple[int, Action], float]:
    """Return the seconds of those messages of a measured timeline whose receivers were waiting for them alone."""
    sends = {(event.rank, event.action): event for event in timeline if event.action.kind in SENDS}
    receives = {sending_of(event): event for event in timeline if event.action.kind in RECEIVES}
    found: dict[tuple[int, Action], float] = {}
    arrived: dict[tuple[int, int], float] = {}
    for key, send in sorted(sends.items(), key=lambda item: item[1].start_s):
        receive = receives.get(key)
        if receive is None:
            continue
        pair = send.rank, receive.rank
        is_clear = arrived.get(pair, 0.0) <= send.start_s
        if is_clear and receive.start_s <= send.start_s <= receive.end_s:
            found[key] = receive.end_s - send.start_s
        arrived[pair] = max(arrived.get(pair, 0.0), receive.end_s)
    return found


LOADING, BETWEEN = "loading", "between actions"
_CAUSE = {
    FORWARD: "forwards",
    **dict.fromkeys(BACKWARDS, "backwards"),
    **dict.fromkeys((*SENDS, *RECEIVES), "messages"),
    **dict.fromkeys((*REDUCTIONS, PULL), "reductions"),
    **dict.fromkeys(UPDATES, "updates"),
}
CAUSES = (*dict.fromkeys(_CAUSE.values()), LOADING, BETWEEN)


class _EventPlace(NamedTuple):
    """An event of a rank."""

    rank: int
    at: int
    """Among the events of the rank."""


def seconds_by_cause(
    actions: Iterable[Action], times_s: Sequence[tuple[float, float]], loading: Iterable[tuple[float, float]] = ()
) -> dict[str, float]:
    """Return the seconds of every one of :data:`CAUSES` that one rank spent in a step; of no action, nothing.

    Args:
        actions: of its program.
        times_s: when each began and ended; where two go on at once, the one before counts.
        loading: when it waited for mini-batches, before its first action or within updates.

    >>> actions = [Action("F", 0, 0), Action("B", 0, 0), Action("U", 0, -1)]
    >>> found = seconds_by_cause(actions, [(1.0, 2.0), (2.0, 4.0), (4.5, 5.0)])
    >>> {cause: seconds for cause, seconds in found.items() if seconds}
    {'forwards': 1.0, 'backwards': 2.0, 'updates': 0.5, 'between actions': 0.5}
    """
    found = dict.fromkeys(CAUSES, 0.0)
    if not times_s:
        return found
    first_s = now_s = times_s[0][0]
    for action, (start_s, end_s) in zip(actions, times_s, strict=True):
        found[BETWEEN] += max(0.0, start_s - now_s)
        found[_CAUSE[action.kind]] += max(0.0, end_s - max(start_s, now_s))
        now_s = max(now_s, end_s)
    for start_s, end_s in loading:
        found[LOADING] += end_s - start_s
        found["updates"] -= max(0.0, end_s - max(start_s, first_s))
    return found


def critical_path(timeline: Timeline, before_s: float = 0.0) -> dict[str, float]:
    """Return the seconds of every one of :data:`CAUSES` on the critical path of a step; they add up to the step.

    That is the one way through a step that nothing was waited for, found from the end of its last action backwards:
    what an action waited for is what its rank did before, or the message that it received, or the last of those that
    it reduced with. A backward counts with what it recomputes, and a message from its send to its arrival where it was
    waited for. What a rank waited for its mini-batch, with nothing to compute, is loading. The rest lies between
    actions, before the first one among them, with ``before_s`` seconds that the step took before the timeline begins.
    """
    return _CriticalPath(timeline).seconds(before_s)


class _CriticalPath:
    """A way through a timeline, from its end to its beginning."""

    def __init__(self, timeline: Timeline) -> None:
        self._rows: dict[int, list[Event]] = defaultdict(list)
        self._end_s = timeline.end_s
        self._sent: dict[tuple[int, Action], _EventPlace] = {}
        self._joint: dict[tuple[str, int], list[_EventPlace]] = defaultdict(list)
        # A simulated send occupies no rank.
        self._occupied = timeline.origin == "measured"
        self._loading: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for rank, start_s, end_s in timeline.loading:
            self._loading[rank].append((start_s, end_s))
        for event in timeline:
            row, kind = self._rows[event.rank], event.action.kind
            place = _EventPlace(event.rank, len(row))
            if kind in SENDS:
                self._sent[event.rank, event.action] = place
            elif kind in REDUCTIONS:
                self._joint[event.action.reduction].append(place)
            row.append(event)

    def seconds(self, before_s: float) -> dict[str, float]:
        """Return what the way is made of."""
        found = dict.fromkeys(CAUSES, 0.0)
        if not self._rows:
            return found
        rank = max(self._rows, key=lambda each: max(event.end_s for event in self._rows[each]))
        place, now_s, gap = self._before(_EventPlace(rank, len(self._rows[rank]))), self._end_s, BETWEEN
        while place is not None and now_s > 0:
            event, rank = self._rows[place.rank][place.at], place.rank
            end_s = min(now_s, event.end_s)
            self._add(found, gap, rank, end_s, now_s)
            place, begun_s, gap = self._step(event, place, end_s)
            self._add(found, _CAUSE[event.action.kind], rank, begun_s, end_s)
            now_s = begun_s
        self._add(found, gap, rank, 0.0, max(0.0, now_s))
        self._add(found, BETWEEN, rank, -before_s, 0.0)
        return found

    def _add(self, found: dict[str, float], cause: str, rank: int, start_s: float, end_s: float) -> None:
        """Add a piece of the way: what it was spent on, and what a rank waited for its mini-batch meanwhile."""
        loading_s = 0.0
        if cause in ("updates", BETWEEN):
            spans = self._loading[rank]
            loading_s = sum(max(0.0, min(end_s, end) - max(start_s, start)) for start, end in spans)
        found[LOADING] += loading_s
        found[cause] += end_s - start_s - loading_s

    def _step(self, event: Event, place: _EventPlace, end_s: float) -> tuple[_EventPlace | None, float, str]:
        """Return what an event that ends at a moment waited for, when it began to, and what lies before that."""
        kind = event.action.kind
        if kind in RECEIVES:
            send = self._sent.get(sending_of(event))
            begun_s = event.start_s if send is None else self._rows[send.rank][send.at].start_s
            if send is not None and event.start_s <= begun_s <= end_s:
                # What lies between the sender's last action and the send waited for the messages before.
                return self._before(send), begun_s, BETWEEN if self._occupied else "messages"
        elif kind in REDUCTIONS:
            came = {each: self._came_s(each) for each in self._joint[event.action.reduction]}
            last = max(came, key=lambda each: (came[each], each == place))
            return self._before(last), min(end_s, came[last]), BETWEEN
        return self._before(place), min(end_s, event.start_s), BETWEEN

    def _came_s(self, place: _EventPlace) -> float:
        """When a rank came to an event: the end of the one before."""
        before = self._before(place)
        return 0.0 if before is None else self._rows[before.rank][before.at].end_s

    def _before(self, place: _EventPlace) -> _EventPlace | None:
        """Return the event before that occupied the rank, if there is one."""
        row = self._rows[place.rank]
        for at in range(place.at - 1, -1, -1):
            if self._occupied or row[at].action.kind not in SENDS:
                return _EventPlace(place.rank, at)
        return None


def compare_paths(run: Timeline, prediction: Timeline, measured_s: float, predicted_s: float) -> tuple[CauseTimes, ...]:
    """Return what measured and predicted steps were spent on; what the timelines are not of lies between actions.

    Args:
        run: a typical step, as ranks recorded it.
        prediction: of the same program.
        measured_s: the step, from the end of the one before to its own.
        predicted_s: the step, with what comes before its first action.
    """
    measured = critical_path(run, measured_s - run.end_s)
    predicted = critical_path(prediction, predicted_s - prediction.end_s)
    return tuple(CauseTimes(cause=name, measured_s=measured[name], predicted_s=predicted[name]) for name in CAUSES)
