"""Timeline: when every action ran, predicted or measured; written as a Chrome trace."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from autopar.errors import FileError
from autopar.formats.document import MOST_RANKS, parse_json, read_text, shown, write_text
from autopar.formats.program import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    RECEIVE,
    RECEIVE_GRADIENT,
    REDUCE,
    REDUCE_TIED,
    SEND,
    SEND_GRADIENT,
    UPDATE,
    WEIGHT_BACKWARD,
    Action,
)

Origin = Literal["simulated", "measured"]
LONGEST_US = 1e18
TRACKS = ("compute", "send", "receive", "reduce")
_TRACK = {
    FORWARD: "compute",
    BACKWARD: "compute",
    INPUT_BACKWARD: "compute",
    WEIGHT_BACKWARD: "compute",
    UPDATE: "compute",
    SEND: "send",
    SEND_GRADIENT: "send",
    RECEIVE: "receive",
    RECEIVE_GRADIENT: "receive",
    REDUCE: "reduce",
    REDUCE_TIED: "reduce",
}


def track_of(kind: str) -> str:
    """Return the track of :data:`TRACKS` on which an action of this kind is drawn."""
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
        """Number of ranks."""
        return max(self.ranks, default=-1) + 1

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
        """Write a Chrome trace (opens in Perfetto): a process per rank, a thread per track, times in microseconds."""
        header: list[dict[str, Any]] = []
        for rank in range(self.rank_count()):
            header.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
            for index, track in enumerate(TRACKS):
                header.append({"ph": "M", "pid": rank, "tid": index, "name": "thread_name", "args": {"name": track}})
        events = [
            {
                "ph": "X",
                "pid": event.rank,
                "tid": TRACKS.index(_TRACK[event.action.kind]),
                "name": str(event.action),
                "cat": _TRACK[event.action.kind],
                "ts": round(event.start_s * 1e6, 3),
                "dur": round((event.end_s - event.start_s) * 1e6, 3),
            }
            for event in sorted(self, key=lambda event: (event.start_s, event.end_s, event.rank))
        ]
        lines = ",\n".join(json.dumps(entry) for entry in header + events)
        other = json.dumps({"format": "autopar.trace", "version": 1, "origin": self.origin})
        text = f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [\n{lines}\n]}}\n'
        write_text(path, text, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read a trace that :meth:`save` wrote.

        Raises:
            FileError: the file is missing, or is not a trace of autopar; names the JSON path.
        """
        path = Path(path)
        content = parse_json(read_text(path, "trace"), path)
        if not isinstance(content, dict):
            raise FileError(f"{path}: $: expected an object with traceEvents")
        other = content.get("otherData")
        if not isinstance(other, dict) or other.get("format") != "autopar.trace" or other.get("version") != 1:
            raise FileError(f'{path}: $.otherData.format: expected "autopar.trace" of version 1')
        if other.get("origin") not in ("simulated", "measured"):
            raise FileError(f'{path}: $.otherData.origin: expected "simulated" or "measured"')
        timeline = cls(other["origin"])
        entries = content.get("traceEvents")
        if not isinstance(entries, list):
            raise FileError(f"{path}: $.traceEvents: expected an array of events")
        for index, entry in enumerate(entries):
            at = f"{path}: $.traceEvents[{index}]"
            if not isinstance(entry, dict):
                raise FileError(f"{at}: expected an event, found {shown(entry)}")
            if entry.get("ph") != "M":
                timeline.add(*_read_event(entry, at))
        if timeline.rank_count() > len(timeline):
            raise FileError(
                f"{path}: $.traceEvents: {len(timeline)} events are too few for {timeline.rank_count()} ranks"
            )
        return timeline


def _read_event(entry: dict[str, object], at: str) -> Event:
    """Read a complete event of a Chrome trace; ``at`` says where it stands."""
    if entry.get("ph") != "X":
        raise FileError(f"{at}.ph: expected a complete event (X), found {shown(entry.get('ph'))}")
    rank, name = entry.get("pid"), entry.get("name")
    if type(rank) is not int or not 0 <= rank < MOST_RANKS:
        raise FileError(f"{at}.pid: expected a rank below {MOST_RANKS}, found {shown(rank)}")
    start_s, length_s = (_microseconds(entry, key, at) / 1e6 for key in ("ts", "dur"))
    try:
        action = Action.parse(name if isinstance(name, str) else json.dumps(name))
    except ValueError as error:
        raise FileError(f"{at}.name: {error}") from error
    return Event(rank, action, start_s, start_s + length_s)


def _microseconds(entry: dict[str, object], key: str, at: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LONGEST_US:
        raise FileError(f"{at}.{key}: expected microseconds, found {shown(value)}")
    return float(value)
