"""RankMonitor: waits for ranks, and tells what caused a failure from what followed from it.

In come the processes that it watches over, with the pipes on which they answer, and the board on which all ranks of the
host note what they do. Out comes what every one returned, or the one failure that is to blame. `autopar run` has one
monitor for all ranks. Where a launcher starts the ranks, each has a monitor of its own, and they agree by the board.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import IO, BinaryIO, NamedTuple, Protocol

from autopar.errors import AutoparError, TrainingError, cause_of
from autopar.ranks.board import FINISHED, SETTING_UP, STOP_DELAY_S, Board, Note
from autopar.ranks.failure import Failure, SaidElsewhereError
from autopar.ranks.setting_up import WorkMeter, status_of

GRACE_S = 2.0
"""How long after a consequence (a peer lost) its cause may take to show."""
POLL_S = 0.2
SLOW = 1.5
"""How many times as long as planned a rank computes that is called slow, over what the others do."""
_SLOW_STEPS = 3
"""For how many steps it must."""
_SLOW_NO_LONGER = 1.2
"""Below what it is slow no longer."""
_SAY_S = 30.0
"""How long whoever is to blame may take to find out what is to be said of it."""


class Doing(NamedTuple):
    """What a rank was doing, in words, and whether that was waiting for another rank."""

    text: str
    waiting: bool


Describe = Callable[[int, Note], Doing]
"""Puts a rank's last note into words, given what the rank has become (:meth:`Board.placed`)."""


@dataclass(frozen=True)
class Watch:
    """How ranks are watched over."""

    timeout_s: float = 300.0
    """Longest that one may stand still."""
    describe: Describe | None = None
    on_message: Callable[[int, dict[str, object]], None] | None = None
    """Called with (rank, message) for everything that a rank reports."""
    on_slow: Callable[[int, float, float], None] | None = None
    """Called with (rank, how many times as long as planned it computes, the same of the others' median) when a rank
    becomes slow, and when it is no longer."""
    on_failure: Callable[[Board, AutoparError], str] | None = None
    """Called with the board and what is raised, before the ranks are ended; returns what is to be said beside it."""


class Process(Protocol):
    """A process that this one has started, or has had started; the part of :class:`subprocess.Popen` that serves."""

    @property
    def pid(self) -> int | None: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...


class RankProcess:
    """One rank's process and the pipe on which it answers."""

    def __init__(self, process: Process, pipe: BinaryIO, server_end: Callable[[], int | None] = lambda: None) -> None:
        """Take them up; ``server_end`` returns how the process that it was forked from ended, where both are gone."""
        self.process, self.pipe, self.server_end = process, pipe, server_end
        self._rest = b""

    def submit(self, job: dict[str, object]) -> None:
        """Hand the process a job; a process that is already gone is found by its closed pipe."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> list[dict[str, object]] | None:
        """Return the messages that have come in, or None where the process has gone."""
        data = self.pipe.read(1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        self.pipe.close()


class AnswerPipe:
    """What a process answers on, a line of JSON for each message; in vain where who reads it is gone."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)

    def send(self, message: Mapping[str, object]) -> None:
        with suppress(BrokenPipeError):
            self._pipe.write(json.dumps(message) + "\n")

    def report(self, message: dict[str, object]) -> None:
        """Say something meanwhile."""
        self.send({"message": message})

    def fail(self, error: Exception) -> None:
        """Say what failed."""
        self.send({"failure": Failure.of(error).as_dict()})

    def close(self) -> None:
        # What was sent in vain is still in the buffer, and is tried once more.
        with suppress(BrokenPipeError):
            self._pipe.close()


