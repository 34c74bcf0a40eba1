"""The plain loop: one process trains the whole model, the truth that every run is compared with.

    from autopar.capture.plain.loop import float64_model, train_plainly
    from autopar.capture.model.source import load
    from autopar.formats.plan import Plan

    trained = train_plainly(float64_model(load("model.py")), Plan.load(Path("plan.json")), steps=3)
    trained.losses, trained.gradients, trained.parameters, trained.buffers

Nothing is captured, cut or sent here: the model's own forward runs, on the micro-batches and shares of the plan, with
the seeds of ``docs/howto/verify.md``, and an optimizer of the user steps all parameters. Of autopar it imports how a
model file and its batches are read, the plan's format, and how stages divide micro-batches
(:mod:`autopar.capture.plain.division`). Of a plan that is never flushed, every micro-batch sees the weights that its
policy's rule says (:mod:`autopar.capture.plain.histories`). In float64, parameters, buffers and inputs are cast, so
that rounding hides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from autopar.capture.model.batch import named_tensors, rebuild
from autopar.capture.model.source import UserModel
from autopar.capture.plain.division import divide
from autopar.capture.plain.histories import WeightHistories, check_comparable
from autopar.capture.plain.mini_batch import (
    DividedForward,
    LossAccumulator,
    MiniBatches,
    PlainRun,
    build_model,
    seed_all,
    stage_optimizers,
)
from autopar.capture.plain.waves import train_in_waves
from autopar.formats.plan import Plan
from autopar.formats.pulls import Taken

_DOUBLE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


def in_double(dtype: torch.dtype) -> torch.dtype:
    """Return the type of so many bits as float64 has; integers and truth values stay what they are.

    >>> in_double(torch.bfloat16), in_double(torch.complex64), in_double(torch.int32)
    (torch.float64, torch.complex128, torch.int32)
    """
    return _DOUBLE.get(dtype, dtype)


def float64_model(user: UserModel) -> UserModel:
    """Return the same model file, whose ``model()`` and ``collate()`` have what they make as ever cast to float64."""

    def model() -> object:
        made = user.factory()
        return made._apply(_cast) if isinstance(made, nn.Module) else made  # type: ignore[no-untyped-call]

    def collate(samples: Sequence[object]) -> object:
        batch = user.collate(samples)
        return rebuild(batch, {name: _cast(tensor) for name, tensor in named_tensors(batch).items()})

    return replace(user, factory=model, functions={**user.functions, "collate": collate})


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(in_double(tensor.dtype))


def train_plainly(
    user: UserModel,
    plan: Plan,
    steps: int,
    *,
    clip_norm: float | None = None,
    clips_stages: bool = False,
    stage_of: Mapping[str, int] | None = None,
    others: Sequence[Mapping[str, int]] = (),
    on_step: Callable[[int, float], object] | None = None,
    taken: Sequence[Sequence[Taken]] | None = None,
) -> PlainRun:
    """Train some steps in this process, on the CPU, in the types that the model has; never under autocast.

    Args:
        user: the model file.
        plan: its stages, shares, micro-batches, seed and weight policy count, its schedule and devices do not.
        steps: how many mini-batches are trained.
        clip_norm: largest norm of gradients.
        clips_stages: whether that is of each stage's gradients, and not of all together.
        stage_of: the stage of every parameter that a layer reads; asked where stages are clipped, never flushed, or
            have optimizers that are told of them.
        others: of several pipelines, the same of all but the first; their stages count from 0 in each.
        on_step: called with (step, loss) as steps end; what it raises ends the training.
        taken: what the pulls of several pipelines' eager run took, by rank.

    Raises:
        UsageError: stages divide micro-batches differently, and the model cannot be divided so; names the layer. Or no
            single process can follow the rule of the weight policy.
        ModelError: the user's code raises, or batch, output and loss do not fit together.
        FileError: the dataset has fewer samples than a mini-batch.
        TrainingError: nothing was counted in a whole mini-batch.
    """
    if plan.pipelines:
        return train_in_waves(user, plan, steps, clip_norm, [stage_of or {}, *others], on_step, taken)
    training = _PlainTraining(user, plan, clip_norm, clips_stages, stage_of or {})
    for step in range(steps):
        loss = training.step(step, last=step == steps - 1)
        if on_step is not None:
            on_step(step, loss)
    return training.result()


class _PlainTraining:
    """A model and its optimizer, and what their steps gave."""

    def __init__(
        self,
        user: UserModel,
        plan: Plan,
        clip_norm: float | None,
        clips_stages: bool,
        stage_of: Mapping[str, int],
    ) -> None:
        self._plan, self._clip_norm, self._stage_of = plan, clip_norm, stage_of
        self._samples = MiniBatches(user, plan)
        division = divide(lambda: build_model(user, plan), plan, user, next(self._samples.load(0)))
        self._model = build_model(user, plan)
        self._histories: WeightHistories | None = None
        if plan.policy.keeps_versions:
            check_comparable(plan)
            self._optimizers = stage_optimizers(self._model, user, plan, stage_of)
            named = dict(self._model.named_parameters())
            self._histories = WeightHistories(named, stage_of, self._optimizers, plan)
        elif stage_of and user.optimizer_options:
            self._optimizers = stage_optimizers(self._model, user, plan, stage_of)
        else:
            trained = [each for each in self._model.named_parameters() if each[1].requires_grad]
            self._optimizers = {0: user.make_optimizer(trained)}
        self._schedulers = {stage: user.make_scheduler(each) for stage, each in self._optimizers.items()}
        self._clips_stages = clips_stages
        self._forward = DividedForward(self._model, plan, user, division)
        self._losses: list[float] = []
        self._gradients: dict[str, torch.Tensor | None] = {}

    def step(self, step: int, *, last: bool) -> float:
        for stage, optimizer in self._optimizers.items():
            if step % self._period(stage) == 0:
                optimizer.zero_grad()
        accumulator = LossAccumulator(self._plan, self._model)
        for micro_batch, batch in enumerate(self._samples.load(step)):
            parts = self._forward.run(step, micro_batch, batch)
            if self._histories is not None:
                parts = self._histories.under_versions(step, micro_batch, parts)
            accumulator.add(parts)
        self._losses.append(accumulator.finish())
        # Of stages whose replicas take turns, as many mini-batches as have been since the update before.
        ended = {stage: step % self._period(stage) + 1 for stage in self._optimizers}
        ended = {stage: count for stage, count in ended.items() if last or count == self._period(stage)}
        self._average(ended)
        self._clip(ended)
        self._keep_first(ended)
        seed_all(self._plan.seed, "optimizer", step)
        if self._histories is None:
            for each in self._optimizers.values():
                each.step()
        else:
            self._histories.step(step, ended)
        self._forward.end_step()
        for stage, count in ended.items():
            for _ in range(count):
                self._step_scheduler(self._schedulers[stage])
        if self._histories is not None:
            self._histories.add(step)
        return self._losses[-1]

    def _period(self, stage: int) -> int:
        """Return how many mini-batches an update is of."""
        return 1 if self._histories is None else self._plan.stages[stage].period

    def _parameters_of(self, stage: int) -> list[tuple[str, nn.Parameter]]:
        return [each for each in self._model.named_parameters() if self._stage_of.get(each[0]) == stage]

    def _average(self, updates: Mapping[int, int]) -> None:
        """Make means of gradients that are of several mini-batches."""
        for stage, count in updates.items():
            for _, parameter in self._parameters_of(stage) if count > 1 else ():
                if parameter.grad is not None:
                    parameter.grad /= count

    def _clip(self, stages: Collection[int]) -> None:
        if self._clip_norm is None:
            return
        if not self._clips_stages:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
            return
        for stage in range(len(self._plan.stages)) if self._histories is None else stages:
            nn.utils.clip_grad_norm_([each for _, each in self._parameters_of(stage)], self._clip_norm)

    def _keep_first(self, stages: Collection[int]) -> None:
        """Keep the gradients of every parameter's first update."""
        for name, parameter in self._model.named_parameters():
            if name not in self._gradients and (self._histories is None or self._stage_of.get(name) in stages):
                self._gradients[name] = None if parameter.grad is None else parameter.grad.detach().clone()

    def _step_scheduler(self, scheduler: object) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(self._losses[-1])
        elif isinstance(scheduler, LRScheduler):
            scheduler.step()

    def result(self) -> PlainRun:
        self._forward.close()
        for name, _ in self._model.named_parameters():
            self._gradients.setdefault(name, None)
        parameters = {name: value.detach().clone() for name, value in self._model.named_parameters()}
        buffers = {name: value.clone() for name, value in self._model.named_buffers()}
        return PlainRun(self._losses, self._gradients, parameters, buffers)
