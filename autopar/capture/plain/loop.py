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

import hashlib
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_flatten, tree_unflatten

from autopar.capture.model.batch import loss_outputs, named_tensors, rebuild
from autopar.capture.model.optimizer import refuse_others
from autopar.capture.model.source import UserModel, stage_traits
from autopar.capture.model.terms import is_named, terms_of
from autopar.capture.plain.division import (
    Batch,
    Division,
    Key,
    LayerTracer,
    Pattern,
    RowShare,
    divide,
    join_results,
    result_share,
    shares_of,
)
from autopar.capture.plain.histories import WeightHistories, check_comparable
from autopar.errors import FileError, ModelError, TrainingError
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


_Part = list[tuple[int, dict[str, torch.Tensor]]]
"""Losses that are run backward together: rows, and what the loss of these rows gave."""


class DividedForward(LayerTracer):
    """Runs micro-batches forward: seeded share by share, every replica with its buffers, the first with the model's."""

    def __init__(self, model: nn.Module, plan: Plan, user: UserModel, division: Division) -> None:
        super().__init__(model, plan, user)
        self._plan, self._user, self._division = plan, user, division
        self._moment = (0, 0)
        """Step and micro-batch, both from 0."""
        self._shares: list[tuple[RowShare, ...]] = []
        self._base = 0
        self._inside: RowShare | None = None
        """The share of a call that is run share by share."""
        self._states: dict[tuple[str, int], torch.Tensor] = {}
        """Of the generator, where a share's last call within a layer ended."""
        self._buffers = _ReplicaBuffers(model, plan, division)

    def run(self, step: int, micro_batch: int, batch: Batch) -> Iterator[_Part]:
        """Yield the losses of a micro-batch, part by part; each is to be run backward before the next."""
        self._moment = (step, micro_batch)
        self._states.clear()
        # Without flushes, replicas take whole mini-batches in turn.
        turn = step if self._plan.span > 1 else micro_batch
        self._shares = [shares_of(stage, turn) for stage in self._plan.stages]
        aligned, last = self._division.share_stage, self._shares[-1]
        base = (RowShare(0, 0, 0, batch.rows),) if aligned is None else self._shares[aligned]
        ranges = [(share.start, share.stop) for share in base]
        outputs, dims = [], self._division.output
        whole = self._user.loss is None or dims is None or ranges == [(share.start, share.stop) for share in last]
        for self._base, (start, stop) in enumerate(ranges):
            part = batch.part(start, stop)
            output = self.forward(part)
            if whole:
                yield [(stop - start, self._loss(output, part))]
            else:
                outputs.append(output)
        if not whole:
            assert dims is not None
            joined = join_results(outputs, dims) if len(outputs) > 1 else outputs[0]
            parts = ((each, batch.part(each.start, each.stop)) for each in last)
            yield [(each.stop - each.start, self._loss(result_share(joined, dims, each), part)) for each, part in parts]

    def end_step(self) -> None:
        """Make the buffers of replicas alike, where the plan asks for it."""
        self._buffers.synchronize()

    def close(self) -> None:
        """Give the model the buffers of the first replicas."""
        for stage in range(len(self._plan.stages)):
            self._buffers.activate(stage, 0)

    def switch(self, layer: str) -> None:
        """Begin a layer: seed it, and have the buffers of its replica in place."""
        super().switch(layer)
        share = self._share()
        self._buffers.activate(self.stage, share.replica)
        torch.default_generator.manual_seed(self._seed(share))

    def around(self, module: nn.Module, key: Key, run: Callable[..., Any], arguments: Any, kwargs: Any) -> Any:  # noqa: ANN401
        """Run a call, share by share where the division says so."""
        pattern = None if self._inside is not None else self._division.splits.get(key)
        if pattern is None:
            return super().around(module, key, run, arguments, kwargs)
        return self._split(module, key, pattern, run, (arguments, kwargs))

    def _split(self, module: nn.Module, key: Key, pattern: Pattern, run: Callable[..., Any], inputs: object) -> Any:  # noqa: ANN401
        leaves, structure = tree_flatten(inputs)
        before, counts = self.layer, self._counts.copy()
        stage, parts, copies = self._stage_of[self._starts.get(key, before)], [], []
        for share in self._shares[stage]:
            self.layer, self._inside = before, share
            self._counts.clear()
            self._counts.update(counts)
            self._resume(key, stage, share)
            copies.append(pattern.share(leaves, share))
            arguments, named = tree_unflatten(copies[-1], structure)
            parts.append(run(module, *arguments, **named))
            self._states[self.layer, share.index] = torch.get_rng_state()
        self._inside = None
        pattern.give_back(leaves, copies)
        return join_results(parts, pattern.result_dims)

    def _resume(self, key: Key, stage: int, share: RowShare) -> None:
        """Begin the layer that a call starts, or go on where the share's last call within the layer ended."""
        self._buffers.activate(stage, share.replica)
        if key in self._starts:
            self.switch(self._starts[key])
        elif (self.layer, share.index) in self._states:
            torch.set_rng_state(self._states[self.layer, share.index])
        else:
            torch.default_generator.manual_seed(self._seed(share))

    def _loss(self, output: object, batch: object) -> dict[str, torch.Tensor]:
        loss = self._user.loss
        return loss_outputs(loss(output, batch) if loss else output, loss)

    def _share(self) -> RowShare:
        """Return the share of the present stage that runs."""
        shares = self._shares[self.stage]
        return self._inside or shares[self._base if self._base < len(shares) else 0]

    def _seed(self, share: RowShare) -> int:
        """Return what the layer's generator is seeded with: docs/howto/verify.md."""
        return _number(self._plan.seed, self.layer, *self._moment, share.index)


