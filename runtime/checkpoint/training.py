"""Checkpoints of a run, seen from one of its ranks: going on from one, if changes allow it, and saving others.

How training is carried out may change: plan, ranks, schedule, sharding, micro-batches, torch. That is said. What
training is may not, unless its user accepts that: batch, seed, samples, architecture, optimizer, scheduler.
``RunCheckpoints`` are those of ``autopar run``, ``ScriptCheckpoints`` of a job that a user's own script steps.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.capture.graph import LayerGraph
from autopar.capture.model.state import set_generators
from autopar.errors import UsageError
from autopar.formats.checkpoint import Checkpoint, SavedPlan, SavedRun, StateKey
from autopar.options.train import Count, RunOptions
from autopar.ranks.context import RankContext
from autopar.runtime.checkpoint.finite import non_finite_at_start
from autopar.runtime.checkpoint.folder import CheckpointFolder, CheckpointReader, read_manifest
from autopar.runtime.checkpoint.saving import check_shared, state_keys, unread
from autopar.runtime.checkpoint.state import (
    JobState,
    class_name,
    plain_items,
    restore_optimizer,
    restore_tensors,
)
from autopar.runtime.checkpoint.writer import (
    Cadence,
    CheckpointWriter,
    SaveResult,
    SaveSettings,
    file_name,
    steps_between_drains,
)
from autopar.runtime.job import Job
from autopar.runtime.stage.parameters import first_stages

SHOWN = 3
"""Names that a refusal lists."""
Shapes = Mapping[str, tuple[int, ...]]


def changes(checkpoint: Checkpoint, run: SavedRun, shapes: Shapes) -> Iterator[str]:
    """Say what of training is not as it was, but for the optimizer.

    Args:
        checkpoint: what is gone on from.
        run: what is asked for now.
        shapes: of the model's parameters and buffers.
    """
    for name, before, now in (
        ("batch", checkpoint.run.batch, run.batch),
        ("seed", checkpoint.run.seed, run.seed),
        ("number of samples", checkpoint.run.samples, run.samples),
        ("last", checkpoint.run.last, run.last),
    ):
        if before != now and None not in (before, now):
            yield f"the {name} is {now}, it was {before}"
    stored = {each.name: each.shape for each in checkpoint.tensors if each.kind in ("parameter", "buffer")}
    for what, names in (
        ("the model has {} that the checkpoint has not", shapes.keys() - stored.keys()),
        ("the checkpoint has {} that the model has not", stored.keys() - shapes.keys()),
    ):
        if names:
            yield what.format(_list_names(names))
    for name in sorted(shapes.keys() & stored.keys()):
        if shapes[name] != stored[name]:
            yield f"{name} has shape {list(shapes[name])}, it had {list(stored[name])}"


def _list_names(names: Sequence[str] | set[str]) -> str:
    shown, more = sorted(names)[:SHOWN], len(names) - SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def optimizer_changes(checkpoint: Checkpoint, job: Job) -> Iterator[str]:
    """Say what of a rank's optimizer and scheduler is not as it was."""
    update, saved = job.update, checkpoint.optimizer
    if update.optimizer is None or saved is None:
        return
    if saved.kind != class_name(update.optimizer):
        yield f"the optimizer is {class_name(update.optimizer)}, it was {saved.kind}"
        return
    before = {name: group.settings for group in saved.groups for name in group.parameters}
    names = {parameter: name for name, parameter in update.optimizer_parameters.items()}
    for fresh, group in zip(update.fresh_groups, update.optimizer.param_groups, strict=True):
        now = plain_items(fresh)
        for name in (names[each] for each in group["params"] if each in names):
            if name not in before:
                yield f"the optimizer steps {name}, it did not"
                continue
            # Another version of torch may have settings that this one lacks.
            key = next((key for key, value in now.items() if before[name].get(key, value) != value), None)
            if key is not None:
                yield f"the optimizer's {key} is {now[key]} for {name}, it was {before[name][key]}"
                break
    stepped = {names[each] for group in update.optimizer.param_groups for each in group["params"] if each in names}
    left = sorted((update.optimizer_parameters.keys() & before.keys()) - stepped)
    if left:
        yield f"the optimizer leaves out {_list_names(left)}, which it stepped"
    scheduler = None if update.scheduler is None else class_name(update.scheduler)
    past = None if checkpoint.scheduler is None else checkpoint.scheduler.kind
    if scheduler != past:
        yield f"the scheduler is {scheduler or 'absent'}, it was {past or 'absent'}"


