"""Board: a small shared file on which every rank of a host notes what it is doing; and what hosts agree on by it.

A rank that is killed or stopped cannot say where it was; the board still can, with the last actions before. It is read
while ranks write: every number is stored at once, and none is ever half of an old and half of a new one (nor 0 in
between, as with :mod:`struct`, which clears what it is to fill).
"""

from __future__ import annotations

import json
import mmap
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from autopar.ranks.scratch import Closable
from autopar.ranks.setting_up import SharedWork

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


SETTING_UP = 0
STEPPING = 1
FINISHED = 2

SET_UP_S = 120.0
"""Shortest time that ranks wait for each other in setting up: it runs imports and user code once."""

STOP_DELAY_S = 0.05
"""How long after ranks were asked to stop each has either seen that, or noted the step that it begins."""
MOST_STEPS = 2**62

LOOK_S = 0.001
"""How often a rank looks for what it waits for."""

HISTORY = 100
"""How many last actions of every rank the board keeps."""

_BYTES = 8
"""Of every field, a whole number or a time."""
_PHASE, _STEP, _POSITION, _TIME, _SLOWNESS, _WAITING, _WORKED, _ORDER, _COUNT, _COME, _PLACE, _HEAD = range(12)
_ENTRY = 3
"""Of an action that is kept: step, position and time."""
_FIELDS = _HEAD + HISTORY * _ENTRY
_STOP, _LAST, _BLAMED, _SAID, _ELSEWHERE, _TAIL = range(6)


class Note(NamedTuple):
    """What a rank last noted."""

    phase: int
    """``SETTING_UP``, ``STEPPING`` or ``FINISHED``."""
    step: int
    position: int
    """Index of the action in the rank's program."""
    time_s: float
    """When, on this host's monotonic clock; 0 if never."""
    waiting: bool = False
    """Whether it now waits for other ranks, whatever it does."""


class Waiting:
    """Has the board know that a rank waits for others, inside a ``with`` block."""

    __slots__ = ("_board", "_rank")

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank

    def __enter__(self) -> None:
        self._board.write_waiting(self._rank, 1)

    def __exit__(self, *exc_info: object) -> None:
        self._board.write_waiting(self._rank, 0)


