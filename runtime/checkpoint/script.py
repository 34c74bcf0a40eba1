"""ScriptCheckpoints: checkpoints of a job that a user's own script steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from autopar.capture.graph import LayerGraph
from autopar.errors import AutoparError
from autopar.formats.checkpoint import SavedPlan, SavedRun, StateKey
from autopar.ranks.context import RankContext
from autopar.ranks.failure import Failure
from autopar.runtime.checkpoint.folder import CheckpointFolder
from autopar.runtime.checkpoint.resume import check_state
from autopar.runtime.checkpoint.state import JobState, class_name
from autopar.runtime.checkpoint.training import attempt_in, go_on
from autopar.runtime.checkpoint.writer import CheckpointWriter, SaveSettings, file_name
from autopar.runtime.start.job import Job
from autopar.runtime.start.saving import check_shared, holders
from autopar.runtime.start.workspace import state_keys


class ScriptCheckpoints:
    """Saves and loads; all ranks call the same methods in the same order."""

    def __init__(self, context: RankContext, job: Job, graph: LayerGraph, model: nn.Module) -> None:
        """Look at a rank's job, the captured model, and the script's own.

        Raises:
            UsageError: the model has state that no checkpoint holds.
        """
        check_state(graph)
        self._context, self._job, self._graph, self._model = context, job, graph, model
        self._run = SavedRun(model=class_name(model), batch=job.plan.batch, seed=job.plan.seed)
        self._writers: dict[Path, CheckpointWriter] = {}
        self._loaded: dict[Path, int] = {}
        self._open = ExitStack()

    def save(self, folder: Path, step: int, *, wait: bool) -> None:
        """Begin to save the state after so many steps; ``wait``: and wait until it is there.

        Raises:
            UsageError: the folder is another run's.
            FileError: it cannot be written.
        """
        place = folder.resolve()
        if place not in self._writers:
            self._writers[place] = self._writer(place)
        self._writers[place].save(step)
        if wait:
            self._writers[place].conclude()

    def load(self, folder: Path, *, accept_changes: bool) -> tuple[int, list[str]]:
        """Go on from the newest sound checkpoint; return its step, and what a reader should know.

        Raises:
            FileError: there are checkpoints, and none is sound.
            UsageError: what is trained has changed.
        """
        place = folder.resolve()

        def find() -> list[str]:
            newest, wrong = CheckpointFolder(place).newest()
            return ["" if newest is None else str(newest.folder), *wrong]

        found, *wrong = self._of_rank_0(find)
        if not found:
            return 0, [f"{folder} holds no checkpoint"]
        step, notes = go_on(
            self._context, self._job, self._graph, self._unread(), self._run, Path(found), accept=accept_changes
        )
        self._loaded[place] = step
        return step, [*(f"left out a damaged checkpoint: {each}" for each in wrong), *notes]

    def close(self) -> None:
        """Wait until what was saved is there."""
        for writer in self._writers.values():
            writer.conclude()
        self._open.close()

    def abandon(self) -> None:
        """Give up what is being written, where other ranks may be gone."""
        for writer in self._writers.values():
            writer.abandon()
        self._open.close()

    def _writer(self, place: Path) -> CheckpointWriter:
        if self._context.local_size < self._context.size:
            check_shared(self._context, place)

        def open_folder() -> list[str]:
            return [
                self._open.enter_context(
                    attempt_in(place, resume=place in self._loaded, how_to_go_on="call load()")
                ).token
            ]

        (token,) = self._of_rank_0(open_folder)
        plan = SavedPlan.of(self._job.plan, torch.__version__)
        keys = tuple(StateKey(key=key, tensor=name) for key, name in state_keys(self._model).items())
        known = (self._loaded[place],) if place in self._loaded else ()
        settings = SaveSettings(place, token, self._run, plan, keys, known)
        state = JobState(self._job, holders(self._job.plan, self._graph))
        return CheckpointWriter(self._context, state, settings, file_name(self._job), self._unread)

    def _of_rank_0(self, act: Callable[[], list[str]]) -> list[str]:
        """Return what a function returns on rank 0, on all ranks, or raise what it raises there."""
        said: dict[str, object] = {}
        if self._context.rank == 0:
            try:
                said = {"found": act()}
            except AutoparError as error:
                said = {"failure": Failure.of(error).as_dict()}
        heard = json.loads(self._context.gather(json.dumps(said))[0])
        if "failure" in heard:
            raise Failure(**heard["failure"]).as_error()
        found: list[str] = heard["found"]
        return found

    def _unread(self) -> Mapping[str, torch.Tensor]:
        read = holders(self._job.plan, self._graph)
        known = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        return {name: value for name, value in known.items() if name not in read}
