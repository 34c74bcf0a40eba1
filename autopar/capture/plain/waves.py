"""Waves: plain training of several pipelines that tell each other what they change, wave by wave.

In come a plan with several pipelines and the user's model; out comes what the rule of wsp makes of it, in one process.
There is a copy of the model for every pipeline, and no versions: an update waits until the mini-batches in flight on
its stage have begun, so that every forward, with its backward right behind it, sees just the weights that there are.
Nothing is known of programs, of ranks or of time; the rule is counted anew here, from mini-batches and waves
(Park et al., "HetPipe", USENIX ATC 2020, sections 4 and 5; docs/design/policies.md).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from autopar.capture.model.source import UserModel
from autopar.capture.plain.division import Division
from autopar.capture.plain.loop import (
    DividedForward,
    LossAccumulator,
    MiniBatches,
    PlainRun,
    build_model,
    seed_all,
    stage_optimizers,
)
from autopar.formats.plan import Plan

_Tensors = dict[str, torch.Tensor]
_Gradients = dict[str, torch.Tensor | None]


def train_in_waves(
    user: UserModel,
    plan: Plan,
    steps: int,
    clip_norm: float | None,
    stages_of: Sequence[Mapping[str, int]],
    on_step: Callable[[int, float], object] | None = None,
) -> PlainRun:
    """Train some steps, in each of which every pipeline has a mini-batch, and then drain all pipelines.

    Args:
        user: the model file.
        plan: its pipelines, with their cuts and what is in flight on each stage, waves and staleness count.
        steps: how many.
        clip_norm: largest norm of each stage's gradients.
        stages_of: by pipeline, the stage of every parameter that a layer reads.
        on_step: called with (step, loss) as steps end; what it raises ends the training.
    """
    assert plan.wave is not None
    assert plan.staleness is not None
    every = [
        _Pipeline(user, own, plan.wave, clip_norm, stage_of)
        for own, stage_of in zip(plan.separate, stages_of, strict=True)
    ]
    first = {name: each.detach().clone() for name, each in every[0].model.named_parameters()}
    losses = []
    for step in range(steps):
        for each in every:
            each.update_until(step)
        wave = (step + 1) // plan.wave - 2 - plan.staleness
        if (step + 1) % plan.wave == 0 and wave >= 0:
            for each in every:
                for other in (other for other in every if other is not each):
                    each.take(other.changes[wave])
        own = [each.train(step * len(every) + at, step) for at, each in enumerate(every)]
        losses.append(sum(own) / len(own))
        if on_step is not None:
            on_step(step, losses[-1])
    for each in every:
        each.update_until(None)
    # All have all of each other.
    for changes in (changes for each in every for changes in each.changes.values()):
        for name, change in changes.items():
            first[name] += change
    buffers = {name: value.clone() for name, value in every[0].model.named_buffers()}
    gradients, *others = (each.gradients for each in every)
    return PlainRun(losses, gradients, first, buffers, tuple(others))


class _Pipeline:
    """One pipeline's copy of the model, its optimizers, and what it has changed."""

    def __init__(
        self, user: UserModel, plan: Plan, wave: int, clip_norm: float | None, stage_of: Mapping[str, int]
    ) -> None:
        self.model = build_model(user, plan)
        self._plan, self._wave, self._clip_norm = plan, wave, clip_norm
        self._optimizers = stage_optimizers(self.model, user, plan, stage_of)
        self._schedulers = {stage: user.make_scheduler(each) for stage, each in self._optimizers.items()}
        named = dict(self.model.named_parameters())
        self._own = {
            stage: {name: named[name] for name, at in stage_of.items() if at == stage and name in named}
            for stage in self._optimizers
        }
        self._forward = DividedForward(self.model, plan, user, Division())
        self._samples = MiniBatches(user, plan)
        self._waiting: dict[int, deque[tuple[int, _Gradients]]] = {stage: deque() for stage in self._optimizers}
        """By stage, (mini-batch, gradients) of what has not been applied."""
        self._numbers: list[int] = []
        self.changes: dict[int, _Tensors] = defaultdict(dict)
        """By wave, what it has changed of every parameter."""
        self.gradients: _Gradients = dict.fromkeys(named)
        """As the first update had them."""

    def update_until(self, step: int | None) -> None:
        """Apply what has been when the forward of a mini-batch comes; all there is, without one."""
        for stage, waiting in self._waiting.items():
            depth = self._plan.stages[stage].warmup
            while waiting and (step is None or waiting[0][0] <= step - depth):
                self._update(stage, *waiting.popleft())

    def _update(self, stage: int, step: int, gradients: _Gradients) -> None:
        own, optimizer = self._own[stage], self._optimizers[stage]
        before = {name: each.detach().clone() for name, each in own.items()}
        for name, each in own.items():
            each.grad = gradients[name]
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(own.values(), self._clip_norm)
        if step == 0:
            self.gradients |= {name: None if each.grad is None else each.grad.clone() for name, each in own.items()}
        seed_all(self._plan.seed, "optimizer", self._numbers[step])
        optimizer.step()
        scheduler = self._schedulers[stage]
        if isinstance(scheduler, LRScheduler):
            scheduler.step()
        changes = self.changes[step // self._wave]
        for name, each in own.items():
            change = each.detach() - before[name]
            changes[name] = changes[name] + change if name in changes else change
            each.grad = None

    @torch.no_grad()
    def take(self, changes: _Tensors) -> None:
        """Add what another pipeline has changed in a wave."""
        named = dict(self.model.named_parameters())
        for name, change in changes.items():
            named[name].add_(change)

    def train(self, number: int, step: int) -> float:
        """Run a mini-batch forth and back, which is the ``number``-th of all, and this pipeline's ``step``-th."""
        self._numbers.append(number)
        accumulator = LossAccumulator(self._plan, self.model)
        for micro_batch, batch in enumerate(self._samples.load(number)):
            accumulator.add(self._forward.run(number, micro_batch, batch))
        loss = accumulator.finish()
        for stage, own in self._own.items():
            self._waiting[stage].append((step, {name: each.grad for name, each in own.items()}))
            for each in own.values():
                each.grad = None
        return loss
