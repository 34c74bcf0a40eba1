"""RunCheckpoints: a run's checkpoints, seen from one of its ranks: going on from one, and saving others."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.capture.graph import LayerGraph
from autopar.errors import AutoparError, UsageError
from autopar.formats.checkpoint import SavedPlan, SavedRun, StateKey
from autopar.ranks.context import RankContext
from autopar.ranks.failure import Failure
from autopar.runtime.checkpoint.cadence import Cadence, known_every
from autopar.runtime.checkpoint.folder import CheckpointFolder, read_manifest
from autopar.runtime.checkpoint.resume import changes, check_state, plan_notes, resume, shapes_of
from autopar.runtime.checkpoint.state import JobState
from autopar.runtime.checkpoint.writer import CheckpointWriter, SaveResult, SaveSettings, file_name
from autopar.runtime.start.job import Job
from autopar.runtime.start.saving import holders


class Attempt(NamedTuple):
    """What whoever starts ranks has found of a run's checkpoints."""

    token: str
    """Which no other attempt has."""
    resume: Path | None = None
    """Folder of the checkpoint to go on from, which was verified."""
    step: int = 0
    """The checkpoint's; 0 where there is none."""
    notes: tuple[str, ...] = ()


@contextmanager
def attempt_in(folder: Path, *, resume: bool, how_to_go_on: str = "pass `resume=True`") -> Iterator[Attempt]:
    """Return the context of an attempt, which alone writes into a folder of checkpoints.

    Args:
        folder: of all of them; it is made if it is not there.
        resume: whether to go on from the newest sound one, if there is any.
        how_to_go_on: what to say where there are checkpoints, and it is not.

    Raises:
        UsageError: another run writes there, or has written and is not to be gone on with.
        FileError: there are checkpoints, and none is sound; or the folder cannot be written.
    """
    checkpoints = CheckpointFolder(folder)
    with checkpoints.lock():
        token = secrets.token_hex(8)
        if not resume:
            steps = checkpoints.steps()
            if steps:
                raise UsageError(
                    f"{folder} holds checkpoints already, the newest of step {steps[-1]}; {how_to_go_on} to go on, or "
                    "name another folder"
                )
            yield Attempt(token)
            return
        newest, wrong = checkpoints.newest()
        if newest is None:
            yield Attempt(token, notes=(f"{folder} holds no checkpoint: the run begins with step 0",))
        else:
            skipped = tuple(f"left out a damaged checkpoint: {each}" for each in wrong)
            yield Attempt(token, newest.folder.resolve(), newest.manifest.step, skipped)


class CheckpointArguments(TypedDict):
    """What ranks are told of a run's checkpoints; plain data."""

    folder: str
    """Of all of them."""
    token: str
    """Of this attempt."""
    every: int | str
    resume: str | None
    """Folder of the checkpoint to go on from, which was verified."""
    accept_changes: bool
    model: str
    """What the run trains."""
    last: str