class Board(Closable):
    """One slot per rank in a memory-mapped file; a rank writes only its own.

    Slots are those of ranks as they were started. Where ranks that have met become others, each notes which one.
    """

    def __init__(self, path: Path, ranks: int) -> None:
        """Open the board at ``path``, creating it if it is not there, or not of that size."""
        # Behind the ranks' slots is one for whoever watches over them.
        size = (_FIELDS * ranks + _TAIL) * _BYTES
        self._stop = _FIELDS * ranks
        with path.open("a+b") as file:
            if file.tell() < size:
                file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        # The same memory, twice.
        self._numbers, self._times_s = memoryview(self._map).cast("q"), memoryview(self._map).cast("d")

    def come(self, rank: int) -> None:
        """Note that a rank comes to where all of them meet."""
        self._numbers[rank * _FIELDS + _COME] = 1

    def has_come(self, rank: int) -> bool:
        """Tell whether it has."""
        return bool(self._numbers[rank * _FIELDS + _COME])

    def place(self, rank: int, placed: int) -> None:
        """Note what a rank has become."""
        self._numbers[rank * _FIELDS + _PLACE] = placed + 1

    def placed(self, rank: int) -> int:
        """Return what a rank has become; itself where it has noted nothing."""
        return (self._numbers[rank * _FIELDS + _PLACE] or rank + 1) - 1

    def write(self, rank: int, phase: int, step: int = 0, position: int = 0) -> None:
        """Note what a rank begins to do, now."""
        numbers, at, now_s = self._numbers, rank * _FIELDS, time.monotonic()
        numbers[at], numbers[at + _STEP], numbers[at + _POSITION] = phase, step, position
        self._times_s[at + _TIME] = now_s

    def write_action(self, rank: int, step: int, position: int) -> None:
        """Note the action of a step that a rank begins, now, and keep it with the last ones before."""
        self.write(rank, STEPPING, step, position)
        numbers, at = self._numbers, rank * _FIELDS
        count = numbers[at + _COUNT]
        entry = at + _HEAD + count % HISTORY * _ENTRY
        numbers[entry], numbers[entry + 1] = step, position
        self._times_s[entry + 2] = self._times_s[at + _TIME]
        numbers[at + _COUNT] = count + 1

    def read(self, rank: int) -> Note:
        """Return a rank's last note, which may have the numbers of two, if the rank is writing."""
        at, numbers = rank * _FIELDS, self._numbers
        place = numbers[at], numbers[at + _STEP], numbers[at + _POSITION], self._times_s[at + _TIME]
        return Note(*place, bool(numbers[at + _WAITING]))

    def write_waiting(self, rank: int, waiting: int) -> None:
        """Note whether a rank waits for others."""
        self._numbers[rank * _FIELDS + _WAITING] = waiting

    def write_work(self, rank: int | None) -> None:
        """Note that a rank's process is using a processor now; None: one of another host's is."""
        self._times_s[self._stop + _ELSEWHERE if rank is None else rank * _FIELDS + _WORKED] = time.monotonic()

    def worked_s(self, ranks: Iterable[int], *, elsewhere: bool = True) -> float:
        """Return when some of the ranks was last seen to use a processor, or, ``elsewhere``, one of another host."""
        own = max((self._times_s[rank * _FIELDS + _WORKED] for rank in ranks), default=0.0)
        return max(own, self._times_s[self._stop + _ELSEWHERE]) if elsewhere else own

    def history(self, rank: int) -> list[Note]:
        """Return the last actions that a rank has begun, oldest first: at most :data:`HISTORY`."""
        at, numbers = rank * _FIELDS, self._numbers
        count = numbers[at + _COUNT]
        entries = (at + _HEAD + each % HISTORY * _ENTRY for each in range(max(0, count - HISTORY), count))
        return [Note(STEPPING, numbers[entry], numbers[entry + 1], self._times_s[entry + 2]) for entry in entries]

    def write_slowness(self, rank: int, ratio: float) -> None:
        """Note how many times as long as planned a rank's computing took in the last step."""
        self._times_s[rank * _FIELDS + _SLOWNESS] = ratio

    def slowness(self, rank: int) -> float:
        """Return what a rank last noted of its computing; 0 before its first step has ended."""
        return self._times_s[rank * _FIELDS + _SLOWNESS]

    def write_order(self, rank: int, order: int, *, beside: bool) -> None:
        """Note when a rank's numbers have become other than finite, among those of others; ``beside``: if one is."""
        self._numbers[rank * _FIELDS + _ORDER] = -order - 1 if beside else order + 1

    def first_not_finite(self, ranks: Iterable[int]) -> int | None:
        """Return the rank whose numbers were the first not to be finite; None where none says so by itself."""
        orders = {rank: order for rank in ranks if (order := self._numbers[rank * _FIELDS + _ORDER])}
        return min(orders, key=lambda rank: abs(orders[rank])) if max(orders.values(), default=0) > 0 else None

    def blame(self, rank: int) -> None:
        """Note whose failure is the cause of all that fails; the first to be noted stays."""
        if self.blamed_rank is None:
            self._numbers[self._stop + _BLAMED] = rank + 1

    def write_said(self) -> None:
        """Note that the cause of all that fails has been found out, and is said now."""
        self._numbers[self._stop + _SAID] = 1

    @property
    def is_said(self) -> bool:
        """Whether the cause of what fails is said already."""
        return bool(self._numbers[self._stop + _SAID])

    @property
    def blamed_rank(self) -> int | None:
        """The rank whose failure is the cause, once it is known."""
        return self._numbers[self._stop + _BLAMED] - 1 if self._numbers[self._stop + _BLAMED] else None

    def latest_step(self, ranks: Iterable[int]) -> int:
        """Return the latest step that some of the ranks have begun; where one has finished, more than there are."""
        notes = [self.read(rank) for rank in ranks]
        # Those that have finished have trained all.
        return MOST_STEPS if any(note.phase == FINISHED for note in notes) else max(note.step for note in notes)

    def request_stop(self) -> None:
        """Ask the ranks to end behind the step that :meth:`announce_last` will name."""
        self._numbers[self._stop] = 1

    def announce_last(self, step: int) -> None:
        """Say which step is the last; it may be one that no rank begins."""
        self._numbers[self._stop + _LAST] = step + 1
        self._numbers[self._stop] = 2

    @property
    def stop_requested(self) -> bool:
        """Whether ranks are to end soon."""
        return bool(self._numbers[self._stop])

    @property
    def last_step(self) -> int | None:
        """The last step, once it is known."""
        return self._numbers[self._stop + _LAST] - 1 if self._numbers[self._stop] == 2 else None

    def ends_before(self, rank: int, step: int) -> bool:
        """Note that a rank is about to begin a step, and return whether it is not to.

        Once ranks were asked to stop, this waits until it is known which step is the last: the latest that any rank had
        noted. Whoever asks first writes, and then reads what ranks have noted; ranks do it the other way round.
        """
        self.write(rank, STEPPING, step)
        while self.stop_requested:
            last = self.last_step
            if last is not None:
                return step > last
            time.sleep(LOOK_S)
        return False

    def close(self) -> None:
        self._numbers.release()
        self._times_s.release()
        self._map.close()


POLL_S = 0.1
STOP, LAST, _BEGUN = "stop", "last", "begun"


class HostsLink:
    """How hosts of one run tell each other that it is to end, and agree on the step behind which it does: one's part.

    They also tell each other that they still work, as long as ranks set up: a host may take longer than others.

    The ranks of a host agree by their board (:meth:`Board.ends_before`). Of several hosts, the leading rank of each
    looks at its board and at the store of all ranks, a few times a second: what one host is asked, all are; each says
    which step its ranks have begun at most, once all of them know; rank 0's says the latest of these to all. It works
    from its making until it is closed.
    """

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
        self._shared = SharedWork(store, lambda: board.worked_s(ranks, elsewhere=False))
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
                self._share_work()

    def _share_work(self) -> None:
        """While ranks set up, tell the other hosts that this one works, and note on the board that another does."""
        if self._board.read(self._ranks[0]).phase == SETTING_UP and self._shared.tell():
            self._board.write_work(None)

    def _is_asked(self) -> bool:
        """Return whether the run is to end; pass it on, from this host to the others or from them to this one."""
        if not self._board.stop_requested and self._store.check([STOP]):
            self._board.request_stop()
        if not self._board.stop_requested:
            return False
        self._store.set(STOP, "")
        return True

    def _agree(self) -> None:
        time.sleep(STOP_DELAY_S)
        self._store.set(f"{_BEGUN}/{self._ranks[0]}", json.dumps(self._board.latest_step(self._ranks)))
        if self._ranks[0] == self._leaders[0]:
            self._await([f"{_BEGUN}/{leader}" for leader in self._leaders])
            begun = [json.loads(self._store.get(f"{_BEGUN}/{leader}")) for leader in self._leaders]
            self._store.set(LAST, json.dumps(max(begun)))
        self._await([LAST])
        if self._store.check([LAST]):
            self._board.announce_last(json.loads(self._store.get(LAST)))

    def _await(self, keys: list[str]) -> None:
        while not self._store.check(keys) and not self._ended.wait(LOOK_S * 10):
            pass
