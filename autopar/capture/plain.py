"""The plain loop: one process trains the whole model, the truth that every run is held to.

    from autopar.capture.plain import train_plainly
    from autopar.capture.source import load
    from autopar.formats.plan import Plan

    trained = train_plainly(load("model.py"), Plan.load(Path("plan.json")), steps=3, double=True)
    trained.losses, trained.gradients, trained.parameters, trained.buffers

Nothing is captured, cut or sent here: the model's own forward runs, on the micro-batches and shares of the plan, with
the seeds of ``docs/seeds.md``, and an optimizer of the user steps all parameters. Of autopar it imports how a model
file and its batches are read, and the plan's format. How stages divide micro-batches is the work of
:mod:`autopar.capture.divided`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from autopar.capture.divided import DividedForward, Moment, Part
from autopar.capture.division import Batch, divide
from autopar.capture.doubled import doubled
from autopar.capture.source import UserModel
from autopar.errors import FileError, ModelError, TrainingError
from autopar.formats.plan import Plan


@dataclass(frozen=True)
class PlainRun:
    """What some steps of plain training give, by the model's own names."""

    losses: list[float]
    """Of every step: the mean over the mini-batch."""
    gradients: dict[str, torch.Tensor | None]
    """Of the first step, as the optimizer was given them; None where a parameter had none."""
    parameters: dict[str, torch.Tensor]
    """After the last step, those that are not trained included."""
    buffers: dict[str, torch.Tensor]
    """After the last step; those of replicas are the first one's."""


def train_plainly(
    user: UserModel, plan: Plan, steps: int, *, double: bool = False, clip_norm: float | None = None
) -> PlainRun:
    """Train some steps in this process, on the CPU, in the types that the model has; never under autocast.

    Args:
        user: the model file; what its ``model()`` returns is trained.
        plan: its stages, shares, micro-batches and seed count, its schedule and devices do not.
        steps: how many mini-batches are trained.
        double: whether parameters, buffers and inputs are cast to float64 first.
        clip_norm: largest norm of all gradients together.

    Raises:
        UsageError: stages divide micro-batches differently, and the model cannot be divided so; names the layer.
        ModelError: the user's code raises, or batch, output and loss do not fit together.
        FileError: the dataset has fewer samples than a mini-batch.
        TrainingError: nothing was counted in a whole mini-batch.
    """
    chosen = doubled(user) if double else user
    samples = _Samples(chosen, plan)
    division = divide(lambda: _built(chosen, plan), plan, chosen, samples.first())
    model = _built(chosen, plan)
    optimizer = chosen.make_optimizer(model.named_parameters())
    scheduler = chosen.make_scheduler(optimizer)
    forward = DividedForward(model, plan, chosen, division)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor | None] = {}
    for step in range(steps):
        optimizer.zero_grad()
        tally = _Tally(plan)
        for micro_batch, batch in enumerate(samples.load(step)):
            tally.add(forward.run(Moment(step, micro_batch), batch))
        losses.append(tally.settle(model))
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if step == 0:
            gradients = {name: _copy(value.grad) for name, value in model.named_parameters()}
        _seed(plan.seed, "optimizer", step)
        optimizer.step()
        forward.end_step()
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(losses[-1])
        elif scheduler is not None:
            scheduler.step()
    forward.close()
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    return PlainRun(losses, gradients, parameters, {name: value.clone() for name, value in model.named_buffers()})


def _built(user: UserModel, plan: Plan) -> nn.Module:
    return user.build(plan.seed).train()


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().clone()


class _Tally:
    """Runs the backward of every part's loss, and adds the losses up."""

    def __init__(self, plan: Plan) -> None:
        self._batch = plan.batch
        self._total, self._count = 0.0, 0.0
        self._counts = False

    def add(self, parts: Iterator[Part]) -> None:
        for part in parts:
            weighed = [self._weigh(rows, outputs) for rows, outputs in part]
            together = torch.stack([loss for loss in weighed if loss.requires_grad] or weighed).sum()
            if together.requires_grad:
                together.backward()  # type: ignore[no-untyped-call]

    def settle(self, model: nn.Module) -> float:
        """Divide the gradients by what the losses counted, if they did; return the mini-batch's loss."""
        if not self._counts:
            return self._total
        if not self._count:
            raise TrainingError("loss() returned a count of 0 for the whole mini-batch; nothing was updated")
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self._count
        return self._total / self._count

    def _weigh(self, rows: int, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return what is run backward: a sum, or a share's mean for as much as its part of the mini-batch."""
        if len(outputs) == 2:
            self._counts = True
            self._count += float(outputs[1].detach())
        weight = 1.0 if len(outputs) == 2 else rows / self._batch
        # As Python's numbers: some losses are of fewer bits than the gradients.
        self._total += float(outputs[0].detach()) * weight
        return outputs[0] * weight


class _Samples:
    """The mini-batches of a run, micro-batch by micro-batch, read and seeded as ``docs/seeds.md`` says."""

    def __init__(self, user: UserModel, plan: Plan) -> None:
        self._user, self._plan = user, plan
        _seed(plan.seed, "dataset")
        self._dataset = user.dataset()
        self._samples = user.sample_count(self._dataset)
        self._steps = self._samples // plan.batch
        if not self._steps:
            raise FileError(
                f"{user.spec}: the dataset has {self._samples} samples, a mini-batch takes {plan.batch}; plan with a "
                "smaller `batch`"
            )

    def first(self) -> Batch:
        """Return the first micro-batch of a run."""
        return next(self.load(0))

    def load(self, step: int) -> Iterator[Batch]:
        plan = self._plan
        epoch, index = divmod(step, self._steps)
        order = torch.randperm(self._samples, generator=torch.Generator().manual_seed(plan.seed + epoch))
        picked = order[index * plan.batch : (index + 1) * plan.batch].tolist()
        for micro_batch in range(plan.micro_batches):
            first = micro_batch * plan.micro_batch_size
            samples = [self._sample(epoch, sample) for sample in picked[first : first + plan.micro_batch_size]]
            _seed(plan.seed, "collate", step, micro_batch)
            batch = Batch(self._user.collate(samples))
            if batch.rows != len(samples):
                raise ModelError(f"{self._user.path}: collate() made {batch.rows} rows of {len(samples)} samples")
            yield batch

    def _sample(self, epoch: int, index: int) -> object:
        _seed(self._plan.seed, "sample", epoch, index)
        return self._user.sample(self._dataset, index)


def _seed(*parts: object) -> None:
    """Seed the default generators of Python, NumPy and torch, which data sets and optimizers draw from."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    number = int.from_bytes(digest[:8], "big") >> 1
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)
