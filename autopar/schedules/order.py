"""Orders of a rank's computations: its place in the pipeline, what an order has it hold at once, and its receives.

The messages of an ordered pair of ranks arrive in the order of their sending. Where ranks run several stages, one stage
may need a message that was sent behind one for another stage: that one is received first.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from autopar.formats.program import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    RECEIVE,
    RECEIVE_GRADIENT,
    RECEIVES,
    SEND,
    SEND_GRADIENT,
    WEIGHT_BACKWARD,
    Action,
)
from autopar.formats.stage import Layout, group_of


def in_flight(order: Iterable[Action] | Iterable[Computation]) -> dict[int, int]:
    """Return, by stage, the most micro-batches whose forward is done and whose backward is not.

    Of a backward in two halves, the first counts.

    >>> in_flight([("F", 0, 0), ("F", 0, 1), ("I", 0, 0), ("I", 0, 1), ("W", 0, 0), ("W", 0, 1)])
    {0: 2}
    """
    depth: Counter[int] = Counter()
    deepest: dict[int, int] = {}
    for kind, stage, *_ in order:
        if kind == FORWARD:
            depth[stage] += 1
            deepest[stage] = max(deepest.get(stage, 0), depth[stage])
        elif kind in (BACKWARD, INPUT_BACKWARD):
            depth[stage] -= 1
    return deepest


class MostInFlight(NamedTuple):
    """The most of every kind that a stage holds on a rank; they need not come at the same time."""

    micro_batches: int = 0
    """Whose forward is done and whose backward is not complete, in both of its halves."""
    pending: int = 0
    """Micro-batches whose input half is done and whose weight half is not."""
    received_messages: int = 0
    """Messages that were received and not yet computed with."""
    unsent_messages: int = 0
    """Messages that were computed and not yet sent."""


_CHANGES = {
    FORWARD: (1, 0, 0, 0),
    BACKWARD: (-1, 0, 0, 0),
    INPUT_BACKWARD: (0, 1, 0, 0),
    WEIGHT_BACKWARD: (-1, -1, 0, 0),
    RECEIVE: (0, 0, 1, 0),
    RECEIVE_GRADIENT: (0, 0, 1, 0),
    SEND: (0, 0, 0, -1),
    SEND_GRADIENT: (0, 0, 0, -1),
}
_MESSAGES = {
    FORWARD: (RECEIVE, SEND),
    BACKWARD: (RECEIVE_GRADIENT, SEND_GRADIENT),
    INPUT_BACKWARD: (RECEIVE_GRADIENT, SEND_GRADIENT),
}
"""What a computation takes, and what it makes."""


def holdings(order: Iterable[Action] | Iterable[Computation]) -> dict[int, MostInFlight]:
    """Return, by stage, the most that a rank's actions, or its computations alone, have it hold.

    >>> holdings([("F", 0, 0), ("F", 0, 1), ("I", 0, 0), ("I", 0, 1), ("W", 0, 0), ("W", 0, 1)])
    {0: MostInFlight(micro_batches=2, pending=2, received_messages=0, unsent_messages=0)}
    """
    actions = [(kind, stage, micro_batch) for kind, stage, micro_batch, *_ in order if kind in _CHANGES]
    counts = Counter(actions)
    now: dict[int, Sequence[int]] = {}
    most: dict[int, MostInFlight] = {}
    for kind, stage, micro_batch in actions:
        change = _CHANGES[kind]
        if kind in _MESSAGES:
            taken, made = (counts[message, stage, micro_batch] for message in _MESSAGES[kind])
            change = (*change[:2], change[2] - taken, change[3] + made)
        now[stage] = [count + more for count, more in zip(now.get(stage, (0,) * 4), change, strict=True)]
        most[stage] = MostInFlight(*map(max, most.get(stage, MostInFlight()), now[stage]))
    return most


Computation = tuple[str, int, int]
"""Kind, stage, micro-batch."""


class RankPlace(NamedTuple):
    """Where a rank stands in the pipeline, and what it has to do there."""

    group: int
    """Of devices, in the order of their first stages."""
    groups: int
    stages: tuple[int, ...]
    """Stages that the group runs, ascending; one, but of schedules with chunks."""
    micro_batches: int
    """That the rank takes part in; a schedule counts them from 0."""
    warmups: tuple[int, ...]
    """Most micro-batches in flight, by stage of ``stages``; empty where they follow from the order."""


Order = Callable[[RankPlace], Iterator[Computation]]
"""What a rank computes, in order: a schedule, as far as one rank sees it."""


def places(
    layout: Layout, groups: int, chunks: int, micro_batches: int, warmups: tuple[int, ...] = ()
) -> Iterator[RankPlace]:
    """Yield the places of all groups, of one rank each; ``warmups`` are by stage."""
    for group in range(groups):
        stages = tuple(stage for stage in range(groups * chunks) if group_of(layout, stage, groups) == group)
        yield RankPlace(group, groups, stages, micro_batches, tuple(warmups[stage] for stage in stages if warmups))


@lru_cache(maxsize=4096)
def depths(order: Order, layout: Layout, groups: int, chunks: int, micro_batches: int) -> tuple[int, ...]:
    """Return the most micro-batches in flight on every stage, as an order that needs no depths implies."""
    found = [0] * (groups * chunks)
    # Of whole rounds, one for every group, no later one holds more than the second.
    some = micro_batches if micro_batches % groups else min(micro_batches, 2 * groups)
    for place in places(layout, groups, chunks, some):
        for stage, depth in in_flight(order(place)).items():
            found[stage] = depth
    return tuple(found)


Warmups = Callable[[int, int, int], dict[str, tuple[int, ...]]]
"""(groups, stages per group, micro-batches) -> name of the choice -> depth per stage."""


def implied_warmups(order: Order, layout: Layout) -> Warmups:
    """Return what gives the one in-flight depth per stage that an order implies.

    >>> from autopar.schedules import one_forward_one_backward, zero_bubble
    >>> implied_warmups(one_forward_one_backward.interleaved_order, "loop")(2, 2, 4)
    {'all': (4, 3, 2, 1)}
    >>> implied_warmups(zero_bubble.v_order, "vee")(2, 2, 4)
    {'all': (4, 3, 2, 1)}
    """
    return lambda groups, chunks, micro_batches: {"all": depths(order, layout, groups, chunks, micro_batches)}


def number_micro_batches(pattern: Iterable[tuple[str, int]], micro_batches: int) -> Iterator[Computation]:
    """Yield a pattern's computations with every stage's forwards, backwards and halves numbered from 0.

    Those of micro-batches that there are not are left out: what remains of a sound order is sound.

    >>> list(number_micro_batches([("F", 0), ("F", 0), ("B", 0), ("B", 0)], 1))
    [('F', 0, 0), ('B', 0, 0)]
    """
    counts: Counter[tuple[str, int]] = Counter()
    for kind, stage in pattern:
        halves = (INPUT_BACKWARD, WEIGHT_BACKWARD) if kind == BACKWARD else (kind,)
        micro_batch = counts[halves[0], stage]
        for half in halves:
            counts[half, stage] += 1
        if micro_batch < micro_batches:
            yield kind, stage, micro_batch


def join_halves(computations: Iterable[Computation]) -> Iterator[Computation]:
    """Yield computations with the first stage's backward whole where its halves follow one another.

    Nobody waits for that stage's input half, and a whole backward takes less than its halves.

    >>> list(join_halves([("I", 1, 0), ("W", 1, 0), ("I", 0, 0), ("W", 0, 0)]))
    [('I', 1, 0), ('W', 1, 0), ('B', 0, 0)]
    """
    held: Computation | None = None
    for computation in computations:
        kind, stage, micro_batch = computation
        if held is not None:
            whole = computation == (WEIGHT_BACKWARD, *held[1:])
            yield (BACKWARD, *held[1:]) if whole else held
            held = None
            if whole:
                continue
        if kind == INPUT_BACKWARD and stage == 0:
            held = computation
        else:
            yield kind, stage, micro_batch
    assert held is None, "a weight half is missing"


Entry = tuple[str, int, int, int, int] | tuple[str, int, int, int, int, int]
"""Kind, stage, micro-batch, peer and the peer's stage of an action."""

