"""Critical path: what a step's seconds were spent on, along the one way through it that nothing was waited for.

From the end of the last action backwards: what an action waited for is what its rank did before, or the message that it
received, or the last of those that it reduced with. Every moment of the step is spent on one thing, so the parts add up
to the step, and the parts of two timelines of one program to the difference between them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from autopar.formats.program import BACKWARDS, FORWARD, RECEIVES, REDUCTIONS, SENDS, UPDATE, Action
from autopar.formats.report import CauseTimes
from autopar.formats.timeline import Event, Timeline, sending_of

FORWARDS, BACKWARDS_WITH_RECOMPUTATION, MESSAGES = "forwards", "backwards", "messages"
REDUCTIONS_OF_GRADIENTS, UPDATES, BETWEEN = "reductions", "updates", "between actions"
CAUSES = (FORWARDS, BACKWARDS_WITH_RECOMPUTATION, MESSAGES, REDUCTIONS_OF_GRADIENTS, UPDATES, BETWEEN)
_CAUSE = {
    FORWARD: FORWARDS,
    **dict.fromkeys(BACKWARDS, BACKWARDS_WITH_RECOMPUTATION),
    **dict.fromkeys((*SENDS, *RECEIVES), MESSAGES),
    **dict.fromkeys(REDUCTIONS, REDUCTIONS_OF_GRADIENTS),
    UPDATE: UPDATES,
}


class _Place(NamedTuple):
    """An event of a rank."""

    rank: int
    at: int
    """Among the events of the rank."""


def critical_path(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of every one of :data:`CAUSES` on the critical path of a step; they add up to the step.

    A backward counts with what it recomputes, and a message from its send to its arrival where it was waited for. The
    rest lies between actions, before the first one among them.
    """
    return _Walk(timeline).seconds()


class _Walk:
    """A way through a timeline, from its end to its beginning."""

    def __init__(self, timeline: Timeline) -> None:
        self._rows: dict[int, list[Event]] = defaultdict(list)
        self._end_s = timeline.end_s
        self._sent: dict[tuple[int, Action], _Place] = {}
        self._joint: dict[tuple[str, int], list[_Place]] = defaultdict(list)
        # A simulated send occupies no rank.
        self._occupied = timeline.origin == "measured"
        for event in timeline:
            row, kind = self._rows[event.rank], event.action.kind
            place = _Place(event.rank, len(row))
            if kind in SENDS:
                self._sent[event.rank, event.action] = place
            elif kind in REDUCTIONS:
                self._joint[event.action.reduction].append(place)
            row.append(event)

    def seconds(self) -> dict[str, float]:
        """Return what the way is made of."""
        found = dict.fromkeys(CAUSES, 0.0)
        if not self._rows:
            return found
        rank = max(self._rows, key=lambda each: max(event.end_s for event in self._rows[each]))
        place, now_s, gap = self._before(_Place(rank, len(self._rows[rank]))), self._end_s, BETWEEN
        while place is not None and now_s > 0:
            event = self._rows[place.rank][place.at]
            end_s = min(now_s, event.end_s)
            found[gap] += now_s - end_s
            place, begun_s, gap = self._step(event, place, end_s)
            found[_CAUSE[event.action.kind]] += end_s - begun_s
            now_s = begun_s
        found[gap] += max(0.0, now_s)
        return found

    def _step(self, event: Event, place: _Place, end_s: float) -> tuple[_Place | None, float, str]:
        """Return what an event that ends at a moment waited for, when it began to, and what lies before that."""
        kind = event.action.kind
        if kind in RECEIVES:
            send = self._sent.get(sending_of(event))
            begun_s = event.start_s if send is None else self._rows[send.rank][send.at].start_s
            if send is not None and event.start_s <= begun_s <= end_s:
                # What lies between the sender's last action and the send waited for the messages before.
                return self._before(send), begun_s, BETWEEN if self._occupied else MESSAGES
        elif kind in REDUCTIONS:
            came = {each: self._came_s(each) for each in self._joint[event.action.reduction]}
            last = max(came, key=lambda each: (came[each], each == place))
            return self._before(last), min(end_s, came[last]), BETWEEN
        return self._before(place), min(end_s, event.start_s), BETWEEN

    def _came_s(self, place: _Place) -> float:
        """When a rank came to an event: the end of the one before."""
        before = self._before(place)
        return 0.0 if before is None else self._rows[before.rank][before.at].end_s

    def _before(self, place: _Place) -> _Place | None:
        """Return the event before that occupied the rank, if there is one."""
        row = self._rows[place.rank]
        for at in range(place.at - 1, -1, -1):
            if self._occupied or row[at].action.kind not in SENDS:
                return _Place(place.rank, at)
        return None


def compare_paths(
    measured: Timeline, predicted: Timeline, measured_s: float, predicted_s: float
) -> tuple[CauseTimes, ...]:
    """Return what measured and predicted steps were spent on; what the timelines are not of lies between actions.

    Args:
        measured: a typical step, as ranks recorded it.
        predicted: of the same program.
        measured_s: the step, from the end of the one before to its own.
        predicted_s: the step, with what comes before its first action.
    """
    paths: list[Mapping[str, float]] = [critical_path(measured), critical_path(predicted)]
    rest = measured_s - measured.end_s, predicted_s - predicted.end_s
    found = []
    for name in CAUSES:
        seconds = [path[name] + (beside if name == BETWEEN else 0.0) for path, beside in zip(paths, rest, strict=True)]
        found.append(CauseTimes(cause=name, measured_s=seconds[0], predicted_s=seconds[1]))
    return tuple(found)
