"""Watch: waits for rank processes, and finds out which one is to blame when a job fails."""

from __future__ import annotations

import json
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from autopar.errors import TrainingError
from autopar.ranks.board import FINISHED, SET_UP_S, SETTING_UP, Board, Note
from autopar.ranks.failure import Failure

GRACE_S = 2.0
"""How long after a consequence (a peer lost) its cause may take to show."""
POLL_S = 0.2


class Doing(NamedTuple):
    """What a rank was doing, in words, and whether that was waiting for another rank."""

    text: str
    waiting: bool


Describe = Callable[[int, Note], Doing]
"""Puts a rank's last note into words."""


class Link:
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
        """Close both pipes."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        self.pipe.close()


class Watch:
    """Collects every rank's result; raises what caused a failure, not what followed from it."""

    def __init__(
        self,
        links: list[Link],
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
                    if not self._take(key.data):
                        selector.unregister(key.fileobj)
                self._check_grace()
                self._check_progress()
        return [self._results[rank] for rank in range(len(self._links))]

    def _take(self, rank: int) -> bool:
        received = self._links[rank].read()
        if received is None:
            raise TrainingError(self._lost(rank))
        for item in received:
            if "result" in item:
                self._results[rank] = item["result"]
            elif "failure" in item:
                self._failed(rank, Failure(**item["failure"]))  # type: ignore[arg-type]
            elif "message" in item and self._on_message is not None:
                self._on_message(rank, item["message"])  # type: ignore[arg-type]
        return True

    def _failed(self, rank: int, failure: Failure) -> None:
        if failure.consequence:
            self._consequences.setdefault(rank, failure)
            if self._grace_until_s is None:
                self._grace_until_s = time.monotonic() + GRACE_S
            return
        raise failure.as_error("" if failure.placed else f"{self._where(rank)}: ")

    def _check_grace(self) -> None:
        if self._grace_until_s is not None and time.monotonic() > self._grace_until_s:
            for rank, link in enumerate(self._links):
                if link.process.poll() is not None:
                    raise TrainingError(self._lost(rank))
            rank, failure = next(iter(self._consequences.items()))
            raise failure.as_error("" if failure.placed else f"{self._where(rank)}: ")

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

    def _lost(self, rank: int) -> str:
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