class _ReplicaBuffers:
    """The buffers that forwards write, once for every replica of the stage that writes them."""

    def __init__(self, model: nn.Module, plan: Plan, division: Division) -> None:
        named = dict(model.named_buffers())
        self._places = {
            name: [
                (module, key)
                for module in model.modules()
                for key, value in module._buffers.items()
                if value is named[name]
            ]
            for names in division.written_buffers.values()
            for name in names
        }
        self._plan, self._written_buffers = plan, division.written_buffers
        self._active_replicas = dict.fromkeys(range(len(plan.stages)), 0)
        self._replica_values = {
            (name, replica): named[name].clone()
            for stage, names in division.written_buffers.items()
            for name in names
            for replica in range(1, plan.stages[stage].replicas)
        }

    def activate(self, stage: int, replica: int) -> None:
        """Put the buffers of a replica into the model."""
        before = self._active_replicas[stage]
        if before == replica:
            return
        for name in self._written_buffers.get(stage, ()):
            module, key = self._places[name][0]
            value = module._buffers[key]
            assert value is not None
            self._replica_values[name, before] = value
            for module, key in self._places[name]:
                module._buffers[key] = self._replica_values[name, replica]
        self._active_replicas[stage] = replica

    @torch.no_grad()
    def synchronize(self) -> None:
        """Give all replicas the first one's buffers, or their mean, but for statistics of batch normalisation."""
        for stage, names in self._written_buffers.items() if self._plan.replicate_state else ():
            self.activate(stage, 0)
            for name in names:
                module, key = self._places[name][0]
                first = module._buffers[key]
                others = [self._replica_values[name, at] for at in range(1, self._plan.stages[stage].replicas)]
                if first is None or isinstance(module, nn.modules.batchnorm._BatchNorm):
                    continue
                if self._plan.replicate_state == "average" and (first.is_floating_point() or first.is_complex()):
                    first.copy_(torch.stack([first, *others]).mean(0))
                for other in others:
                    other.copy_(first)


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
    others: tuple[dict[str, torch.Tensor | None], ...] = ()
    """The gradients of other pipelines than the first."""

    def gradients_of(self, pipeline: int) -> dict[str, torch.Tensor | None]:
        """Return the first step's gradients in a pipeline."""
        return (self.gradients, *self.others)[pipeline]


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
        from autopar.capture.plain.waves import train_in_waves

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


def stage_optimizers(
    model: nn.Module, user: UserModel, plan: Plan, stage_of: Mapping[str, int]
) -> dict[int, torch.optim.Optimizer]:
    """Return an optimizer of every stage that has parameters, which is told of the stage what it asks for."""
    found, named = {}, dict(model.named_parameters())
    for stage, traits in enumerate(stage_traits(plan, user.optimizer_options)):
        own = [(name, each) for name, each in named.items() if stage_of.get(name) == stage and each.requires_grad]
        if own:
            found[stage] = user.make_optimizer(own, traits)
            refuse_others(found[stage], [each for _, each in own], user)
    return found


def build_model(user: UserModel, plan: Plan) -> nn.Module:
    """Return the user's model as it is trained."""
    model = user.build(plan.seed)
    return model if user.keeps_modes and model.training else model.train()


