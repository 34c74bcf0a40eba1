"""Own times: how long every action takes by itself, apart from what it waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median

from autopar.formats.program import (
    KINDS,
    RECEIVE,
    RECEIVE_GRADIENT,
    REDUCE,
    REDUCE_TIED,
    SEND,
    SEND_GRADIENT,
    Action,
)
from autopar.formats.report import KindTimes
from autopar.formats.spent import sending_of
from autopar.formats.timeline import Event, Timeline

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
        if event.action.kind in (REDUCE, REDUCE_TIED):
            key = _meeting(event.action)
            come[key] = max(come.get(key, event.start_s), event.start_s)
    for event in timeline:
        kind = event.action.kind
        if kind in (REDUCE, REDUCE_TIED):
            found[event.rank, event.action] = max(0.0, event.end_s - come[_meeting(event.action)])
        elif kind in (SEND, SEND_GRADIENT):
            if timeline.origin == "simulated":
                found[event.rank, event.action] = event.end_s - event.start_s
        elif kind not in (RECEIVE, RECEIVE_GRADIENT):
            found[event.rank, event.action] = event.end_s - event.start_s
    return found if timeline.origin == "simulated" else found | _messages(timeline)


def medians(steps: Iterable[OwnTimes]) -> dict[tuple[int, Action], float]:
    """Return the median of every action over several steps."""
    found: dict[tuple[int, Action], list[float]] = defaultdict(list)
    for step in steps:
        for key, seconds in step.items():
            found[key].append(seconds)
    return {key: median(values) for key, values in found.items()}


def compared(measured: OwnTimes, predicted: OwnTimes) -> tuple[KindTimes, ...]:
    """Return measured over predicted by kind of action, of the actions that both know and that take time."""
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for key, predicted_s in predicted.items():
        if key in measured and predicted_s > 0:
            pairs[key[1].kind].append((measured[key], predicted_s))
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


def _meeting(action: Action) -> tuple[str, int]:
    """Return what all ranks of one reduction have in common."""
    return action.kind, action.micro_batch if action.kind == REDUCE_TIED else action.stage


def _messages(timeline: Timeline) -> dict[tuple[int, Action], float]:
    """Return the seconds of those messages of a measured timeline whose receivers were waiting for them alone."""
    sends = {(event.rank, event.action): event for event in timeline if event.action.kind in (SEND, SEND_GRADIENT)}
    receives = {sending_of(event): event for event in timeline if event.action.kind in (RECEIVE, RECEIVE_GRADIENT)}
    found: dict[tuple[int, Action], float] = {}
    arrived: dict[tuple[int, int], float] = {}
    for key, send in sorted(sends.items(), key=lambda item: item[1].start_s):
        receive = receives.get(key)
        if receive is None:
            continue
        pair = send.rank, receive.rank
        if _clean(send, receive, arrived.get(pair, 0.0)):
            found[key] = receive.end_s - send.start_s
        arrived[pair] = max(arrived.get(pair, 0.0), receive.end_s)
    return found


def _clean(send: Event, receive: Event, before_s: float) -> bool:
    return receive.start_s <= send.start_s <= receive.end_s and before_s <= send.start_s
