"""Chained: layers run as a training step runs them, with a clock read between them.

Every layer computes on what the layer before it has just made, and its backward starts from what the layer after it
has just sent back; all forwards precede all backwards, what a backward is done with is freed, and gradients are new in
every step. So caches, memory and allocator are in the state in which a plain step finds them, which the times of a
layer that is run again and again on the same tensors are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from autopar.capture import Layer
from autopar.profiler.clock import Time, clock_of
from autopar.profiler.passes import Inputs, LayerPass, SplitPass
from autopar.profiler.precision import Computing

_P = TypeVar("_P", bound=LayerPass)
Times = Sequence[tuple[Layer, Time, Time]]
"""A layer with two times; those of one step, in the order of the layers."""


class Chained:
    """Some layers of a graph, in order; not every one needs the one before it to be there."""

    def __init__(
        self, layers: Sequence[Layer], loss: tuple[str, ...], computing: Computing, device: torch.device
    ) -> None:
        self.layers = tuple(layers)
        self._loss, self._computing, self._device = loss, computing, device

    def missing(self) -> tuple[str, ...]:
        """Return the names of the tensors that the layers read and none of them makes."""
        made = {name for layer in self.layers for name in layer.outputs}
        return tuple(dict.fromkeys(name for layer in self.layers for name in layer.inputs if name not in made))

    def step(self, given: Inputs) -> Times:
        """Run one step on the missing tensors; return the times of forwards and backwards."""
        clock = clock_of(self._device)
        tape = _Tape(given)
        self._forget_gradients()
        passes = []
        for layer in self.layers:
            passes.append(self._pass(layer, tape, LayerPass))
            clock.time(passes[-1].forward)
            tape.add(passes[-1].outputs)
        while passes:
            work = passes.pop()
            tape.end(work)
            clock.time(work.backward)
        times = clock.times()
        return list(zip(self.layers, times, reversed(times), strict=False))

    def recomputed(self, given: Inputs) -> list[tuple[Layer, Time]]:
        """Run one step that keeps no activations; return the times of the forwards that its backwards run again."""
        clock = clock_of(self._device)
        tape = _Tape(given)
        self._forget_gradients()
        for layer in self.layers:
            work = self._pass(layer, tape, LayerPass)
            self._seeded(work)
            tape.add(work.outputs)
        for layer in reversed(self.layers):
            work = self._pass(layer, tape, LayerPass)
            clock.time(partial(self._seeded, work))
            tape.end(work)
            work.backward()
        return list(zip(self.layers, reversed(clock.times()), strict=True))

    def split(self, given: Inputs) -> Times:
        """Run one step with backwards split in halves; return the times of the halves.

        All halves that make inputs' gradients precede all that make parameters'.
        """
        inputs, weights = clock_of(self._device), clock_of(self._device)
        tape = _Tape(given)
        self._forget_gradients()
        passes, halves = [], []
        for layer in self.layers:
            passes.append(self._pass(layer, tape, SplitPass))
            passes[-1].forward()
            tape.add(passes[-1].outputs)
        while passes:
            halves.append(passes.pop())
            tape.end(halves[-1])
            inputs.time(halves[-1].backward_input)
        for half in halves:
            weights.time(half.backward_weight)
        return list(zip(self.layers, reversed(inputs.times()), reversed(weights.times()), strict=True))

    def _pass(self, layer: Layer, tape: _Tape, kind: type[_P]) -> _P:
        return kind(layer, tape.given, self._loss, self._computing, tape.read(layer))

    def _seeded(self, work: LayerPass) -> None:
        """Run a forward that draws what it drew the last time."""
        if work.layer.random:
            generator = torch.cuda.default_generators[0] if self._device.type == "cuda" else torch.default_generator
            generator.manual_seed(0)
        work.forward()

    def _forget_gradients(self) -> None:
        for layer in self.layers:
            for parameter in layer.module.parameters():
                parameter.grad = None


class _Tape:
    """The tensors between layers, as leaves to which all their readers' backwards add."""

    def __init__(self, given: Inputs) -> None:
        self.given = given
        self._leaves = given.leaves()

    def read(self, layer: Layer) -> dict[str, torch.Tensor]:
        return {name: self._leaves[name] for name in layer.inputs}

    def add(self, outputs: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in outputs.items():
            self._leaves[name] = tensor.detach().requires_grad_(tensor.requires_grad)

    def end(self, work: LayerPass) -> None:
        """Hand a pass what came back for its outputs, and let go of them."""
        leaves = {name: self._leaves.pop(name) for name in work.outputs}
        work.prepare_backward({name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})
        work.outputs = {}
