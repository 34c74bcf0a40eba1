"""ScriptJob: training, evaluating and predicting, batch by batch, as a user's own script asks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

from autopar.capture.batch import named_tensors, row_count
from autopar.capture.evaluation import capture_evaluation, capture_prediction
from autopar.capture.graph import TensorSpec
from autopar.errors import AutoparError, TrainingError, UsageError
from autopar.formats.plan import Plan
from autopar.ranks.context import RankContext
from autopar.runtime import weights
from autopar.runtime.agree import digest_of
from autopar.runtime.data import check_inputs, split_rows
from autopar.runtime.evaluate import Evaluation
from autopar.runtime.given import Built, build_given
from autopar.runtime.saving import holders, make_folder, new_set, set_of, write_stages
from autopar.runtime.settings import TrainSettings
from autopar.runtime.transport import sendable
from autopar.schedules.expand import rank_of

__all__ = ["Metrics", "ScriptJob"]


@dataclass(frozen=True)
class Metrics:
    """What one step gave, on every rank alike."""

    step: int
    """Counts from 0."""
    loss: float
    """Of the whole mini-batch."""
    gradient_norm: float | None
    """Of all gradients of the model before clipping, where it was asked for."""
    overflowed: bool
    """Whether scaled gradients were not finite: nothing was updated."""


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
        *,
        accept_loss: bool = False,
    ) -> None:
        """Begin with what :func:`autopar.runtime.materialize.materialize` has checked.

        Args:
            model: the script's.
            plan: what is carried out.
            context: the ranks.
            leave: leaves them.
            functions: ``loss``, ``optimizer``, ``scheduler`` and ``layers``.
            settings: what is asked of training.
            accept_loss: whether a loss is taken that depends on how a mini-batch is divided.
        """
        self._model, self.plan, self._context, self._leave = model, plan, context, leave
        self._functions, self._settings, self._accept_loss = functions, settings, accept_loss
        self._built: Built | None = None
        self._evaluations: dict[str, Evaluation] = {}
        self._compared: set[str] = set()
        self._step, self._failed = 0, False

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self._context.rank

    def step(self, batch: object) -> Metrics:
        """Train one mini-batch, of as many samples as the plan says.

        Raises:
            UsageError: the batch is not as planned; on all ranks.
            TrainingError: an action failed, or a tensor of the batch has another shape than before.
        """
        built = self._ready(batch)
        specs = [built.graph.tensor(name) for name in built.job.inputs]
        values, _ = self._agreed(built, batch, "step", specs)
        inputs = split_rows(self.plan, self.rank, values, built.job.inputs, self._context.device)
        with self._failing():
            record = built.job.train(self._step, inputs)
            loss = record.total_loss
            if loss is None:
                total, count = built.agreement.sum([record.loss, record.count])
                loss = total / count if count else total
        self._step += 1
        return Metrics(self._step - 1, loss, record.gradient_norm, record.overflowed)

    def evaluate(self, batch: object) -> float:
        """Return the loss of a batch of any size in evaluation mode, on every rank.

        Raises:
            CaptureError: the model cannot be cut in evaluation mode as it is in training.
            AutoparError: as :meth:`step`.
        """
        built, evaluation, values, rows = self._prepared(batch, "evaluate")
        with self._failing():
            total, count = built.agreement.sum(evaluation.loss(self._step, rows, values))
        if not count:
            raise TrainingError("loss() returned a count of 0 for the whole batch")
        return total / count

    def predict(self, batch: object) -> dict[str, torch.Tensor] | None:
        """Return the model's outputs for a batch of any size in evaluation mode, on rank 0; None on other ranks.

        They are named as ``forward`` returns them: by key, attribute or place; a lone tensor is ``output``.

        Raises:
            CaptureError: as :meth:`evaluate`.
            AutoparError: as :meth:`step`.
        """
        _, evaluation, values, rows = self._prepared(batch, "predict")
        with self._failing():
            return evaluation.predict(self._step, rows, values)

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return the model's state on rank 0, on the CPU, brought there stage by stage; None on other ranks.

        ``model.load_state_dict`` takes it.
        """
        built = self._known()
        first = holders(self.plan, built.graph)
        known = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        found: dict[str, torch.Tensor] = {}
        for stage in range(len(self.plan.stages)):
            sender = rank_of(self.plan, stage, 0)
            for name in (name for name, holder in first.items() if holder == stage):
                mine = built.job.whole(name) if stage in built.job.stages else None
                value = self._brought(built, mine, known[name], sender)
                if value is not None:
                    found[name] = value
        if self.rank != 0:
            return None
        names = {id(value): name for name, value in known.items()}
        return {
            key: found.get(names[id(value)], value.detach().cpu())
            for key, value in self._model.state_dict(keep_vars=True).items()
        }

    def save(self, folder: str | Path) -> None:
        """Write the model's parameters and buffers, a safetensors file a stage and an index; all hosts must see it."""
        built, path = self._known(), Path(folder)
        known = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

        def unread(read: Iterable[str]) -> dict[str, torch.Tensor]:
            return {name: value for name, value in known.items() if name not in set(read)}

        name = built.agreement.texts(new_set())[0]
        with set_of(path, name):
            files, error = list[weights.StoredFile](), None
            try:
                make_folder(path)
                files = write_stages(built.job, built.graph, unread, path, name)
            except AutoparError as caught:
                error = caught
            built.agreement.refuse(error)
            written = [file for said in built.agreement.texts(json.dumps(files)) for file in json.loads(said)]
            try:
                if self.rank == 0:
                    weights.publish(path, written)
            except AutoparError as caught:
                error = caught
            built.agreement.refuse(error)

    def close(self) -> None:
        """Wait until everything that was sent has arrived, and leave the other ranks."""
        if self._built is not None:
            self._built.job.finish()
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            # Others may be gone: nothing is waited for.
            self._leave()

    def prepare(self, batch: object) -> None:
        """Build the rank's stages, given an example of a mini-batch on every rank."""
        given = (self._model, self.plan, self._context, batch, self._functions, self._settings)
        self._built = build_given(*given, accept_loss=self._accept_loss)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Note that an action failed: what other ranks have done by then is not known."""
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def _ready(self, batch: object) -> Built:
        if self._built is None:
            self.prepare(batch)
        return self._known()

    def _known(self) -> Built:
        if self._built is None:
            raise UsageError("the job has seen no batch yet; give materialize() one, or train a step")
        if self._failed:
            raise TrainingError("the job has failed, and cannot go on")
        return self._built

    def _prepared(self, batch: object, what: str) -> tuple[Built, Evaluation, dict[str, torch.Tensor], int]:
        built = self._ready(batch)
        if what not in self._evaluations:
            captured = capture_evaluation if what == "evaluate" else capture_prediction
            error, evaluation = None, None
            try:
                graph = captured(self._model, built.batch, built.user.loss, built.graph)
                evaluation = Evaluation(built.job, graph, built.transport, self._context.device)
            except AutoparError as caught:
                error = caught
            built.agreement.refuse(error)
            assert evaluation is not None
            self._evaluations[what] = evaluation
        evaluation = self._evaluations[what]
        known = {tensor.name: tensor for tensor in evaluation.graph.tensors}
        values, rows = self._agreed(built, batch, what, [known[name] for name in evaluation.inputs])
        return built, evaluation, values, rows

    def _agreed(
        self, built: Built, batch: object, what: str, specs: list[TensorSpec]
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Return the tensors of a batch and its number of samples, all ranks having found it sound.

        The first batch of every kind is compared among ranks by content.
        """
        values: dict[str, torch.Tensor] = {}
        rows, digest, error = None, 0.0, None
        try:
            if batch is not None:
                values = named_tensors(batch)
                rows = row_count(values)
                digest = digest_of(values) if what not in self._compared else 0.0
            _check_given(self.rank, values, rows, specs, self.plan.batch if what == "step" else None)
        except AutoparError as caught:
            error = caught
        rows = built.agreement.rows(rows, digest, error)
        self._compared.add(what)
        return values, rows

    def _brought(self, built: Built, mine: torch.Tensor | None, like: torch.Tensor, sender: int) -> torch.Tensor | None:
        """Bring one tensor from the rank that holds it to rank 0."""
        if sender == self.rank and mine is not None:
            if self.rank == 0:
                return mine.detach().cpu().clone()
            built.transport.send(sendable(mine.detach()), 0).wait()
        elif self.rank == 0:
            buffer = torch.empty(like.shape, dtype=like.dtype, device=self._context.device)
            built.transport.receive(buffer, sender).wait()
            return buffer.cpu()
        return None


def _check_given(
    rank: int, values: Mapping[str, torch.Tensor], rows: int | None, specs: list[TensorSpec], expected: int | None
) -> None:
    if rows is None:
        if specs:
            raise UsageError(f"was given no batch, and its stages read {', '.join(spec.name for spec in specs)}")
        return
    if expected is not None and rows != expected:
        raise UsageError(
            f"a batch of {rows} samples, the plan is for {expected}; drop or fill up what is incomplete "
            "(DataLoader(drop_last=True)), or plan for another batch"
        )
    if rows == 0:
        raise UsageError("a batch without samples")
    check_inputs(values, specs)
