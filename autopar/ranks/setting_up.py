"""Setting up: how ranks wait for each other until all are ready: as long as one of them works, and none has failed.

In comes a store that all ranks reach, and what says whether a rank works: it uses a processor, waits for one, or for a
disk. Ranks tell each other by the store, so that a host that takes longer is waited for by all. Where no rank has
worked for as long as a rank may stand still, whoever waits names who is missing. What a rank fails of is heard by the
others at once.

A store may not answer, where the process that keeps it is stopped: what is asked of it is asked by a thread.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autopar.errors import AutoparError, TrainingError
from autopar.ranks.failure import Failure
from autopar.ranks.scratch import Closable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_Found = TypeVar("_Found")
LOOK_S = 0.05
"""How often a rank looks at most for what it waits for, beyond the first moments."""
_TELL_S = 1.0
"""How often ranks tell each other that they work."""
_LOOK_CLOSELY_S = 0.5
"""After so long at most, a rank looks who is missing."""
_WORKING = 0.05
"""The share of a processor's time from which on a process works, and does not only look for others."""
_WORK, _COME, _TIMES, _PROCESS, _LEFT = "work", "come", "times", "process", "left"


def status_of(process_id: int | None) -> list[str]:
    """Return what the system says of a process, from its state on; a blank one where that is not there."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return [""]


class WorkMeter:
    """Finds out whether a process works."""

    def __init__(self, process_id: int | None) -> None:
        self._process_id = process_id
        self._asked_s = self._worked_s = time.monotonic()
        (_, self._spent_s), self._wanted_s = _work_of(process_id), 0.0

    def worked_s(self) -> float:
        """Return when it was last seen to work; to be asked every second or more often."""
        now_s = time.monotonic()
        state, spent_s = _work_of(self._process_id)
        if state in ("R", "D"):
            self._wanted_s += now_s - self._asked_s
        self._asked_s = now_s
        spent_s += self._wanted_s
        if spent_s - self._spent_s >= _WORKING * (now_s - self._worked_s):
            self._spent_s, self._worked_s = spent_s, now_s
        return self._worked_s


def _work_of(process_id: int | None) -> tuple[str, float]:
    """Return the state of a process, and the processor's seconds that it and its children have had."""
    fields = status_of(process_id)
    ticks = sum(map(int, fields[11:15])) if len(fields) > 14 else 0
    return fields[0], ticks / os.sysconf("SC_CLK_TCK")


WorkedS = Callable[[], float]
"""Returns when one was last seen to work."""


class SharedWork:
    """How those who reach a store tell each other whether they work."""

    def __init__(self, store: Store, worked_s: WorkedS) -> None:
        self._store, self._worked_s = store, worked_s
        self._told_s, self._added, self._heard = time.monotonic(), 0, 0

    def tell(self) -> bool:
        """Tell whether this one has worked since it last told, if that is a while ago; return whether another has."""
        now_s = time.monotonic()
        if now_s < self._told_s + _TELL_S:
            return False
        works, self._told_s = self._worked_s() > self._told_s, now_s
        self._added += works
        before, self._heard = self._heard, self._store.add(_WORK, int(works)) - self._added
        return self._heard > before


class Pulse(Closable):
    """Tells those who reach a store that this one works, and hears of their work, until it is closed."""

    def __init__(self, store: Store, worked_s: WorkedS) -> None:
        self._heard_s = 0.0
        self._shared, self._ended = SharedWork(store, worked_s), threading.Event()
        self._thread = threading.Thread(target=self._work, name="autopar-pulse", daemon=True)
        self._thread.start()

    def heard_s(self) -> float:
        """Return when another was last heard to work; 0 if never."""
        return self._heard_s

    def _work(self) -> None:
        # Where the store is gone, so are the others.
        with suppress(RuntimeError):
            while not self._ended.wait(_TELL_S / 4):
                if self._shared.tell():
                    self._heard_s = time.monotonic()

    def close(self) -> None:
        self._ended.set()
        # It may ask what does not answer.
        self._thread.join(_TELL_S)


class Patience:
    """How long ranks are waited for: some time, counted from when one was last seen to work."""

    def __init__(self, timeout_s: float, *worked_s: WorkedS) -> None:
        self.timeout_s, self._worked_s, self._began_s = timeout_s, worked_s, time.monotonic()

    def is_over(self, timeout_s: float | None = None) -> bool:
        """Tell whether they have been waited for so long, by default as long as they are."""
        since_s = max([self._began_s, *(each() for each in self._worked_s)])
        return time.monotonic() > since_s + (self.timeout_s if timeout_s is None else timeout_s)


