"""RankPool: processes of this host that run jobs together, watched over.

In come a function's name and its arguments; out comes what every rank returned, or the one failure that is to blame: a
monitor waits for all ranks, and tells what caused a failure from what followed from it.
"""

from __future__ import annotations

import json
import math
import os
import queue
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

from autopar.ending import stopping
from autopar.errors import TrainingError
from autopar.ranks.board import FINISHED, SET_UP_S, SETTING_UP, Board, Note
from autopar.ranks.failure import Failure
from autopar.ranks.scratch import Scratch

GRACE_S = 2.0
"""How long after a consequence (a peer lost) its cause may take to show."""
POLL_S = 0.2
SETTLE_S = 0.05
"""How long after ranks were asked to stop each has either seen that, or noted the step that it begins."""
MOST_STEPS = 2**62


class Doing(NamedTuple):
    """What a rank was doing, in words, and whether that was waiting for another rank."""

    text: str
    waiting: bool


Describe = Callable[[int, Note], Doing]
"""Puts a rank's last note into words."""


class RankProcess:
    """One rank's process and the pipe on which it answers."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: BinaryIO) -> None:
        self.process, self.pipe = process, pipe
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

    def kill(self) -> None:
        """End the process now, even a stopped one."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        self.pipe.close()


class RankMonitor:
    """Collects every rank's result; raises what caused a failure, not what followed from it."""

    def __init__(
        self,
        links: list[RankProcess],
        board: Board,
        timeout_s: float,
        describe: Describe | None,
        on_message: Callable[[int, dict[str, object]], None] | None,
    ) -> None:
        self._links, self._board, self._timeout_s = links, board, timeout_s
        self._describe, self._on_message = describe, on_message
        self._results: dict[int, object] = {}
        self._consequences: dict[int, Failure] = {}
        self._grace_until_s: float | None = None
        self._began_s = time.monotonic()
        self._stop_asked, self._settled_s = False, math.inf

    def until_done(self) -> list[object]:
        """Wait for every rank.

        Raises:
            AutoparError: a rank failed, was lost or stood still.
        """
        with selectors.DefaultSelector() as selector:
            for rank, link in enumerate(self._links):
                selector.register(link.pipe, selectors.EVENT_READ, rank)
            while len(self._results) < len(self._links):
                for key, _ in selector.select(POLL_S):
                    self._take(key.data)
                self._check_stop()
                self._check_grace()
                self._check_progress()
        return [self._results[rank] for rank in range(len(self._links))]

    def ask_to_stop(self) -> bool:
        """Have the ranks end behind the step that they are in; return False where some are not in one yet."""
        notes = [self._board.read(rank) for rank in range(len(self._links))]
        self._stop_asked = all(note.phase != SETTING_UP for note in notes)
        return self._stop_asked

    def _check_stop(self) -> None:
        """Tell ranks which step is the last: the latest that any has begun when all can know that there is one."""
        now_s = time.monotonic()
        if self._stop_asked and not self._board.stop_requested:
            self._board.request_stop()
            self._settled_s = now_s + SETTLE_S
        elif self._stop_asked and now_s > self._settled_s:
            notes = [self._board.read(rank) for rank in range(len(self._links))]
            # Those that have finished have trained all.
            ended = any(note.phase == FINISHED for note in notes)
            self._board.announce_last(MOST_STEPS if ended else max(note.step for note in notes))
            self._settled_s = math.inf

    def _take(self, rank: int) -> None:
        received = self._links[rank].read()
        if received is None:
            raise TrainingError(self._exit_message(rank))
        for item in received:
            if "result" in item:
                self._results[rank] = item["result"]
            elif "failure" in item:
                self._handle_failure(rank, Failure(**item["failure"]))  # type: ignore[arg-type]
            elif "message" in item and self._on_message is not None:
                self._on_message(rank, item["message"])  # type: ignore[arg-type]

    def _handle_failure(self, rank: int, failure: Failure) -> None:
        if failure.consequence:
            self._consequences.setdefault(rank, failure)
            if self._grace_until_s is None:
                self._grace_until_s = time.monotonic() + GRACE_S
        else:
            raise failure.as_error("" if failure.has_location else f"{self._where(rank)}: ")

    def _check_grace(self) -> None:
        if self._grace_until_s is not None and time.monotonic() > self._grace_until_s:
            for rank, link in enumerate(self._links):
                if link.process.poll() is not None:
                    raise TrainingError(self._exit_message(rank))
            rank, failure = next(iter(self._consequences.items()))
            raise failure.as_error("" if failure.has_location else f"{self._where(rank)}: ")

    def _check_progress(self) -> None:
        now_s = time.monotonic()
        notes = {rank: self._board.read(rank) for rank in range(len(self._links)) if rank not in self._results}
        still = [(max(note.time_s, self._began_s), rank) for rank, note in notes.items()]
        if not any(now_s - since_s > self._patience_s(notes[rank]) for since_s, rank in still):
            return
        # Ranks that wait are consequences: the cause is a stopped process, else one that stands still in a computation.
        for _, rank in sorted(still):
            if _is_stopped(self._links[rank].process.pid):
                raise TrainingError(f"{self._where(rank)} is stopped; the others waited {self._timeout_s:g} s for it")
        busy = [(since_s, rank) for since_s, rank in still if not self._doing(rank).waiting]
        _, rank = min(busy or still)
        raise TrainingError(
            f"{self._where(rank)} made no progress for {self._timeout_s:g} s; raise `timeout_s` if it is that slow"
        )

    def _patience_s(self, note: Note) -> float:
        return max(self._timeout_s, SET_UP_S) if note.phase == SETTING_UP else self._timeout_s

    def _doing(self, rank: int) -> Doing:
        note = self._board.read(rank)
        if self._describe is not None:
            return self._describe(rank, note)
        return Doing({SETTING_UP: "setting up", FINISHED: "finishing"}.get(note.phase, "working"), waiting=False)

    def _where(self, rank: int) -> str:
        return f"rank {rank} ({self._doing(rank).text})"

    def _exit_message(self, rank: int) -> str:
        code = self._links[rank].process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            hint = "; the system may have run out of memory" if name == "SIGKILL" else ""
            return f"{self._where(rank)} was killed by {name}{hint}"
        return f"{self._where(rank)} ended by itself with exit code {code}"


