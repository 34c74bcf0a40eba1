"""CheckpointWriter: after which steps a run saves, and a rank's part in that, beside training.

Training waits while the rank's pieces are copied into buffers that are kept; a thread writes them, reads the files
again, and leaves a note of what it has written. Rank 0's waits for the notes of all ranks, makes the manifest of them
and gives the checkpoint its name. Ranks tell each other of failures when the next save begins: training goes on, and
the checkpoint before stays.
"""

from __future__ import annotations

import json
import math
import operator
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from autopar.errors import FileError, cause_of
from autopar.formats.checkpoint import (
    Checkpoint,
    Piece,
    PieceFile,
    RankPart,
    SavedPlan,
    SavedRun,
    StateKey,
    StoredTensor,
    merge,
)
from autopar.formats.document import write_text
from autopar.options.train import Count
from autopar.progress import said_once
from autopar.ranks.context import RankContext
from autopar.runtime.checkpoint import weights
from autopar.runtime.checkpoint.finite import non_finite_tensors
from autopar.runtime.checkpoint.folder import MANIFEST, CheckpointFolder, check_file
from autopar.runtime.checkpoint.state import HeldPiece, JobState, generators
from autopar.runtime.clocks import clock_of
from autopar.runtime.job import Job

_SHARE = 0.03
"""Of training's time that checkpoints may take by default."""
FIRST = 5
"""Steps of an attempt before its first checkpoint, where what one takes decides."""


class Cadence:
    """Says when a checkpoint is due: after so many steps, or as often as a share of the time allows.

    What a checkpoint takes is how long training waits for it, and what writing it takes of a processor: ranks that
    compute on the host's processors may wait for that, too.
    """

    def __init__(self, every: Count, first_step: int, most: Callable[[float], float]) -> None:
        """Begin.

        Args:
            every: a number of steps, counted from the run's first, or ``auto``.
            first_step: with which this attempt begins.
            most: returns the largest of the numbers that all ranks call it with.
        """
        self._every, self._most = every, most
        self._next = first_step + FIRST
        self._newest = first_step
        self._lengths_s: list[float] = []

    def add(self, step_s: float) -> None:
        """Take note of how long a step took."""
        self._lengths_s.append(step_s)

    def due(self, done: int, cost_s: Callable[[], float | None]) -> bool:
        """Tell whether a checkpoint is due after so many steps; all ranks ask at once, and are told the same.

        Args:
            done: steps since the run's first.
            cost_s: returns what the checkpoint before took, once that is known; None if there was none.
        """
        if self._every != "auto":
            return done % self._every == 0
        if done < self._next:
            return False
        cost = cost_s()
        if cost is not None:
            # The first step also sets up.
            step_s = median(self._lengths_s[1:] or self._lengths_s)
            longest, cost = self._most(step_s), self._most(cost)
            self._next = self._newest + max(1, math.ceil(cost / (_SHARE * longest))) if longest else done
        if done < self._next:
            return False
        self._newest, self._next = done, done + FIRST
        return True


_DISK_BYTES_PER_S = 500e6
"""At which a checkpoint is written, where nothing was measured: a solid-state disk's, or a fast network's."""


def steps_between_drains(step_s: float, lead: int, state_bytes: float) -> int:
    """Return after how many steps a pipeline that is never flushed is drained for a checkpoint.

    It must be known before the first step, and be the same in every run: what is trained depends on it. So nothing is
    measured: it follows from the plan and the model.

    Args:
        step_s: seconds of a mini-batch, as planned.
        lead: mini-batches that draining and filling take.
        state_bytes: what the rank with the most writes.

    >>> steps_between_drains(0.1, lead=2, state_bytes=2e9)
    1400
    """
    cost_s = lead * step_s + state_bytes / _DISK_BYTES_PER_S
    return max(1, math.ceil(round(cost_s / (_SHARE * step_s), 6)))


_NUMBER = re.compile(r"\d+")
"""Of a step, mostly: what is said at every step differs in no more."""
LOOK_S = 0.02
"""How often rank 0 looks for the notes of the others."""


@dataclass(frozen=True)
class SaveSettings:
    """What all ranks know of a run's checkpoints; plain data."""

    folder: Path
    """Of all of them; all hosts see it."""
    token: str
    """Of this attempt, which no other has."""
    run: SavedRun
    plan: SavedPlan
    state_keys: tuple[StateKey, ...] = ()
    known_steps: tuple[int, ...] = ()
    """Checkpoints that are known to be sound already."""


class SaveResult(NamedTuple):
    """How a rank's part of a checkpoint went."""

    step: int
    pause_s: float
    """How long training waited while it was copied."""
    busy_s: float
    """What the thread that wrote it took of a processor."""
    failure: str | None


class _PartError(FileError):
    """A rank's part is not there; the message names the rank."""


