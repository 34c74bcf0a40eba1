"""One layer on real inputs: its forward and backward as the runtime performs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopar.capture import Layer, LayerGraph
from autopar.profiler.activations import SavedStorages

__all__ = ["Inputs", "LayerPass", "record"]


@dataclass(frozen=True)
class Inputs:
    """The tensors that one layer reads at one micro-batch size, detached; and which of them carry a gradient."""

    rows: int
    tensors: Mapping[str, torch.Tensor]
    gradient: Mapping[str, bool]


class LayerPass:
    """One forward and then one backward of a layer."""

    def __init__(self, layer: Layer, inputs: Inputs, loss: tuple[str, ...]) -> None:
        self._layer, self._rows = layer, inputs.rows
        # The backward starts from the loss itself, never from the count beside it.
        self._ignored = set(loss[1:])
        self.inputs = {
            name: tensor.detach().requires_grad_(inputs.gradient[name]) for name, tensor in inputs.tensors.items()
        }
        self.outputs: dict[str, torch.Tensor] = {}
        self._roots: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []

    def forward(self) -> None:
        values = self._layer.module(self._rows, *self.inputs.values())
        self.outputs = dict(zip(self._layer.outputs, values, strict=True))

    def prepare_backward(self) -> None:
        """Make the gradients of the outputs, which the runtime is sent."""
        self._roots = [t for name, t in self.outputs.items() if t.requires_grad and name not in self._ignored]
        self._gradients = [torch.ones_like(tensor) for tensor in self._roots]

    def backward(self) -> None:
        """Run the backward, adding to the parameters' gradients."""
        if self._roots:
            torch.autograd.backward(self._roots, self._gradients)

    def whole(self) -> None:
        """Run forward and backward, keeping no more alive than the runtime does."""
        self.forward()
        self.prepare_backward()
        self.outputs = {}
        self.backward()


def record(
    graph: LayerGraph, batch: Mapping[str, torch.Tensor], crossing: set[str]
) -> tuple[dict[str, Inputs], dict[str, dict[str, int]], dict[str, int]]:
    """Run all layers forward once; return every layer's inputs, saved bytes by storage, and output bytes.

    ``crossing`` names the tensors whose storages are named after them; other outputs (the loss) are not.
    """
    rows = int(next(iter(batch.values())).shape[0])
    known = dict(batch)
    gradient = dict.fromkeys(batch, False)
    inputs, saved, sizes = {}, {}, {}
    for layer in graph.layers:
        read = {name: known[name] for name in layer.inputs}
        inputs[layer.name] = Inputs(rows, read, {name: gradient[name] for name in read})
        work = LayerPass(layer, inputs[layer.name], graph.outputs)
        storages = SavedStorages(layer.name, (*layer.module.parameters(), *layer.module.buffers()))
        with storages.recording():
            work.forward()
        outputs = {name: tensor for name, tensor in work.outputs.items() if name in crossing}
        saved[layer.name] = storages.named(work.inputs, outputs)
        sizes[layer.name] = sum(tensor.nbytes for tensor in work.outputs.values())
        for name, tensor in work.outputs.items():
            known[name], gradient[name] = tensor.detach(), tensor.requires_grad
    return inputs, saved, sizes