_RECEIVED = {SEND: RECEIVE, SEND_GRADIENT: RECEIVE_GRADIENT}


def in_order(ranks: Iterable[Iterable[Entry]]) -> list[list[Entry]]:
    """Return the ranks' entries with every receive behind those of what its peer sent before.

    No rank waits longer for it, for what is received early has arrived early.

    >>> sender = [("S", 0, 0, 1, 3), ("S", 0, 0, 1, 1)]
    >>> receiver = [("R", 1, 0, 0, 0), ("F", 1, 0, -1, -1), ("R", 3, 0, 0, 0), ("F", 3, 0, -1, -1)]
    >>> [f"{kind}@{stage}" for kind, stage, *_ in in_order([sender, receiver])[1]]
    ['R@3', 'R@1', 'F@1', 'F@3']
    """
    programs = [list(entries) for entries in ranks]
    sent: dict[tuple[int, int], deque[Entry]] = defaultdict(deque)
    for rank, entries in enumerate(programs):
        for kind, stage, micro_batch, peer, peer_stage, *_ in entries:
            if kind in _RECEIVED:
                sent[rank, peer].append((_RECEIVED[kind], peer_stage, micro_batch, rank, stage))
    return [list(_reorder_receives(rank, entries, sent)) for rank, entries in enumerate(programs)]


def _reorder_receives(
    rank: int, entries: list[Entry], sent_entries: dict[tuple[int, int], deque[Entry]]
) -> Iterable[Entry]:
    early: set[Entry] = set()
    for entry in entries:
        if entry[0] not in RECEIVES:
            yield entry
        elif entry in early:
            early.remove(entry)
        else:
            queue = sent_entries[entry[3], rank]
            while queue and (first := queue.popleft()) != entry:
                early.add(first)
                yield first
            yield entry