class CheckpointWriter:
    """Saves checkpoints together with the writers of the other ranks, one at a time."""

    def __init__(
        self,
        context: RankContext,
        state: JobState,
        settings: SaveSettings,
        name: str,
        unread: Callable[[], Mapping[str, torch.Tensor]],
        at_start: Mapping[str, int],
    ) -> None:
        """Prepare.

        Args:
            context: the ranks.
            state: this rank's.
            settings: what is saved, and where.
            name: of this rank's files; see :func:`file_name`.
            unread: gives the parameters and buffers that no layer reads.
            at_start: what this rank had at step 0 that is not finite.
        """
        self._at_start = at_start
        self._context, self._state, self._settings = context, state, settings
        self._folder = CheckpointFolder(settings.folder)
        self._file = name
        self._unread = unread if context.rank == 0 else dict
        self._clock = clock_of(context.device)
        self._clock.start()
        self._sources: list[HeldPiece] = []
        self._copies: list[HeldPiece] = []
        """In buffers that are kept, of the sources."""
        self._constants: dict[str, torch.Tensor] | None = None
        # What is being written is finished before Python ends.
        self._writers = ThreadPoolExecutor(1, "autopar-checkpoint")
        self._writing: Future[None] | None = None
        self._publishing: threading.Thread | None = None
        self._abandoned = threading.Event()
        self._sound = list(settings.known_steps)
        self._unsound: int | None = None
        """The newest that training had spoilt."""
        self._note = said_once(lambda text: sys.stderr.write(f"autopar: {text}\n"))
        self._step, self._pause_s, self._busy_s = 0, 0.0, 0.0
        self._failures: list[str] = []
        """Of this rank, in the checkpoint under way."""
        self._known_failure: str | None = None
        """Of any rank, as the others were told."""
        self.results: list[SaveResult] = []
        """All that were begun, but for the one under way: of every one, what the slowest rank took."""

    @property
    def buffers_bytes(self) -> int:
        """What the copies take of the host's memory."""
        return sum(copy.tensor.nbytes for copy in self._copies)

    def save(self, step: int) -> None:
        """Begin a checkpoint of the state after so many steps; all ranks do so at once.

        Raises:
            TrainingError: the optimizer keeps what no checkpoint can.
        """
        began_s = time.perf_counter()
        self.conclude()
        marks = [self._clock.mark()]
        pieces, part = self._state.look()
        copies = self._copy(pieces)
        marks.append(self._clock.mark())
        self._step, self._pause_s, self._busy_s = step, time.perf_counter() - began_s, 0.0
        self._failures, self._known_failure, self._abandoned = [], None, threading.Event()
        self._writing = self._writers.submit(self._write, step, copies, marks, part)

    def conclude(self) -> None:
        """Wait until the checkpoint under way is there, or has failed; all ranks do so at once."""
        if self._writing is None:
            return
        self._writing.result()
        self._known_failure = next((each.failure for each in self._exchange() if each.failure is not None), None)
        if self._known_failure is not None:
            self._abandoned.set()
        if self._publishing is not None:
            self._publishing.join()
        every = self._exchange()
        self._writing = self._publishing = None
        failure = next((each.failure for each in every if each.failure is not None), None)
        pause_s, busy_s = max(each.pause_s for each in every), max(each.busy_s for each in every)
        self.results.append(SaveResult(self._step, pause_s, busy_s, failure))

    def _exchange(self) -> list[SaveResult]:
        """Return how the checkpoint under way goes on every rank."""
        mine = SaveResult(self._step, self._pause_s, self._busy_s, next(iter(self._failures), None))
        return [SaveResult(*json.loads(text)) for text in self._context.gather(json.dumps(mine))]

    def abandon(self) -> None:
        """Give up what is under way, where other ranks are gone."""
        self._abandoned.set()

    def _copy(self, pieces: list[HeldPiece]) -> list[HeldPiece]:
        """Copy what this rank writes into the host's memory; a GPU does so behind this step's work and before the
        next's, and the thread that writes waits for it."""
        if len(pieces) != len(self._sources) or any(map(operator.is_not, pieces, self._sources)):
            kept = {copy.key: copy.tensor for copy in self._copies}
            self._copies = [piece._replace(tensor=_buffer_for(piece, kept.get(piece.key))) for piece in pieces]
            self._sources = pieces
        for copy, piece in zip(self._copies, pieces, strict=True):
            copy.tensor.copy_(piece.tensor, non_blocking=True)
        # The state of generators is a copy already.
        return [*self._copies, *generators(self._context.device, self._context.rank)]

    def _write(self, step: int, copies: list[HeldPiece], marks: list[object], part: RankPart) -> None:
        """Write this rank's part, once it is copied, and leave a note of it."""
        began_s = time.thread_time()
        if self._context.rank == 0:
            # It waits for other ranks, which may be gone.
            publish = threading.Thread(target=self._publish, args=(step,), name="autopar-manifest", daemon=True)
            publish.start()
            self._publishing = publish
        folder = self._folder.unfinished_folder(step, self._settings.token)
        try:
            began, ended = self._clock.resolve(marks)
            self._pause_s = max(self._pause_s, ended - began)
            folder.mkdir(exist_ok=True)
            pieces = [*copies, *self._constant_pieces()]
            files = []
            if pieces:
                file = weights.write(folder / self._file, {each.key: each.tensor for each in pieces})
                files.append(PieceFile(name=file["name"], bytes=file["bytes"], sha256=file["sha256"]))
                # What lies there, not what was meant to.
                check_file(folder, files[-1])
            tensors = tuple(_tensor_record(each, self._file) for each in pieces)
            more = non_finite_tensors(pieces, self._at_start)
            part = part.model_copy(update={"tensors": tensors, "files": tuple(files), "non_finite": more})
        except Exception as error:
            self._failures.append(f"rank {self._context.rank}: {cause_of(error)}")
            part = RankPart(failure=self._failures[-1])
        try:
            write_text(folder / _note_name(self._context.rank), part.model_dump_json())
        except Exception as error:
            # Rank 0 would wait for it.
            self._failures.append(f"rank {self._context.rank}: {cause_of(error)}")
        self._busy_s = time.thread_time() - began_s

    def _constant_pieces(self) -> list[HeldPiece]:
        """Return what no layer reads, which rank 0 writes."""
        if self._constants is None:
            self._constants = {name: tensor.detach() for name, tensor in self._unread().items()}
        return [
            HeldPiece("buffer", name, None, tuple(tensor.shape), (), tensor)
            for name, tensor in self._constants.items()
            if tensor.numel()
        ]

    def _publish(self, step: int) -> None:
        """Wait for what all ranks have written, and make a checkpoint of it."""
        folder, token = self._folder.unfinished_folder(step, self._settings.token), self._settings.token
        try:
            parts = self._await_parts(folder)
            failed = next((part.failure for part in parts if part.failure is not None), None)
            if failed is not None:
                raise _PartError(failed)
            manifest = merge(parts, step, self._settings.run, self._settings.plan, self._settings.state_keys)
            write_text(folder / MANIFEST, manifest.dumps())
            Checkpoint.read((folder / MANIFEST).read_text(encoding="utf-8"), folder / MANIFEST)
            for rank in range(self._context.size):
                (folder / _note_name(rank)).unlink()
            self._folder.admit(step, token)
        except _PartError as error:
            self._fail(step, str(error))
        except Exception as error:
            self._fail(step, f"rank {self._context.rank}: {cause_of(error)}")
        else:
            self._keep(step, manifest.unsound)

    def _keep(self, step: int, unsound: str | None) -> None:
        """Keep a checkpoint that has been written, and no more than enough of those before."""
        if unsound is None:
            self._sound.append(step)
            self._folder.prune(self._sound)
            return
        if self._unsound is not None:
            self._folder.remove(self._unsound)
        self._unsound = step
        goes_on = f"goes on from that of step {max(self._sound)}" if self._sound else "leaves it out"
        self._say(unsound, f"the checkpoint of step {step}: {unsound}; a run that is resumed {goes_on}")

    def _fail(self, step: int, why: str) -> None:
        shutil.rmtree(self._folder.unfinished_folder(step, self._settings.token), ignore_errors=True)
        kept = f"that of step {max(self._sound)} stays" if self._sound else "there is none yet"
        self._say(why, f"the checkpoint of step {step} was not written: {why}; training goes on, {kept}")

    def _say(self, why: str, text: str) -> None:
        """Say why a checkpoint is not to be gone on from; once, where it is the same at every step."""
        self._note(_NUMBER.sub("", why), text)
        self._failures.append(why)

    def _await_parts(self, folder: Path) -> list[RankPart]:
        """Return the notes of all ranks, once they are there.

        Raises:
            _PartError: a rank has failed.
        """
        parts: dict[int, RankPart] = {}
        while len(parts) < self._context.size:
            given_up = self._abandoned.is_set()
            for rank in set(range(self._context.size)) - parts.keys():
                path = folder / _note_name(rank)
                if path.exists():
                    parts[rank] = RankPart.model_validate_json(path.read_text(encoding="utf-8"))
            if len(parts) < self._context.size:
                if given_up:
                    raise _PartError(self._known_failure or "a rank has not written its part")
                time.sleep(LOOK_S)
        return [parts[rank] for rank in range(self._context.size)]


def file_name(job: Job) -> str:
    """Return the name of the files of a rank's pieces, which no other rank has."""
    part = f"-part-{job.team.part:05d}" if len(job.team.ranks) > 1 else ""
    return f"stage-{min(job.stages):05d}-replica-{job.own.replica:05d}{part}.safetensors"


def _buffer_for(piece: HeldPiece, there: torch.Tensor | None) -> torch.Tensor:
    """Return host memory for a copy of a piece: what is there, if it is of that form."""
    of_piece = piece.tensor
    if there is not None and there.shape == of_piece.shape and there.dtype == of_piece.dtype:
        return there
    return torch.empty(of_piece.shape, dtype=of_piece.dtype, pin_memory=of_piece.is_cuda)


def _note_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _tensor_record(piece: HeldPiece, file: str) -> StoredTensor:
    return StoredTensor(
        kind=piece.kind,
        name=piece.name,
        state=piece.state,
        pipeline=piece.pipeline,
        shape=piece.shape,
        dtype=str(piece.tensor.dtype).removeprefix("torch."),
        pieces=(Piece(file=file, ranges=piece.ranges, key=piece.key if piece.number else None),),
    )