def _is_stopped(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


class RankPool:
    """Start rank processes once and run jobs on them, one after the other.

    The processes listen on loopback only, receive no signal of the terminal, and end with this process whatever ends
    it, not with the thread that asked for them. A job that fails ends all of them: the pool is then closed.

    >>> with RankPool(2) as pool:  # doctest: +SKIP
    ...     pool.run("package.module:function", {"size": 3})
    """

    def __init__(
        self,
        size: int,
        *,
        threads: int = 1,
        device_type: str = "cpu",
        share_gpus: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        """Start processes.

        Args:
            size: how many.
            threads: of each.
            device_type: what they compute on.
            share_gpus: whether several may have the same GPU.
            timeout_s: longest that a rank may stand still.
        """
        self.size = size
        self._device_type, self._share_gpus, self._timeout_s = device_type, share_gpus, timeout_s
        self._scratch = Scratch("ranks")
        self._jobs = 0
        self._links: list[RankProcess] = []
        try:
            for rank in range(size):
                self._links.append(_LASTING.call(partial(_start, rank, threads), _abandon))
        except BaseException:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether the processes are gone, by :meth:`close` or by a failure."""
        return not self._links

    def run(
        self,
        target: str,
        arguments: object = None,
        *,
        ranks: int | None = None,
        timeout_s: float | None = None,
        describe: Describe | None = None,
        on_message: Callable[[int, dict[str, object]], None] | None = None,
        stoppable: bool = False,
    ) -> list[object]:
        """Call ``target`` (``module:function``) with (context, arguments) in every rank; return their results.

        Args:
            target: where the function is; it returns something JSON-able.
            arguments: JSON-able, the same for all ranks.
            ranks: how many of the processes take part, by default all.
            timeout_s: overrides the pool's.
            describe: puts a rank's last note into words, for errors.
            on_message: called with (rank, message) for everything a rank reports meanwhile.
            stoppable: whether ranks look for being asked to stop (:meth:`Board.ends_before`), and end soon then.

        Raises:
            AutoparError: of the kind that the failing rank raised; a lost or silent rank is a ``TrainingError``. Names
                rank and action, and all processes have ended when it is raised.
        """
        size = self.size if ranks is None else ranks
        if self.is_closed or size > self.size:
            raise TrainingError(f"{size} ranks were asked of a pool that has {len(self._links)}")
        self._jobs += 1
        folder = self._scratch.path / f"job-{self._jobs}"
        folder.mkdir(mode=0o700)
        limit = self._timeout_s if timeout_s is None else timeout_s
        job = {"target": target, "arguments": arguments, "size": size, **self._surroundings(folder, limit)}
        with Board(folder / "board", size) as board:
            watch = RankMonitor(self._links[:size], board, limit, describe, on_message)
            try:
                for rank, link in enumerate(self._links[:size]):
                    link.submit({**job, "rank": rank})
                with stopping(watch.ask_to_stop) if stoppable else nullcontext():
                    return watch.until_done()
            except BaseException:
                self.close()
                raise
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def _surroundings(self, folder: Path, timeout_s: float) -> dict[str, object]:
        """Return where the ranks of a job meet, how long they wait, and what they compute on."""
        return {
            "board": str(folder / "board"),
            "rendezvous": str(folder / "rendezvous"),
            # Twice as long, so that this process, which knows what every rank was doing, is the first to speak.
            "timeout_s": 2 * max(timeout_s, SET_UP_S),
            "device": self._device_type,
            "share_gpus": self._share_gpus,
        }

    def close(self) -> None:
        """End every process and forget them."""
        links, self._links = self._links, []
        for link in links:
            link.kill()
        for link in links:
            _abandon(link)
        self._scratch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _LastingThread:
    """A thread that lives as long as this process, and starts ranks, whichever thread asks.

    The kernel ends a child with the thread that started it, not with the process (``PR_SET_PDEATHSIG``).
    """

    def __init__(self) -> None:
        """Start none yet: a process that forks has to start its own."""
        self._process, self._lock = -1, threading.Lock()
        self._call_queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def call(self, act: Callable[[], RankProcess], undo: Callable[[RankProcess], None]) -> RankProcess:
        """Call a function there, and return what it does; if this call is interrupted, undo it."""
        made: Future[RankProcess] = Future()

        def fulfil() -> None:
            try:
                made.set_result(act())
            except BaseException as error:
                made.set_exception(error)

        with self._lock:
            if self._process != os.getpid():
                self._process, self._call_queue = os.getpid(), queue.SimpleQueue()
                threading.Thread(target=_serve, args=(self._call_queue,), name="autopar-ranks", daemon=True).start()
        self._call_queue.put(fulfil)
        try:
            return made.result()
        except BaseException:
            made.add_done_callback(lambda done: None if done.exception() else undo(done.result()))
            raise


def _serve(call_queue: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        call_queue.get()()


_LASTING = _LastingThread()


def _abandon(link: RankProcess) -> None:
    link.kill()
    link.process.wait()
    link.close()


def _start(rank: int, threads: int) -> RankProcess:
    reader, writer = os.pipe()
    settings = json.dumps({"rank": rank, "threads": threads, "pipe": writer, "parent": os.getpid()})
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "autopar.ranks.entry", settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(writer,),
            start_new_session=True,
            env=environment,
        )
    finally:
        os.close(writer)
    return RankProcess(process, os.fdopen(reader, "rb", buffering=0))
