"""Waves: plain training of several pipelines that tell each other what they change, wave by wave.

In come a plan with several pipelines and the user's model; out comes what the rule of wsp makes of it, in one process.
There is a copy of the model for every pipeline, and no versions: an update waits until the mini-batches in flight on
its stage have begun, so that every forward, with its backward right behind it, sees just the weights that there are.
Nothing is known of programs, of ranks or of time; the rule is counted anew here, from mini-batches and waves
(Park et al., "HetPipe", USENIX ATC 2020, sections 4 and 5; docs/howto/weight_policies.md).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from autopar.capture.model.source import UserModel
from autopar.capture.plain.division import Division
from autopar.capture.plain.mini_batch import (
    DividedForward,
    LossAccumulator,
    MiniBatches,
    PlainRun,
    build_model,
    seed_all,
    stage_optimizers,
)
from autopar.formats.plan import Plan
from autopar.formats.pulls import Taken

_Tensors = dict[str, torch.Tensor]
_Gradients = dict[str, torch.Tensor | None]


def train_in_waves(
    user: UserModel,
    plan: Plan,
    steps: int,
    clip_norm: float | None,
    stages_of: Sequence[Mapping[str, int]],
    on_step: Callable[[int, float], object] | None = None,
    taken: Sequence[Sequence[Taken]] | None = None,
) -> PlainRun:
    """Train some steps, in each of which every pipeline has a mini-batch, and then drain all pipelines.

    A pipeline goes on with its next mini-batch once there is what it pulls before.

    Args:
        user: the model file.
        plan: its pipelines, with their cuts and what is in flight on each stage, waves and staleness count.
        steps: how many.
        clip_norm: largest norm of each stage's gradients.
        stages_of: by pipeline, the stage of every parameter that a layer reads.
        on_step: called with (step, loss) as steps end; what it raises ends the training.
        taken: what the pulls of an eager run took, by rank; by default what the plan's staleness says.
    """
    assert plan.wave is not None
    every = [
        _Pipeline(user, own, plan.wave, clip_norm, stage_of)
        for own, stage_of in zip(plan.separate, stages_of, strict=True)
    ]
    first = {name: each.detach().clone() for name, each in every[0].model.named_parameters()}
    losses = list[float]()
    while len(losses) < steps:
        for at, each in enumerate(every):
            step, others = len(each.losses), [other for other in every if other is not each]
            pull = (step + 1) // plan.wave - 2 if (step + 1) % plan.wave == 0 else -1
            if step < steps and (pull < 0 or each.pull(_waves_taken(plan, at, pull, taken), others)):
                each.train(step * len(every) + at, last=step == steps - 1)
        if all(len(each.losses) > len(losses) for each in every):
            losses.append(sum(each.losses[len(losses)] for each in every) / len(every))
            if on_step is not None:
                on_step(len(losses) - 1, losses[-1])
    # All have all of each other.
    for changes in (changes for each in every for changes in each.changes.values()):
        for name, change in changes.items():
            first[name] += change
    buffers = {name: value.clone() for name, value in every[0].model.named_buffers()}
    gradients, *more = (each.gradients for each in every)
    return PlainRun(losses, gradients, first, buffers, tuple(more))


def _waves_taken(plan: Plan, pipeline: int, pull: int, taken: Sequence[Sequence[Taken]] | None) -> list[Taken]:
    """Return by stage of a pipeline of how many waves of every other it has the changes behind a pull."""
    stages, others = plan.stages_by_pipeline[pipeline], len(plan.pipelines) - 1
    if taken is None:
        assert plan.staleness is not None
        return [(max(0, pull + 1 - plan.staleness),) * others for _ in stages]
    return [taken[plan.ownership.holders(stage)[0].rank][pull] for stage in stages]


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
        self._stage_of, self._updates, self._had = stage_of, Counter[int](), Counter[tuple[int, int]]()
        """The last: by stage and other pipeline, of how many waves it has the changes."""
        self.changes: dict[int, _Tensors] = defaultdict(dict)
        """By wave, what it has changed of every parameter."""
        self.losses: list[float] = []
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
        self._updates[stage] += 1
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
    def pull(self, wanted: Sequence[Taken], others: Sequence[_Pipeline]) -> bool:
        """Add what others have changed in their waves, by stage up to so many of each; return whether all are there."""
        missing = [
            (stage, at, wave)
            for stage, counts in enumerate(wanted)
            for at, count in enumerate(counts)
            for wave in range(self._had[stage, at], count)
        ]
        trained = [
            {name: each for name, each in self._own.get(at, {}).items() if each.requires_grad}
            for at, _ in enumerate(wanted)
        ]
        if not all(others[at].has(wave, trained[stage]) for stage, at, wave in missing):
            return False
        for stage, at, wave in missing:
            for name, each in trained[stage].items():
                each.add_(others[at].changes[wave][name])
            self._had[stage, at] = wave + 1
        return True

    def has(self, wave: int, names: Iterable[str]) -> bool:
        """Whether all of its updates of some parameters in a wave have been."""
        return all(self._updates[self._stage_of[name]] >= (wave + 1) * self._wave for name in names)

    def train(self, number: int, *, last: bool) -> None:
        """Run its next mini-batch forth and back, the ``number``-th of all, and apply what comes before the next."""
        step = len(self.losses)
        self._numbers.append(number)
        accumulator = LossAccumulator(self._plan, self.model)
        for micro_batch, batch in enumerate(self._samples.load(number)):
            accumulator.add(self._forward.run(number, micro_batch, batch))
        self.losses.append(accumulator.finish())
        for stage, own in self._own.items():
            self._waiting[stage].append((step, {name: each.grad for name, each in own.items()}))
            for each in own.values():
                each.grad = None
        self.update_until(None if last else step + 1)
