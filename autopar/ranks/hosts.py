"""HostsLink: hosts of one run tell each other that it is to end, and agree on the step behind which it does.

The ranks of a host agree by their board (:meth:`.board.Board.ends_before`). Of several hosts, the leading rank of each
looks at its board and at the store of all ranks, a few times a second: what one host is asked, all are; each says which
step its ranks have begun at most, once all of them know; rank 0's says the latest of these to all.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from autopar.ranks.board import LOOK_S, SETTLE_S, Board

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_S = 0.1
STOP, LAST, BEGUN = "stop", "last", "begun"


class HostsLink:
    """One host's part; works from its making until it is closed."""

    def __init__(self, store: Store, board: Board, ranks: Sequence[int], leaders: Sequence[int]) -> None:
        """Begin.

        Args:
            store: of the run, which all hosts reach.
            board: of this host's ranks.
            ranks: of this host; the first leads it.
            leaders: the first rank of every host.
        """
        self._store, self._board, self._ranks, self._leaders = store, board, list(ranks), list(leaders)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="autopar-hosts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        # Where the store is gone, so is the run.
        with suppress(RuntimeError):
            while not self._ended.wait(POLL_S):
                if self._is_asked():
                    self._agree()
                    return

    def _is_asked(self) -> bool:
        """Return whether the run is to end; pass it on, from this host to the others or from them to this one."""
        if not self._board.stop_requested and self._store.check([STOP]):
            self._board.request_stop()
        if not self._board.stop_requested:
            return False
        self._store.set(STOP, "")
        return True

    def _agree(self) -> None:
        time.sleep(SETTLE_S)
        self._store.set(f"{BEGUN}/{self._ranks[0]}", json.dumps(self._board.latest_step(self._ranks)))
        if self._ranks[0] == self._leaders[0]:
            self._await([f"{BEGUN}/{leader}" for leader in self._leaders])
            begun = [json.loads(self._store.get(f"{BEGUN}/{leader}")) for leader in self._leaders]
            self._store.set(LAST, json.dumps(max(begun)))
        self._await([LAST])
        if self._store.check([LAST]):
            self._board.announce_last(json.loads(self._store.get(LAST)))

    def _await(self, keys: list[str]) -> None:
        while not self._store.check(keys) and not self._ended.wait(LOOK_S * 10):
            pass
