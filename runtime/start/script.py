"""ScriptJob: training, evaluating and predicting, batch by batch, as a user's own script asks.

In come a script's model and, call by call, batches; out come metrics, losses, predictions and weights. A rank's job is
built from an example of the batches. Before a batch goes through the pipeline all ranks agree on it: a rank that alone
refuses its batch would leave the others waiting for its messages.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from autopar.capture.graph import LayerGraph, TensorSpec
from autopar.capture.layers.evaluation import EvaluationGraph, capture_evaluation, capture_prediction
from autopar.capture.model.batch import named_tensors, row_count
from autopar.capture.model.changes import Readings
from autopar.capture.model.optimizer import Settings
from autopar.capture.model.python_state import roots_of
from autopar.capture.model.source import UserModel
from autopar.capture.model.state import preserve_generators
from autopar.errors import AutoparError, TrainingError, UsageError
from autopar.formats.plan import Plan
from autopar.options.train import TrainSettings
from autopar.ranks.context import RankContext
from autopar.runtime.checkpoint import weights
from autopar.runtime.checkpoint.finite import non_finite_at_start
from autopar.runtime.checkpoint.saving import make_folder, new_set, set_of, unread, write_stages
from autopar.runtime.checkpoint.training import ScriptCheckpoints
from autopar.runtime.data import check_given, split_rows
from autopar.runtime.job import Feed, Job
from autopar.runtime.log import Entry, Log, log_of
from autopar.runtime.loss import StepRecord
from autopar.runtime.messages.staging import connect
from autopar.runtime.messages.transport import sendable
from autopar.runtime.metrics import Metrics, MetricsSum
from autopar.runtime.stage.parameters import first_stages
from autopar.runtime.stage.transforms import layers_of
from autopar.runtime.start.agreement import Agreement, digest_of
from autopar.runtime.start.evaluate import Evaluation
from autopar.runtime.start.events import Event, Listeners
from autopar.runtime.start.following import Capturing, Follower
from autopar.runtime.update import check_together, whole_settings
from autopar.schedules.expand import expand

_NO_GRADIENTS = (
    "gradients are off (torch.no_grad(), inference_mode() or set_grad_enabled(False)), and a step trains; call step() "
    "outside of it, or under torch.enable_grad(); evaluate() trains nothing"
)
_CAPTURES: Mapping[str, Callable[..., EvaluationGraph]] = {
    "evaluate": capture_evaluation,
    "predict": capture_prediction,
    "outputs": partial(capture_prediction, training=True),
}
"""By what batches are run forward for."""
_Method = TypeVar("_Method", bound=Callable[..., Any])


class _GivenJob(Job):
    """A job that is given its batches."""

    loads_data = False


@dataclass(frozen=True, eq=False)
class _BuiltJob:
    """What a job has once it knows what a batch looks like."""

    user: UserModel
    graph: LayerGraph
    job: Job
    agreement: Agreement
    batch: object
    """An example."""
    follower: Follower
    """Of what the script changes."""
    at_start: Mapping[str, int]
    """What it had before its first step that is not finite."""


def _spread(
    model: nn.Module, context: RankContext, state_names: set[str]
) -> Callable[[Iterable[str]], Mapping[str, torch.Tensor]]:
    """Give every rank rank 0's values of what it wants, tensor by tensor; other ranks' models may have none."""
    kept: dict[str, torch.Tensor] = {}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if context.rank == 0:
            tensor = sendable(value.detach().cpu()).clone()
        else:
            tensor = torch.empty(value.shape, dtype=value.dtype)
        if tensor.numel():
            context.broadcast(tensor.reshape(-1).view(torch.uint8))
        if name in state_names:
            kept[name] = tensor
    return lambda names: {name: kept[name] for name in names if name in kept}


def _apart(act: _Method) -> _Method:
    """Have a method of a job leave alone what its script draws from, and compute as if gradients had never been off.

    Behind it, the script's functions are told what has happened.
    """

    @wraps(act)
    def perform(job: ScriptJob, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        with preserve_generators(job._context.device), torch.inference_mode(False), torch.enable_grad():
            found = act(job, *arguments, **options)
        job._listeners.deliver()
        return found

    return cast(_Method, perform)


class ScriptJob:
    """One rank of a plan, stepped by a script; every rank calls the same methods in the same order.

    Of a batch, every rank is given the same whole and takes its own samples; ranks whose stages read nothing of it may
    be given None. What is wrong with a batch is raised on all ranks, before anything was sent.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        context: RankContext,
        leave: Callable[[], None],
        functions: Mapping[str, Callable[..., object] | None],
        settings: TrainSettings,
        notes: Sequence[str] = (),
        *,
        accept_loss: bool = False,
    ) -> None:
        """Begin with what :func:`autopar.runtime.start.materialize.materialize` has checked.

        Args:
            model: the script's.
            plan: what is carried out.
            context: the ranks.
            leave: leaves them.
            functions: ``loss``, ``optimizer``, ``scheduler`` and ``layers``.
            settings: what is asked of training.
            notes: what a reader should know of where its ranks are.
            accept_loss: whether a loss is taken that depends on how a mini-batch is divided.
        """
        self._model, self.plan, self._context, self._leave = model, plan, context, leave
        self._functions, self._settings, self._accept_loss = functions, settings, accept_loss
        self._built_job: _BuiltJob | None = None
        self._evaluations: dict[str, tuple[Evaluation, Readings]] = {}
        """With what was read when they were captured."""
        self._first, self._has_failed, self._closed = 0, False, False
        self._feed: Feed | None = None
        self._ended: deque[Metrics] = deque()
        """Mini-batches that have ended, and that no step has returned."""
        self._listeners = Listeners()
        self._logs: list[Log] = []
        self._checkpoints: ScriptCheckpoints | None = None
        self._placement_notes, self._loading_notes = notes, list[str]()

    @property
    def notes(self) -> list[str]:
        """What a reader should know of devices, of the checkpoint that was loaded, and of what is captured again."""
        return [
            *self._placement_notes,
            *self._loading_notes,
            *(self._built_job.follower.notes if self._built_job else ()),
        ]

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self._context.rank

    def step(self, batch: object, *, outputs: bool = False) -> Metrics | None:
        """Train one mini-batch, of as many samples as the plan says; return what it gave.

        Of a plan that is never flushed, that is what the mini-batch gave that has ended, some before this one; None as
        long as none has. :meth:`drain` ends those that are under way.

        Args:
            batch: the mini-batch.
            outputs: whether to return what the model gave, too, with the dropout of this step: rank 0's metrics have it
                as :meth:`predict` does. It takes the step's forwards once more.

        Raises:
            UsageError: the batch is not as planned, or gradients are off, or ``outputs`` are asked for of a model or a
                plan that cannot give them; on all ranks.
            TrainingError: an action failed, or a tensor of the batch has another shape than before.
        """
        return self._train(batch, outputs=outputs, with_gradients=torch.is_grad_enabled())

    @_apart
    def _train(self, batch: object, *, outputs: bool, with_gradients: bool) -> Metrics | None:
        built = self._ready(batch)
        given = self._training_outputs(batch) if outputs else None
        specs = [built.graph.tensor(name) for name in built.job.inputs]
        refusal = self._refusal_of_modes(with_gradients=with_gradients)
        values, _ = self._agree_on_batch(built, batch, "step", specs, refusal)
        built.follower.forget_given()
        written = built.graph.written_inputs
        inputs = split_rows(self.plan, self.rank, values, built.job.inputs, self._context.device, written)
        if self._feed is None:
            self._feed = Feed(built.job, self._first)
        with self._failing():
            self._end(built, self._feed.step(inputs), given)
        return self._ended.popleft() if self._ended else None

    def _training_outputs(self, batch: object) -> dict[str, torch.Tensor] | None:
        self.plan.policy.check("outputs")
        built = self._require_built_job()
        for layer in built.follower.graph.layers:
            if layer.writes is not None and layer.writes.once:
                raise UsageError(f"`outputs=True` runs layer {layer.name} twice, and {layer.writes.once}; leave it out")
        _, evaluation, values, rows = self._prepare_evaluation(batch, "outputs")
        with self._failing():
            return evaluation.training_outputs(self._step, rows, values)

    def _refusal_of_modes(self, *, with_gradients: bool) -> UsageError | None:
        """Return what is wrong with the modes that a step is called in."""
        if not with_gradients:
            return UsageError(_NO_GRADIENTS)
        if self.plan.precision in ("fp32", "fp64") and torch.is_autocast_enabled(self._context.device.type):
            return UsageError(
                f"autocast is on around step(), and the plan computes in {self.plan.precision}; step outside of it, "
                "with a plan of a profile with `precision='bf16'`"
            )
        return None

    @_apart
    def drain(self) -> list[Metrics]:
        """End the mini-batches that are under way, and return what they gave; the next one fills the pipeline again.

        Evaluating, saving and closing end them, too; :meth:`step` then returns what they gave, one by one. With a flush
        after every step, there are never any.
        """
        self._drain()
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def _drain(self) -> None:
        if self._feed is not None and self._feed.under_way and not self._has_failed:
            built = self._require_built_job()
            with self._failing():
                self._end(built, self._feed.drain())

    def _end(
        self, built: _BuiltJob, records: Sequence[StepRecord], outputs: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Take note of mini-batches that have ended."""
        sums = [MetricsSum(built.job, each) for each in records]
        for metrics in (replace(each.metrics(), outputs=outputs) for each in sums):
            self._ended.append(metrics)
            self._listeners.queue("step", metrics)

    @property
    def _step(self) -> int:
        """How many mini-batches there have been."""
        return self._first if self._feed is None else self._feed.batches

    @_apart
    def evaluate(self, batch: object) -> float:
        """Return the loss of a batch of any size in evaluation mode, on every rank.

        A ``torch.utils.data.DataLoader`` stands for all of its batches: the loss is the mean over their samples, or
        over what the loss counts.

        Raises:
            CaptureError: the model cannot be cut in evaluation mode as it is in training.
            UsageError: the loader has no batch.
            AutoparError: as :meth:`step`.
        """
        parts = []
        for each in batch if isinstance(batch, DataLoader) else [batch]:
            built, evaluation, values, rows = self._prepare_evaluation(each, "evaluate")
            with self._failing():
                parts.append(evaluation.loss(self._step, rows, values))
        if not parts:
            raise UsageError("the loader has no batch to evaluate")
        with self._failing():
            loss = evaluation.mean(parts, built.agreement.sum)
        self._listeners.queue("evaluation", self._step, loss)
        return loss

    @_apart
    def predict(self, batch: object) -> dict[str, torch.Tensor] | None:
        """Return the model's outputs for a batch of any size in evaluation mode, on rank 0; None on other ranks.

        They are named as ``forward`` returns them: by key, attribute or place; a lone tensor is ``output``.

        Raises:
            CaptureError: as :meth:`evaluate`.
            AutoparError: as :meth:`step`.
        """
        _, evaluation, values, rows = self._prepare_evaluation(batch, "predict")
        with self._failing():
            return evaluation.predict(self._step, rows, values)

    @_apart
    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return the model's state on rank 0, on the CPU, brought there stage by stage; None on other ranks.

        ``model.load_state_dict`` takes it. Its weights are trained ones, or averages, as the plan says.
        """
        self._drain()
        built = self._require_built_job()
        first = first_stages(self.plan, built.graph)
        known = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        found: dict[str, torch.Tensor] = {}
        with built.job.used_weights():
            for name, stage in sorted(first.items(), key=lambda each: each[1]):
                sender = self.plan.ownership.replicas[stage][0][0]
                mine = built.job.whole(name) if stage in built.job.stages else None
                value = self._collect_tensor(built, mine, known[name], sender)
                if value is not None:
                    found[name] = value
        names = {id(value): name for name, value in known.items()}
        state = {
            key: found.get(names[id(value)], value.detach().cpu())
            for key, value in self._model.state_dict(keep_vars=True).items()
            if self.rank == 0
        }
        built.follower.give(state)
        return state if self.rank == 0 else None

    @_apart
    def save(self, folder: str | Path, *, wait: bool = False) -> None:
        """Save a checkpoint, ``step-N`` in a folder that all hosts see; training goes on while it is written.

        What is saved is there when the next one is begun, or the job is closed; with ``wait``, when this returns. The
        newest two are kept.

        Raises:
            UsageError: the folder has checkpoints that this job was not loaded from.
            FileError: it cannot be written.
        """
        self._drain()
        self._require_built_job()
        with self._failing():
            self._opened_checkpoints().save(Path(folder), self._step, wait=wait)
        self._queue_checkpoints()

    def load(self, folder: str | Path, *, accept_changes: bool = False) -> int:
        """Go on from the newest sound checkpoint of a folder, which any plan may have saved; return its step.

        0 where there is none. What the script's own data loader has given out by then is the script's to skip.

        Args:
            folder: what :meth:`save` was given.
            accept_changes: whether to go on though batch, model or optimizer have changed, with all that still fits.

        Raises:
            FileError: there are checkpoints, and none is sound.
            UsageError: what is trained has changed; or this job has trained steps already.
        """
        self._require_built_job()
        if self._step:
            raise UsageError(f"the job has trained {self._step} steps already; load before the first one")
        self._first, self._loading_notes = self._opened_checkpoints().load(Path(folder), accept_changes=accept_changes)
        return self._first

    def _opened_checkpoints(self) -> ScriptCheckpoints:
        built = self._require_built_job()
        if self._checkpoints is None:
            self._checkpoints = ScriptCheckpoints(self._context, built.job, built.graph, self._model, built.at_start)
        return self._checkpoints

    @_apart
    def save_weights(self, folder: str | Path) -> None:
        """Write the model's parameters and buffers, a safetensors file a stage and an index; all hosts must see it.

        Its weights are trained ones, or averages, as the plan says.
        """
        self._drain()
        built, path = self._require_built_job(), Path(folder)
        name = built.agreement.texts(new_set())[0]
        built.agreement.perform(lambda: make_folder(path))
        others = partial(unread, self._model, self.plan, built.graph)

        def write() -> list[weights.StoredFile]:
            return write_stages(built.job, built.graph, others, path, name)

        with set_of(path, name):
            files = built.agreement.perform(write)
            written = [file for said in built.agreement.texts(json.dumps(files)) for file in json.loads(said)]
            built.agreement.perform(lambda: weights.publish(path, written) if self.rank == 0 else None)

    def _queue_checkpoints(self) -> None:
        for result in () if self._checkpoints is None else self._checkpoints.ended():
            self._listeners.queue("checkpoint", result.step, result.failure)

    def on(self, event: Event, call: Callable[..., object]) -> None:
        """Have a function called on this rank whenever something has happened; also several, in the order given.

        Args:
            event: ``"step"``: a mini-batch has ended; ``"evaluation"``: so has an evaluation; ``"checkpoint"``: one is
                there, or could not be written, which is known when the next one is begun or the job is closed.
            call: called with the :class:`Metrics` of the mini-batch; with the number of steps trained and the loss; or
                with the number of steps trained and why there is no checkpoint of them, None if there is.

        Raises:
            UsageError: there is no such event.
        """
        self._listeners.add(event, call)

    def log_with(self, how: Literal["tensorboard"] | Callable[[Entry], object], folder: str | Path = "logs") -> None:
        """Log every step, evaluation and checkpoint from now on; every rank calls it, and rank 0 logs.

        Args:
            how: ``"tensorboard"``: events in a folder, and lines of JSON in its ``steps.jsonl``; or a function, called
                with a dict such as a line of these. Of a GPU, entries come one step late.
            folder: where files go.

        Raises:
            UsageError: TensorBoard is not installed; on all ranks.
            FileError: the folder cannot be written; on all ranks.
        """
        logs = list[Log]()
        self._context.result_of_rank_0(lambda: logs.append(log_of(how, Path(folder), self._context.device)))
        for log in logs:
            self._logs.append(log)
            self.on("step", log.step)
            self.on("evaluation", log.evaluation)
            self.on("checkpoint", log.checkpoint)

    def close(self) -> None:
        """Wait until everything that was sent has arrived, and leave the other ranks."""
        self._finish()
        self._close()

    @_apart
    def _finish(self) -> None:
        self._drain()
        if self._built_job is not None:
            self._built_job.job.finish()
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._queue_checkpoints()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            # Others may be gone: nothing is waited for.
            self._close(failed=True)

    def _close(self, *, failed: bool = False) -> None:
        if self._checkpoints is not None:
            self._checkpoints.abandon()
        self._built_job, self._feed, self._checkpoints, self._closed = None, None, None, True
        self._evaluations.clear()
        self._leave()
        while self._logs:
            self._logs.pop().close(failed=failed)

    @_apart
    def prepare(self, batch: object) -> None:
        """Build the rank's stages, given an example of a mini-batch on every rank; what one rank refuses, all refuse.

        Raises:
            AutoparError: a rank was given no batch, or the model cannot be captured, or is not the one planned for.
        """
        model, plan, context = self._model, self.plan, self._context
        transport = connect(context, plan, self._settings)
        agreement = Agreement(context, transport)
        # Other ranks' models may have no values.
        checks_loss = plan.divides and plan.loss_difference is None and not self._accept_loss and context.rank == 0
        capturing = Capturing(model, plan, batch, self._functions, checks_loss=checks_loss)
        user, graph, readings = agreement.perform(capturing.first)

        def settings_of_all() -> Settings | None:
            check_together(user, model, graph, plan)
            return whole_settings(user, model, graph, plan)

        layers = [layer for stage in plan.ownership.ranks[self.rank].stages for layer in layers_of(plan, stage, graph)]
        names = {name for layer in layers for name in (*layer.parameters.values(), *layer.buffers.values())}
        place = (self.rank, graph, user, _spread(model, context, names), transport, context.device)
        whole = context.result_of_rank_0(settings_of_all)

        def build() -> Job:
            job = _GivenJob(plan, expand(plan), *place, lambda step, position: None, self._settings, whole)
            job.try_optimizer()
            return job

        job = agreement.perform(build)
        follower = Follower(model, job, agreement, (readings, graph), capturing)
        self._built_job = _BuiltJob(user, graph, job, agreement, batch, follower, non_finite_at_start(job))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Note that an action failed: what other ranks have done by then is not known."""
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise

    def _ready(self, batch: object) -> _BuiltJob:
        if self._built_job is None and not self._closed:
            self.prepare(batch)
        return self._require_built_job()

    def _require_built_job(self) -> _BuiltJob:
        if self._closed:
            raise UsageError("the job has been closed; start another with materialize()")
        if self._built_job is None:
            raise UsageError("the job has seen no batch yet; give materialize() one, or train a step")
        if self._has_failed:
            raise TrainingError("the job has failed, and cannot go on")
        return self._built_job

    def _prepare_evaluation(
        self, batch: object, what: str
    ) -> tuple[_BuiltJob, Evaluation, dict[str, torch.Tensor], int]:
        built = self._ready(batch)
        self._drain()
        # Asked before anything is captured, which writes and puts back.
        refusal, changed = built.follower.refusal(), built.follower.has_changed()
        self._follow(built, changed=built.agreement.any(changed))
        known = self._evaluations.get(what)
        if built.agreement.any(known is None or known[1].have_changed()):
            self._evaluations[what] = known = built.agreement.perform(partial(self._evaluation, built, what))
            built.follower.refresh()
        assert known is not None
        evaluation, _ = known
        specs = {tensor.name: tensor for tensor in evaluation.graph.tensors}
        own = [specs[name] for name in evaluation.inputs]
        values, rows = self._agree_on_batch(built, batch, what, own, refusal)
        return built, evaluation, values, rows

    def _evaluation(self, built_job: _BuiltJob, what: str) -> tuple[Evaluation, Readings]:
        """Return the stages in evaluation mode, and what was read when they were captured."""
        captured, training = _CAPTURES[what], what == "outputs"
        graph = captured(self._model, built_job.batch, built_job.user.loss, built_job.follower.graph)
        roots = roots_of(self._model, built_job.user.loss)
        readings = Readings(roots, graph.names_read, self.plan.ignored_state, modes=training)
        weights = nullcontext if training else built_job.job.used_weights
        place = (built_job.job.transport, self._context.device, weights)
        return Evaluation(built_job.job, graph, *place), readings

    def _agree_on_batch(
        self,
        built_job: _BuiltJob,
        batch: object,
        what: str,
        specs: list[TensorSpec],
        refusal: AutoparError | None = None,
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Return the tensors of a batch and its number of samples, all ranks having found it sound, and the same.

        ``refusal`` is what this rank finds wrong beside the batch.
        """
        values: dict[str, torch.Tensor] = {}
        rows, digest, error = None, 0.0, refusal or built_job.follower.refusal()
        changed = what == "step" and built_job.follower.has_changed()
        try:
            if batch is not None:
                values = named_tensors(batch)
                rows = row_count(values)
                digest = digest_of(values) if self._context.size > 1 else 0.0
            check_given(self.rank, values, rows, specs, self.plan.batch if what in ("step", "outputs") else None)
        except AutoparError as caught:
            error = error or caught
        rows, changed = built_job.agreement.rows(rows, digest, error, changed=changed)
        self._follow(built_job, changed=changed)
        return values, rows

    def _follow(self, built_job: _BuiltJob, *, changed: bool) -> None:
        """Follow what the script has changed on some rank; mini-batches that are under way end as they began."""
        if changed:
            self._drain()
            if built_job.follower.follow():
                self._evaluations.clear()

    def _collect_tensor(
        self, built_job: _BuiltJob, mine: torch.Tensor | None, like: torch.Tensor, sender: int
    ) -> torch.Tensor | None:
        """Bring one tensor from the rank that holds it to rank 0."""
        if sender == self.rank and mine is not None:
            if self.rank == 0:
                return mine.detach().cpu().clone()
            built_job.job.transport.send(sendable(mine.detach()), 0).wait()
        elif self.rank == 0:
            buffer = torch.empty(like.shape, dtype=like.dtype, device=self._context.device)
            built_job.job.transport.receive(buffer, sender).wait()
            return buffer.cpu()
        return None
