"""Queue: receives put into the order in which their messages were sent.

The messages of an ordered pair of ranks arrive in the order of their sending. Where ranks run several stages, one stage
may need a message that was sent behind one for another stage: that one is received first.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

from autopar.formats.program import RECEIVE, RECEIVE_GRADIENT, SEND, SEND_GRADIENT

Entry = tuple[str, int, int, int, int]
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
        for kind, stage, micro_batch, peer, peer_stage in entries:
            if kind in _RECEIVED:
                sent[rank, peer].append((_RECEIVED[kind], peer_stage, micro_batch, rank, stage))
    return [list(_reordered(rank, entries, sent)) for rank, entries in enumerate(programs)]


def _reordered(rank: int, entries: list[Entry], sent: dict[tuple[int, int], deque[Entry]]) -> Iterable[Entry]:
    early: set[Entry] = set()
    for entry in entries:
        if entry[0] not in (RECEIVE, RECEIVE_GRADIENT):
            yield entry
        elif entry in early:
            early.remove(entry)
        else:
            queue = sent[entry[3], rank]
            while queue and (first := queue.popleft()) != entry:
                early.add(first)
                yield first
            yield entry
