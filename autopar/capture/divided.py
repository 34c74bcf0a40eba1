"""The forward and the loss of a whole model, run by the shares of a plan's stages and with its seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from autopar.capture.batch import loss_outputs
from autopar.capture.division import Batch, Division, Pattern, Share, divided, joined, shares_of
from autopar.capture.source import UserModel
from autopar.capture.walk import Key, Walk
from autopar.formats.plan import Plan

Part = list[tuple[int, tuple[torch.Tensor, ...]]]
"""Losses that are run backward together: rows, and what the loss of these rows gave."""


@dataclass(frozen=True)
class Moment:
    """Step and micro-batch, both from 0."""

    step: int
    micro_batch: int


class DividedForward(Walk):
    """Runs micro-batches forward.

    Random layers are seeded share by share, and every replica of a stage has buffers of its own; those of the first
    ones are the model's.
    """

    def __init__(self, model: nn.Module, plan: Plan, user: UserModel, division: Division) -> None:
        """Take the model, and how it is divided."""
        super().__init__(model, plan, user)
        self._plan, self._user, self._division = plan, user, division
        self._moment = Moment(0, 0)
        self._shares: list[tuple[Share, ...]] = []
        self._base = 0
        self._inside: Share | None = None
        """The share of a call that is run share by share."""
        self._states: dict[tuple[str, int], torch.Tensor] = {}
        """Of the generator, where a share's last call within a layer ended."""
        self._buffers = _ReplicaBuffers(model, plan, division)

    def run(self, moment: Moment, batch: Batch) -> Iterator[Part]:
        """Yield the losses of a micro-batch, part by part; each is to be run backward before the next."""
        self._moment = moment
        self._states.clear()
        self._shares = [shares_of(stage, moment.micro_batch, batch.rows) for stage in self._plan.stages]
        aligned, last = self._division.aligned, self._shares[-1]
        base = (Share(0, 0, 0, batch.rows),) if aligned is None else self._shares[aligned]
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
            yield self._regrouped(joined(outputs, dims) if len(outputs) > 1 else outputs[0], dims, last, batch)

    def end_step(self) -> None:
        """Make the buffers of replicas alike, where the plan asks for it."""
        self._buffers.settle()

    def close(self) -> None:
        """Give the model the buffers of the first replicas."""
        for stage in range(len(self._plan.stages)):
            self._buffers.hold(stage, 0)

    def switch(self, layer: str) -> None:
        """Begin a layer: seed it, and have the buffers of its replica in place."""
        super().switch(layer)
        share = self._share()
        self._buffers.hold(self.stage, share.replica)
        torch.default_generator.manual_seed(self._seed(share))

    def around(self, module: nn.Module, key: Key, run: Callable[..., Any], arguments: Any, named: Any) -> Any:  # noqa: ANN401
        """Run a call, share by share where the division says so."""
        pattern = None if self._inside is not None else self._division.splits.get(key)
        if pattern is None:
            return super().around(module, key, run, arguments, named)
        return self._split(module, key, pattern, run, (arguments, named))

    def _split(self, module: nn.Module, key: Key, pattern: Pattern, run: Callable[..., Any], given: object) -> Any:  # noqa: ANN401
        leaves, structure = tree_flatten(given)
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
        return pattern.joined(parts)

    def _resume(self, key: Key, stage: int, share: Share) -> None:
        """Begin the layer that a call starts, or go on where the share's last call within the layer ended."""
        self._buffers.hold(stage, share.replica)
        if key in self._starts:
            self.switch(self._starts[key])
        elif (self.layer, share.index) in self._states:
            torch.set_rng_state(self._states[self.layer, share.index])
        else:
            torch.default_generator.manual_seed(self._seed(share))

    def _regrouped(self, output: object, dims: tuple[int, ...], shares: Sequence[Share], batch: Batch) -> Part:
        """Return the losses of the last stage's shares, of the output for all rows."""
        return [
            (share.stop - share.start, self._loss(divided(output, dims, share), batch.part(share.start, share.stop)))
            for share in shares
        ]

    def _loss(self, output: object, batch: object) -> tuple[torch.Tensor, ...]:
        loss = self._user.loss
        return loss_outputs(loss(output, batch) if loss else output, loss is not None)

    def _share(self) -> Share:
        """Return the share of the present stage that runs."""
        shares = self._shares[self.stage]
        return self._inside or shares[self._base if self._base < len(shares) else 0]

    def _seed(self, share: Share) -> int:
        """Return what the layer's generator is seeded with: docs/seeds.md."""
        moment = self._moment
        text = f"{self._plan.seed}/{self.layer}/{moment.step}/{moment.micro_batch}/{share.index}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


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
            for names in division.written.values()
            for name in names
        }
        self._plan = plan
        self._written, self._held = division.written, dict.fromkeys(range(len(plan.stages)), 0)
        self._kept = {
            (name, replica): named[name].clone()
            for stage, names in division.written.items()
            for name in names
            for replica in range(1, plan.stages[stage].replicas)
        }

    def hold(self, stage: int, replica: int) -> None:
        """Put the buffers of a replica into the model."""
        before = self._held[stage]
        if before == replica:
            return
        for name in self._written.get(stage, ()):
            module, key = self._places[name][0]
            value = module._buffers[key]
            assert value is not None
            self._kept[name, before] = value
            for module, key in self._places[name]:
                module._buffers[key] = self._kept[name, replica]
        self._held[stage] = replica

    @torch.no_grad()
    def settle(self) -> None:
        """Give all replicas the first one's buffers, or their mean, but for statistics of batch normalisation."""
        for stage, names in self._written.items() if self._plan.replicate_state else ():
            self.hold(stage, 0)
            for name in names:
                module, key = self._places[name][0]
                first = module._buffers[key]
                others = [self._kept[name, at] for at in range(1, self._plan.stages[stage].replicas)]
                if first is None or isinstance(module, nn.modules.batchnorm._BatchNorm):
                    continue
                if self._plan.replicate_state == "average" and first.is_floating_point():
                    first.copy_(torch.stack([first, *others]).mean(0))
                for other in others:
                    other.copy_(first)