def patiently(look: Callable[[], _Found | None], is_over: Callable[[], bool]) -> _Found | None:
    """Return what a function finds that is asked again and again, by a thread; None once patience ``is_over``.

    Raises:
        Exception: as ``look``.
    """
    found, given_up = Future[_Found](), threading.Event()

    def ask() -> None:
        pause_s = LOOK_S / 64
        try:
            while (answer := look()) is None and not given_up.wait(pause_s):
                pause_s = min(2 * pause_s, 2 * LOOK_S)
        except Exception as error:
            found.set_exception(error)
        else:
            if answer is not None:
                found.set_result(answer)

    threading.Thread(target=ask, name="autopar-look", daemon=True).start()
    while not wait([found], LOOK_S).done:
        if is_over():
            given_up.set()
            return None
    return found.result()


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks by their numbers.

    >>> ranks_in_words([1]), ranks_in_words([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class OtherRanks:
    """The others of a script's ranks, which nobody watches over: what one waits for, and what it leaves them with."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        """Begin; ``store`` is for nothing else."""
        self._store, self._rank, self._size, self._timeout_s = store, rank, size, timeout_s
        self._meter, self._waiting = WorkMeter(os.getpid()), False
        self._pulse = Pulse(store, self._worked_s)
        self._times = self._said = 0
        """How often this rank has come to where all wait for each other, and has said so."""
        self._missing: list[int] = []
        self._looked_s = time.monotonic()

    def await_all(self) -> None:
        """Wait until all ranks have come as often as this one.

        Raises:
            TrainingError: one did not come, or has ended; names it.
            AutoparError: one has failed; says which, and of what.
        """
        self._times += 1
        self._missing, self._looked_s, self._waiting = [], time.monotonic(), True
        answer = patiently(self._look, Patience(self._timeout_s + 2 * _TELL_S, self._pulse.heard_s).is_over)
        self._waiting = False
        if answer is None:
            raise TrainingError(f"rank {self._rank} has waited {self._timeout_s:g} s {self._awaited_text()}")
        if isinstance(answer, AutoparError):
            raise answer

    def why_lost(self) -> AutoparError | None:
        """Return the error that another rank has left, where the connection with it is lost."""
        with suppress(RuntimeError):
            return patiently(self._peer_error, Patience(_TELL_S).is_over)
        return None

    def leave(self, failure: Failure | None) -> None:
        """Have the others hear that this rank is gone, and of what failure, if that is why."""
        self._pulse.close()
        why = None if failure is None else failure.as_dict() | {"trace": ""}

        def say() -> bool:
            # The first is the cause of what others leave for.
            self._store.compare_set(_LEFT, "", json.dumps([self._rank, why]))
            return True

        # The store may be gone, or not answer.
        with suppress(RuntimeError):
            patiently(say, Patience(_TELL_S).is_over)

    def _worked_s(self) -> float:
        """Return when this rank was last seen to do anything else than to wait."""
        worked_s = self._meter.worked_s()
        return 0.0 if self._waiting else worked_s

    def _awaited_text(self) -> str:
        if not self._missing:
            return "for an answer of what keeps the ranks' store: rank 0, or its launcher, stands still"
        return (
            f"for {ranks_in_words(self._missing)} of {self._size}, and none has used a processor; "
            "raise `timeout_s` if it is that slow"
        )

    def _look(self) -> AutoparError | bool | None:
        """Return whether all have come, or the error that some never will; None where that is not known yet."""
        if self._said < self._times:
            self._store.set(f"{_PROCESS}/{self._rank}", json.dumps([_system(), os.getpid()]))
            self._store.set(f"{_TIMES}/{self._rank}", str(self._times))
            self._store.add(_COME, 1)
            self._said = self._times
        if self._store.add(_COME, 0) >= self._times * self._size:
            return True
        if (error := self._peer_error()) is not None:
            return error
        if time.monotonic() > self._looked_s + min(_LOOK_CLOSELY_S, self._timeout_s / 4):
            self._missing = [rank for rank in range(self._size) if not self._has_come(rank)]
            self._looked_s = time.monotonic()
            ended = next(filter(self._has_ended, self._missing), None)
            return (
                None if ended is None else TrainingError(f"rank {ended} has ended, and rank {self._rank} waits for it")
            )
        return None

    def _peer_error(self) -> AutoparError | None:
        """Return the error that another rank has left, if one has."""
        if not self._store.check([_LEFT]):
            return None
        rank, failure = json.loads(self._store.get(_LEFT))
        if failure is None:
            return TrainingError(f"rank {rank} has left, and rank {self._rank} waits for it")
        return Failure(**failure).as_error(f"rank {rank} has failed: ")

    def _has_come(self, rank: int) -> bool:
        key = f"{_TIMES}/{rank}"
        return self._store.check([key]) and int(self._store.get(key)) >= self._times

    def _has_ended(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended: only one of this host's can be."""
        key = f"{_PROCESS}/{rank}"
        system, process_id = json.loads(self._store.get(key)) if self._store.check([key]) else ("", 0)
        return system == _system() != "" and status_of(process_id)[0] in ("", "Z", "X")


def _system() -> str:
    """Return what processes have in common that see each other's numbers; nothing where that is not known."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