class LossAccumulator:
    """Runs the backward of every part's loss, and adds the losses up.

    Of a loss with several terms, the gradients of each that is counted are kept apart until its count is known.
    """

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self._batch, self._apart = plan.batch, plan.span > 1
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._total, self._count = 0.0, 0.0
        self._counts = False
        self._sums: dict[str, _CountedTerm] = {}

    def add(self, parts: Iterator[_Part]) -> None:
        for part in parts:
            weighed = [each for rows, outputs in part for each in self._weigh(rows, outputs)]
            trained = [loss for loss in weighed if loss.requires_grad]
            if trained:
                torch.stack(trained).sum().backward()  # type: ignore[no-untyped-call]

    def finish(self) -> float:
        """Divide the gradients by what the losses counted, if they did; return the mini-batch's loss."""
        for term in self._sums.values():
            self._total += term.finish(self._parameters)
        if not self._counts:
            return self._total
        if not self._count:
            raise TrainingError("loss() returned a count of 0 for the whole mini-batch; nothing was updated")
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad /= self._count
        return self._total / self._count

    def _weigh(self, rows: int, outputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return what is run backward: a sum, or a share's means for as much as its part of the mini-batch."""
        terms = [term for term in terms_of(tuple(outputs)) if not term.logged]
        means = [(outputs[term.value], rows / self._batch) for term in terms if term.divisor is None]
        if is_named(tuple(outputs)):
            for term in terms:
                if term.divisor is not None:
                    kept = self._sums.setdefault(term.name, _CountedTerm())
                    kept.add(outputs[term.value], float(outputs[term.divisor].detach()), self._parameters)
        elif not means:
            count, weight = float(outputs["loss_count"].detach()), 1.0
            if self._apart and count:
                # Gradients of several mini-batches are added up, each of which has a count of its own.
                weight = 1.0 / count
            else:
                self._counts = True
                self._count += count
            means = [(outputs["loss_sum"], weight)]
        # As Python's numbers: some losses are of fewer bits than the gradients.
        self._total += sum(float(value.detach()) * weight for value, weight in means)
        return [value * weight for value, weight in means]


class _CountedTerm:
    """A sum over a mini-batch, what it counts, and its gradients."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0.0
        self._gradients: dict[int, torch.Tensor] = {}

    def add(self, value: torch.Tensor, count: float, parameters: Sequence[nn.Parameter]) -> None:
        self._sum += float(value.detach())
        self._count += count
        if not value.requires_grad:
            return
        for place, gradient in enumerate(torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)):
            if gradient is not None:
                before = self._gradients.get(place)
                self._gradients[place] = gradient if before is None else before + gradient

    def finish(self, parameters: Sequence[nn.Parameter]) -> float:
        """Add the gradients of the quotient to those that parameters have; return it, or 0 where nothing counted."""
        factor = 1.0 / self._count if self._count else 0.0
        for place, gradient in self._gradients.items():
            parameter, own = parameters[place], gradient * factor
            parameter.grad = own if parameter.grad is None else parameter.grad + own
        return self._sum * factor


class MiniBatches:
    """The mini-batches of a run, micro-batch by micro-batch, read and seeded as ``docs/howto/verify.md`` says."""

    def __init__(self, user: UserModel, plan: Plan) -> None:
        self._user, self._plan = user, plan
        seed_all(plan.seed, "dataset")
        self._dataset = user.dataset()
        self._samples = user.sample_count(self._dataset)
        self._steps = self._samples // plan.batch
        if not self._steps:
            raise FileError(
                f"{user.spec}: the dataset has {self._samples} samples, a mini-batch takes {plan.batch}; plan with a "
                "smaller `batch`"
            )

    def load(self, step: int) -> Iterator[Batch]:
        plan = self._plan
        epoch, index = divmod(step, self._steps)
        order = torch.randperm(self._samples, generator=torch.Generator().manual_seed(plan.seed + epoch))
        picked = order[index * plan.batch : (index + 1) * plan.batch].tolist()
        size = plan.micro_batch_size
        if self._user.whole_batches:
            whole = self._collated(epoch, picked, step, 0)
            yield from (Batch(whole.part(first, first + size)) for first in range(0, plan.batch, size))
        else:
            for micro_batch, first in enumerate(range(0, plan.batch, size)):
                yield self._collated(epoch, picked[first : first + size], step, micro_batch)

    def _collated(self, epoch: int, picked: list[int], step: int, micro_batch: int) -> Batch:
        samples = [self._sample(epoch, sample) for sample in picked]
        seed_all(self._plan.seed, "collate", step, micro_batch)
        batch = Batch(self._user.collate(samples))
        if batch.rows != len(samples):
            raise ModelError(f"{self._user.path}: collate() made {batch.rows} rows of {len(samples)} samples")
        return batch

    def _sample(self, epoch: int, index: int) -> object:
        seed_all(self._plan.seed, "sample", epoch, index)
        return self._user.sample(self._dataset, index)


def seed_all(*parts: object) -> None:
    """Seed the default generators of Python, NumPy and torch, which data sets and optimizers draw from."""
    number = _number(*parts)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)


def _number(*parts: object) -> int:
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