class RunCheckpoints:
    """Saves a run's checkpoints as its steps end."""

    def __init__(
        self,
        context: RankContext,
        job: Job,
        graph: LayerGraph,
        unread: Mapping[str, torch.Tensor],
        keys: tuple[StateKey, ...],
        arguments: CheckpointArguments,
    ) -> None:
        """Prepare, and have the job go on from a checkpoint, if one is given; all ranks do so at once.

        Args:
            context: the ranks.
            job: this rank's, before its first step.
            graph: the captured model.
            unread: the parameters and buffers that no layer reads.
            keys: of the model's ``state_dict``.
            arguments: what the user asks.

        Raises:
            UsageError: something has changed that may not have, or the model has state that is not kept; on all ranks.
        """
        check_state(graph)
        plan = job.plan
        samples = max(int(text) for text in context.gather(str(job.samples)))
        last: Any = arguments["last"]
        self._run = SavedRun(
            model=arguments["model"], batch=plan.batch, seed=plan.seed, samples=samples or None, last=last
        )
        self._plan = SavedPlan.of(plan, torch.__version__)
        self.first_step, self.notes = 0, list[str]()
        known: tuple[int, ...] = ()
        if arguments["resume"] is not None:
            folder, accept = Path(arguments["resume"]), arguments["accept_changes"]
            self.first_step, self.notes = go_on(context, job, graph, unread, self._run, folder, accept=accept)
            known = (self.first_step,)
        settings = SaveSettings(Path(arguments["folder"]), arguments["token"], self._run, self._plan, keys, known)
        state = JobState(job, holders(plan, graph))
        self._writer = CheckpointWriter(context, state, settings, file_name(job), lambda: unread)
        every = known_every(arguments["every"])
        self._cadence = Cadence(every, self.first_step, lambda number: _most(context, number))
        self._newest = self.first_step

    @property
    def results(self) -> list[SaveResult]:
        """How those that this attempt has saved went."""
        return self._writer.results

    @property
    def buffers_bytes(self) -> int:
        """What copies take of the host's memory on this rank."""
        return self._writer.buffers_bytes

    def next_after(self, done: int, drain_s: float) -> int:
        """Return after how many steps the next is saved, for which the pipeline is drained; all ranks ask at once.

        Args:
            done: steps since the run's first.
            drain_s: what draining and filling took last time, beyond its mini-batches.
        """

        def cost_s() -> float | None:
            saved_s = self._cost_s()
            return None if saved_s is None else saved_s + drain_s

        return self._cadence.next_after(done, cost_s)

    def end_step(self, done: int, step_s: float) -> None:
        """Save the state after so many steps, if that is due; all ranks do so at once."""
        self._cadence.add(step_s)
        if self._cadence.due(done, self._cost_s):
            self._save(done)

    def finish(self, done: int) -> None:
        """Save the state after the last step, and wait until it is there; all ranks do so at once."""
        if done > self._newest:
            self._save(done)
        self._writer.conclude()

    def _save(self, done: int) -> None:
        self._writer.save(done)
        self._newest = done

    def _cost_s(self) -> float | None:
        self._writer.conclude()
        if not self._writer.results:
            return None
        newest = self._writer.results[-1]
        return newest.pause_s + newest.busy_s


def _most(context: RankContext, number: float) -> float:
    return max(float(text) for text in context.gather(repr(number)))


def go_on(
    context: RankContext,
    job: Job,
    graph: LayerGraph,
    unread: Mapping[str, torch.Tensor],
    run: SavedRun,
    folder: Path,
    *,
    accept: bool,
) -> tuple[int, list[str]]:
    """Have a job go on from a checkpoint that was verified; all ranks do so at once.

    Args:
        context: the ranks.
        job: this rank's, before its first step.
        graph: the captured model.
        unread: the parameters and buffers that no layer reads.
        run: what is trained now.
        folder: the checkpoint's.
        accept: whether to go on though that has changed.

    Returns:
        How many steps it had trained, and what a reader should know.

    Raises:
        UsageError: something has changed that may not have; on all ranks.
    """
    said: dict[str, object] = {}
    step, notes = 0, list[str]()
    try:
        checkpoint = read_manifest(folder)
        changed = list(changes(checkpoint, run, shapes_of(graph, unread)))
        step, notes = checkpoint.step, [f"went on from the checkpoint of step {checkpoint.step}"]
        notes += resume(job, context.rank, folder, checkpoint, changed, context.device, accept=accept)
        random = any(layer.random for layer in graph.layers)
        batch_norm = any(isinstance(module, _BatchNorm) for layer in graph.layers for module in layer.module.modules())
        now = SavedPlan.of(job.plan, torch.__version__)
        notes += plan_notes(checkpoint.plan, now, random=random, batch_norm=batch_norm)
    except AutoparError as error:
        said = Failure.of(error).as_dict()
    for failure in map(json.loads, context.gather(json.dumps(said))):
        if failure:
            raise Failure(**failure).as_common_error(context.rank)
    return step, notes