class RankMonitor:
    """Collects its ranks' results; raises what caused a failure, not what followed from it."""

    def __init__(
        self,
        links: Mapping[int, RankProcess],
        board: Board,
        watch: Watch,
        ranks: Sequence[int] | None = None,
        *,
        whole: bool = True,
    ) -> None:
        """Prepare.

        Args:
            links: the processes that are watched over, by rank as they were started.
            board: what all ranks of the host note.
            watch: how.
            ranks: those of the host; by default the ones watched over.
            whole: whether they are all of the run. If not, hosts agree on its last step (:class:`.board.HostsLink`).
        """
        self._links, self._board, self._watch, self._whole = links, board, watch, whole
        self._ranks = list(links if ranks is None else ranks)
        self._announces = whole and self._ranks[0] in links
        self._meters: dict[tuple[int, int | None], WorkMeter] = {}
        """Of ranks that set up, and their processes."""
        self._results: dict[int, object] = {}
        self._consequences: dict[int, Failure] = {}
        self._not_finite: dict[int, Failure] = {}
        """Of ranks that found such numbers; some are consequences, too."""
        self._grace_until_s: float | None = None
        self._began_s = time.monotonic()
        self._stop_asked, self._announced_at_s = False, math.inf
        self._said_by_s = math.inf
        self._slow_since: dict[int, int] = {}
        self._called_slow: set[int] = set()

    def until_done(self) -> list[object]:
        """Wait for every rank that is watched over.

        Raises:
            AutoparError: a rank failed, was lost or stood still.
            SaidElsewhereError: one of another monitor did.
        """
        try:
            return self._until_done()
        except SaidElsewhereError:
            self._board.write_said()
            raise
        except AutoparError as error:
            advice = self._advice(error)
            if advice:
                error.args = (f"{error}; {advice}",)
            self._board.write_said()
            raise

    def _advice(self, error: AutoparError) -> str:
        try:
            return "" if self._watch.on_failure is None else self._watch.on_failure(self._board, error)
        except Exception as reason:
            # The failure is said, whatever fails of what is said beside it.
            return f"what to do is not known: {cause_of(reason)}"

    def _until_done(self) -> list[object]:
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link.pipe, selectors.EVENT_READ, rank)
            while len(self._results) < len(self._links):
                for key, _ in selector.select(POLL_S):
                    if not self._take(key.data):
                        selector.unregister(key.fileobj)
                self._check_stop()
                if not self._check_blame():
                    self._check_grace()
                    self._check_progress()
                    self._check_slowness()
        return [self._results[rank] for rank in self._links]

    def ask_to_stop(self) -> bool:
        """Have the ranks end behind the step that they are in; return False where some are not in one yet."""
        if self._is_blamed_elsewhere():
            # Whoever is told to end because another rank failed need not say so.
            raise self._said_elsewhere()
        notes = [self._board.read(rank) for rank in self._ranks]
        self._stop_asked = all(note.phase != SETTING_UP for note in notes)
        return self._stop_asked

    def _check_stop(self) -> None:
        """Tell ranks which step is the last: the latest that any has begun when all can know that there is one."""
        now_s = time.monotonic()
        if self._stop_asked and not self._board.stop_requested:
            self._board.request_stop()
        if not self._board.stop_requested or not self._announces:
            return
        if self._announced_at_s == math.inf and self._board.last_step is None:
            self._announced_at_s = now_s + STOP_DELAY_S
        elif now_s > self._announced_at_s:
            self._board.announce_last(self._board.latest_step(self._ranks))
            self._announced_at_s = math.inf

    def _take(self, rank: int) -> bool:
        """Take in what a rank says; return False where it has gone and has said why: because of another."""
        received = self._links[rank].read()
        if received is None:
            if rank in self._consequences or rank in self._not_finite:
                return False
            raise self._blame(rank, self._exit_message(rank))
        for item in received:
            if "result" in item:
                self._results[rank] = item["result"]
            elif "failure" in item:
                self._handle_failure(rank, Failure(**item["failure"]))  # type: ignore[arg-type]
            elif "elsewhere" in item:
                self._await_said()
                raise SaidElsewhereError(f"what rank {rank} failed of", int(str(item["elsewhere"])))
            elif "message" in item and self._watch.on_message is not None:
                self._watch.on_message(rank, item["message"])  # type: ignore[arg-type]
        return True

    def _handle_failure(self, rank: int, failure: Failure) -> None:
        if failure.order is not None:
            self._not_finite[rank] = failure
            self._board.write_order(rank, failure.order, beside=failure.consequence)
        if failure.consequence:
            self._consequences.setdefault(rank, failure)
        if failure.consequence or failure.order is not None:
            if self._grace_until_s is None:
                self._grace_until_s = time.monotonic() + GRACE_S
        else:
            if failure.exit_code != TrainingError.exit_code:
                self._await_said()
            raise self._error_of(rank, failure)

    def _await_said(self) -> None:
        """Wait until the host's first rank has said what all ranks find: a launcher ends all when one ends."""
        until_s = time.monotonic() + _SAY_S
        while self._ranks[0] not in self._links and not self._board.is_said and time.monotonic() < until_s:
            time.sleep(POLL_S / 10)

    def _error_of(self, rank: int, failure: Failure) -> AutoparError:
        if failure.exit_code == TrainingError.exit_code:
            # Mistakes of the user's are found by all ranks alike.
            self._board.blame(rank)
        return failure.as_error("" if failure.has_location else f"{self._where(rank)}: ")

    def _blame(self, rank: int, message: str) -> TrainingError:
        self._board.blame(rank)
        return TrainingError(message)

    def _check_blame(self) -> bool:
        """Leave it to the monitor of the rank that is to blame to say why; return whether it is about to."""
        if not self._is_blamed_elsewhere():
            return False
        now_s = time.monotonic()
        self._said_by_s = min(self._said_by_s, now_s + _SAY_S)
        # A launcher ends all when one ends.
        if self._board.is_said or now_s > self._said_by_s:
            raise self._said_elsewhere()
        return True

    def _is_blamed_elsewhere(self) -> bool:
        return self._board.blamed_rank is not None and self._board.blamed_rank not in self._links

    def _said_elsewhere(self) -> SaidElsewhereError:
        return SaidElsewhereError(f"rank {self._board.blamed_rank} failed", TrainingError.exit_code)

    def _check_grace(self) -> None:
        if self._grace_until_s is None:
            return
        now_s, failed = time.monotonic(), self._consequences | self._not_finite
        first = self._board.first_not_finite(self._ranks)
        # Half as long as others wait, so that these find who is to blame.
        heard_all = len(failed) == len(self._ranks)
        if first in self._not_finite and (heard_all or now_s > self._grace_until_s - GRACE_S / 2):
            raise self._error_of(first, self._not_finite[first])
        if now_s > self._grace_until_s:
            for rank, link in self._links.items():
                if link.process.poll() is not None and rank not in failed:
                    raise self._blame(rank, self._exit_message(rank))
            rank, failure = next(iter(failed.items()))
            if failure.connection:
                there = "all ranks are there" if self._whole else "it may have ended, which its own host says"
                said = f"{failure.message}; {there}, or the network between them is lost"
                failure = replace(failure, message=said.replace("are there, or", "are there:"))
            raise self._error_of(rank, failure)

    def _check_progress(self) -> None:
        now_s = time.monotonic()
        notes = {rank: self._board.read(rank) for rank in self._ranks if rank not in self._results}
        for rank in self._links.keys() & notes.keys():
            if notes[rank].phase == SETTING_UP:
                self._note_work(rank)
        still = [(self._since_s(note), rank) for rank, note in notes.items()]
        if not any(now_s - since_s > self._watch.timeout_s for since_s, _ in still):
            return
        # Ranks that wait are consequences: the cause is a stopped process, else one that stands still in a computation.
        for _, rank in sorted(still):
            if rank in self._links and _is_stopped(self._links[rank].process.pid):
                waited = f"the others waited {self._watch.timeout_s:g} s for it"
                raise self._blame(rank, f"{self._where(rank)} is stopped; {waited}")
        busy = [(since_s, rank) for since_s, rank in still if not self._doing(rank).waiting]
        since_s, rank = min(busy or still)
        patience_s = self._watch.timeout_s
        if not busy and notes[rank].phase == SETTING_UP:
            # Whoever they meet at says first who is missing.
            patience_s += _SAY_S
        if rank not in self._links:
            # Its own monitor knows more of it.
            patience_s += GRACE_S
        if now_s - since_s > patience_s:
            raise self._blame(rank, f"{self._where(rank)} {self._stand_still(elsewhere=not busy and not self._whole)}")

    def _stand_still(self, *, elsewhere: bool) -> str:
        timeout_s = f"{self._watch.timeout_s:g} s"
        if elsewhere:
            return (
                f"waited {timeout_s} for ranks of other hosts, as all ranks of this one do: the network between the "
                "hosts is lost, or one stands still there, which its own host then says"
            )
        return f"made no progress for {timeout_s}; raise `timeout_s` if it is that slow"

    def _since_s(self, note: Note) -> float:
        """Return since when a rank stands still; while any rank of a run that sets up works, others wait for it."""
        worked_s = self._board.worked_s(self._ranks) if note.phase == SETTING_UP else 0.0
        return max(note.time_s, self._began_s, worked_s)

    def _note_work(self, rank: int) -> None:
        """Note on the board that a rank works, where it does."""
        process = self._links[rank].process.pid
        if (rank, process) not in self._meters:
            self._meters[rank, process] = WorkMeter(process)
        elif self._meters[rank, process].worked_s() > self._board.worked_s([rank], elsewhere=False):
            self._board.write_work(rank)

    def _check_slowness(self) -> None:
        """Say of ranks that compute for longer than planned, others not; and of those that no longer do."""
        on_slow = self._watch.on_slow
        ratios = {rank: self._board.slowness(rank) for rank in self._ranks}
        if on_slow is None or len(ratios) < 2 or min(ratios.values()) <= 0:
            return
        for rank in self._links:
            own, others = ratios[rank], median(ratio for each, ratio in ratios.items() if each != rank)
            step = self._board.read(rank).step
            if own < SLOW * others:
                self._slow_since.pop(rank, None)
                if rank in self._called_slow and own < _SLOW_NO_LONGER * others:
                    self._called_slow.remove(rank)
                    on_slow(self._board.placed(rank), own, others)
            elif step - self._slow_since.setdefault(rank, step) >= _SLOW_STEPS and rank not in self._called_slow:
                self._called_slow.add(rank)
                on_slow(self._board.placed(rank), own, others)

    def _doing(self, rank: int) -> Doing:
        note = self._board.read(rank)
        if self._watch.describe is not None:
            return self._watch.describe(self._board.placed(rank), note)
        text = {SETTING_UP: "setting up", FINISHED: "finishing"}.get(note.phase, "working")
        return Doing(text, waiting=note.waiting)

    def _where(self, rank: int) -> str:
        placed, doing = self._board.placed(rank), self._doing(rank).text
        return f"rank {placed} ({doing})" if placed == rank else f"rank {placed} ({doing}; started as rank {rank})"

    def _exit_message(self, rank: int) -> str:
        code = self._links[rank].process.wait()
        of_server = self._links[rank].server_end()
        if of_server is not None:
            return f"the process that ranks are forked from {_ending(of_server)}, and all ranks with it"
        return f"{self._where(rank)} {_ending(code)}"


def _ending(code: int) -> str:
    """Return how a process has ended, in words."""
    if code >= 0:
        return f"ended by itself with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + ("; the system may have run out of memory" if name == "SIGKILL" else "")


def _is_stopped(process_id: int | None) -> bool:
    return status_of(process_id)[0] in ("T", "t")
