"""Mini-batches of plain training: how one is read, seeded, run forward share by share, and backward.

The loop and the rule of several pipelines (:mod:`autopar.capture.plain.waves`) are made of these; what an update is,
and when, is theirs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from autopar.capture.model.batch import loss_outputs
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
    join_results,
    result_share,
    shares_of,
)
from autopar.errors import FileError, ModelError, TrainingError
from autopar.formats.plan import Plan

_Part = list[tuple[int, dict[str, torch.Tensor]]]
"""Losses that are run backward together: rows, and what the loss of these rows gave."""


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
            whole = self._collate(epoch, picked, step, 0)
            yield from (Batch(whole.part(first, first + size)) for first in range(0, plan.batch, size))
        else:
            for micro_batch, first in enumerate(range(0, plan.batch, size)):
                yield self._collate(epoch, picked[first : first + size], step, micro_batch)

    def _collate(self, epoch: int, picked: list[int], step: int, micro_batch: int) -> Batch:
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