def plan_notes(before: SavedPlan, now: SavedPlan, *, random: bool, batch_norm: bool) -> Iterator[str]:
    """Say what of how training is carried out is not as it was, and what this changes of its numbers.

    Args:
        before: the checkpoint's.
        now: the plan's.
        random: whether some layer draws random numbers.
        batch_norm: whether some layer is a batch normalisation.
    """
    for name, past, present in (
        ("torch", before.torch, now.torch),
        ("ranks", before.ranks, now.ranks),
        ("stages", before.stages, now.stages),
        ("schedule", before.schedule, now.schedule),
        ("micro-batches", before.micro_batches, now.micro_batches),
        ("precision", before.precision, now.precision),
        ("an average's `ema_decay`", before.ema_decay, now.ema_decay),
        ("ranks for a replica (by stage)", _team_sizes(before), _team_sizes(now)),
    ):
        if past != present:
            yield f"goes on with {name} {present}; the checkpoint was saved with {past}"
    if before.pipelines != now.pipelines:
        yield (
            f"goes on with {now.pipelines} pipeline{'s' * (now.pipelines > 1)}, the checkpoint's run had "
            f"{before.pipelines}: of each that it had, the optimizer goes on with what it kept, others with what the "
            f"first one did; a step is {now.pipelines} mini-batches, and was {before.pipelines}"
        )
    if before.sharded != now.sharded:
        yield f"goes on {'with' if now.sharded else 'without'} sharding, unlike the checkpoint's run"
    if before.micro_batches == now.micro_batches and len({*before.division, *now.division}) == 1:
        return
    for there, what in ((random, "layers that draw random numbers"), (batch_norm, "batch normalisation")):
        if there:
            yield f"{what} go on otherwise: micro-batches are divided in another way (docs/howto/verify.md)"


def _team_sizes(plan: SavedPlan) -> str:
    """Return how many ranks run a replica of each stage together; of plans without teams, 1.

    Teams that all stages have alike are one number: stages may be others.
    """
    sizes = set(plan.tensor_parallel or (1,))
    return ", ".join(map(str, plan.tensor_parallel if len(sizes) > 1 else sizes))


def check_state(graph: LayerGraph) -> None:
    """Refuse a model whose forwards change what no checkpoint holds.

    Raises:
        UsageError: names the layer and the state.
    """
    for layer in graph.layers:
        if layer.writes is not None and layer.writes.state:
            raise UsageError(
                f"layer {layer.name} changes the Python state {layer.writes.state[0]} as it runs, which checkpoints do "
                "not hold; keep it in a buffer (register_buffer), or train without `checkpoint`"
            )


def _shapes_of(graph: LayerGraph, unread: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters and buffers."""
    found = {name: tuple(tensor.shape) for name, tensor in unread.items()}
    for layer in graph.layers:
        tensors = {**dict(layer.module.named_parameters()), **dict(layer.module.named_buffers())}
        for attribute, name in (*layer.parameters.items(), *layer.buffers.items()):
            if attribute in tensors:
                found[name] = tuple(tensors[attribute].shape)
    return found


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
            skipped = tuple(f"left out a checkpoint: {each}" for each in wrong)
            yield Attempt(token, newest.folder.resolve(), newest.manifest.step, skipped)


@dataclass
class _JobCheckpoints:
    """Checkpoints of a rank's job; all ranks call the same methods in the same order.

    Raises:
        UsageError: the model has state that no checkpoint holds.
    """

    _context: RankContext
    _job: Job
    _graph: LayerGraph
    _unread: Callable[[], Mapping[str, torch.Tensor]]
    """Gives the parameters and buffers that no layer reads."""
    _keys: Mapping[str, str]
    """Of the model's ``state_dict``, with the parameters and buffers that they name."""
    _run: SavedRun
    _at_start: Mapping[str, int]
    """What the rank had at step 0 that is not finite."""

    def __post_init__(self) -> None:
        check_state(self._graph)

    def _writer(
        self, folder: Path, token: str, known: tuple[int, ...], drained_every: int | None = None
    ) -> CheckpointWriter:
        """Return what saves into a folder that an attempt has for itself; ``known`` steps are sound there already."""
        plan = SavedPlan.of(self._job.plan, torch.__version__, drained_every)
        keys = tuple(StateKey(key=key, tensor=name) for key, name in self._keys.items())
        settings = SaveSettings(folder, token, self._run, plan, keys, known)
        state = JobState(self._job, first_stages(self._job.plan, self._graph))
        return CheckpointWriter(self._context, state, settings, file_name(self._job), self._unread, self._at_start)

    def _go_on(self, folder: Path, *, accept: bool) -> tuple[int, list[str]]:
        """Have the job go on from a checkpoint that was verified, and ``accept`` that what is trained has changed.

        Returns:
            How many steps it had trained, and what a reader should know.

        Raises:
            UsageError: something has changed that may not have; on all ranks.
        """
        step, notes = self._context.gather_results(lambda: self._restore(folder, accept=accept))[self._context.rank]
        return step, notes

    def _restore(self, folder: Path, *, accept: bool) -> tuple[int, list[str]]:
        checkpoint, job, layers = read_manifest(folder), self._job, self._graph.layers
        shapes = _shapes_of(self._graph, self._unread())
        changed = [*changes(checkpoint, self._run, shapes), *optimizer_changes(checkpoint, job)]
        if changed and not accept:
            more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
            raise UsageError(
                f"{folder} cannot be gone on with: {'; '.join(changed[:SHOWN])}{more}; change it back, or pass "
                "`accept_changes=True` to take what is new and all that still fits"
            )
        with CheckpointReader(folder, checkpoint) as source:
            restore_tensors(job, source)
            restore_optimizer(job, source)
            _restore_generators(self._context, source)
        notes = [f"went on from the checkpoint of step {checkpoint.step}", *(f"accepted: {each}" for each in changed)]
        random = any(layer.random for layer in layers)
        batch_norm = any(isinstance(module, _BatchNorm) for layer in layers for module in layer.module.modules())
        now = SavedPlan.of(job.plan, torch.__version__)
        return checkpoint.step, [*notes, *plan_notes(checkpoint.plan, now, random=random, batch_norm=batch_norm)]


class RunCheckpoints(_JobCheckpoints):
    """Saves a run's checkpoints as its steps end."""

    def __init__(
        self,
        context: RankContext,
        job: Job,
        graph: LayerGraph,
        unread: Mapping[str, torch.Tensor],
        keys: Mapping[str, str],
        folder: Path,
        options: RunOptions,
        attempt: Attempt,
        samples: int,
    ) -> None:
        """Prepare, and have the job go on from a checkpoint, if one is given; all ranks do so at once.

        Args:
            context: the ranks.
            job: this rank's, before its first step.
            graph: the captured model.
            unread: the parameters and buffers that no layer reads.
            keys: of the model's ``state_dict``, with the parameters and buffers that they name.
            folder: of all checkpoints.
            options: what the user asks.
            attempt: what it goes on from.
            samples: in the dataset; 0 where no rank reads one.

        Raises:
            UsageError: something has changed that may not have, or the model has state that is not kept; on all ranks.
        """
        plan, every, last = job.plan, options.every, options.settings.last
        run = SavedRun(model=plan.model.source, batch=plan.batch, seed=plan.seed, samples=samples or None, last=last)
        super().__init__(context, job, graph, lambda: unread, keys, run, non_finite_at_start(job))
        self._drained_every: int | None = None
        self.first_step, self.notes = 0, list[str]()
        known: tuple[int, ...] = ()
        if attempt.resume is not None:
            self.first_step, self.notes = self._go_on(attempt.resume, accept=options.accept_changes)
            known = (self.first_step,)
        if plan.lead:
            before = None if attempt.resume is None else read_manifest(attempt.resume).plan.drained_every
            every = self._drained_every = _drained_every(context, job, every, before)
            self.notes += _drain_notes(self.first_step, before, every)
        self.writer = self._writer(folder, attempt.token, known, self._drained_every)
        self._cadence = Cadence(every, self.first_step, lambda number: _most(context, number))
        self._newest = self.first_step

    def next_drain(self, done: int) -> int | None:
        """Return after how many steps a pipeline that is never flushed is drained next; None: when it is flushed."""
        return None if self._drained_every is None else (done // self._drained_every + 1) * self._drained_every

    def end_step(self, done: int, step_s: float) -> None:
        """Save the state after so many steps, if that is due; all ranks do so at once."""
        self._cadence.add(step_s)
        if self._cadence.due(done, self._cost_s):
            self._save(done)

    def finish(self, done: int, steps: int) -> None:
        """Save the state after the last step, and wait until it is there; all ranks do so at once.

        Of a run that ends before all ``steps``, what was trained since the last drain is left to a later one, which
        trains it as if nothing had been: it saves nothing where no drain is due.
        """
        if done > self._newest:
            if self._drained_every is None or done == steps:
                self._save(done)
            else:
                self.notes.append(
                    f"steps {self._newest + 1} to {done} are trained again when the run is gone on with: without "
                    f"flushes, checkpoints are of multiples of {self._drained_every} steps, so that what is trained "
                    "is what one run would"
                )
        self.writer.conclude()
        last = self.writer.results[-1:]
        self.notes += [
            f"step {each.step}, the last, is in no checkpoint: {each.failure}" for each in last if each.failure
        ]

    def _save(self, done: int) -> None:
        self.writer.save(done)
        self._newest = done

    def _cost_s(self) -> float | None:
        self.writer.conclude()
        if not self.writer.results:
            return None
        newest = self.writer.results[-1]
        return newest.pause_s + newest.busy_s


def _drained_every(context: RankContext, job: Job, every: Count, before: int | None) -> int:
    """Return after how many steps the pipeline is drained: as asked, as before, or as the plan and the model say."""
    if every != "auto":
        return every
    if before is not None:
        return before
    # Weights, and what the commonest optimizers keep of them: two moments.
    own_bytes = sum(3 * each.nbytes for each in job.parameters.values())
    return steps_between_drains(job.plan.predicted.step_s, job.plan.lead, _most(context, own_bytes))


def _drain_notes(first_step: int, before: int | None, every: int) -> Iterator[str]:
    """Say what is trained otherwise than by a run that was not interrupted."""
    differs = "; what follows is trained otherwise than by a run that was not interrupted"
    if before is not None and before != every:
        yield f"the pipeline is drained every {every} steps, and was every {before}{differs}"
    if first_step % every:
        yield f"the checkpoint is of step {first_step}, and the pipeline is drained every {every} steps{differs}"


def _most(context: RankContext, number: float) -> float:
    return max(float(text) for text in context.gather(repr(number)))


def _restore_generators(context: RankContext, source: CheckpointReader) -> None:
    """Give the generators of a rank the state that they had; ranks that there were not then draw what rank 0 does."""
    kept = [each for each in source.checkpoint.tensors if each.kind == "generator"]
    whose = next((each.name for each in kept if each.name == f"rank {context.rank}"), "rank 0")
    set_generators(context.device, {str(each.state): source.read(each) for each in kept if each.name == whose})


class ScriptCheckpoints(_JobCheckpoints):
    """Saves and loads; all ranks call the same methods in the same order."""

    def __init__(
        self, context: RankContext, job: Job, graph: LayerGraph, model: nn.Module, at_start: Mapping[str, int]
    ) -> None:
        """Look at a rank's job, the captured model, and the script's own.

        Args:
            context: the ranks.
            job: this rank's.
            graph: the captured model.
            model: the script's own.
            at_start: what the job had before its first step that is not finite.

        Raises:
            UsageError: the model has state that no checkpoint holds.
        """
        run = SavedRun(model=class_name(model), batch=job.plan.batch, seed=job.plan.seed)
        super().__init__(context, job, graph, partial(unread, model, job.plan, graph), state_keys(model), run, at_start)
        self._writers: dict[Path, CheckpointWriter] = {}
        self._loaded: dict[Path, int] = {}
        self._told: dict[Path, int] = {}
        self._open = ExitStack()

    def save(self, folder: Path, step: int, *, wait: bool) -> None:
        """Begin to save the state after so many steps; ``wait``: and wait until it is there.

        Raises:
            UsageError: the folder is another run's.
            FileError: it cannot be written.
        """
        place = folder.resolve()
        if place not in self._writers:
            self._writers[place] = self._writer_into(place)
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

        found, *wrong = self._context.result_of_rank_0(find)
        if not found:
            return 0, [f"{folder} holds no checkpoint"]
        step, notes = self._go_on(Path(found), accept=accept_changes)
        self._loaded[place] = step
        return step, [*(f"left out a checkpoint: {each}" for each in wrong), *notes]

    def ended(self) -> list[SaveResult]:
        """Return those that are there, or have failed, and of which this has not told; the same on all ranks."""
        found = list[SaveResult]()
        for place, writer in self._writers.items():
            found += writer.results[self._told.get(place, 0) :]
            self._told[place] = len(writer.results)
        return found

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

    def _writer_into(self, place: Path) -> CheckpointWriter:
        if self._context.local_size < self._context.size:
            check_shared(self._context, place)

        def open_folder() -> str:
            attempt = attempt_in(place, resume=place in self._loaded, how_to_go_on="call load()")
            return self._open.enter_context(attempt).token

        token = self._context.result_of_rank_0(open_folder)
        return self._writer(place, token, (self._loaded[place],) if place in self._loaded else ())
