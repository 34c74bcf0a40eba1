"""Run a layer graph one layer after another in this process, with one autograd tape per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from autopar.capture.graph import Layer, LayerGraph


@dataclass
class LayerRun:
    """One layer's forward: its inputs as leaves of its own tape, and its outputs."""

    layer: Layer
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]


def forward(
    graph: LayerGraph,
    batch: Mapping[str, torch.Tensor],
    before: Callable[[Layer], None] = lambda _: None,
) -> list[LayerRun]:
    """Run every layer on the named tensors of a batch; ``before`` is called ahead of each layer.

    Inputs require a gradient where the producer's output does.
    """
    rows = int(next(iter(batch.values())).shape[0])
    known = dict(batch)
    runs = []
    for layer in graph.layers:
        inputs = {name: known[name].detach().requires_grad_(known[name].requires_grad) for name in layer.inputs}
        before(layer)
        outputs = dict(zip(layer.outputs, layer.module(rows, *inputs.values()), strict=True))
        known.update(outputs)
        runs.append(LayerRun(layer, inputs, outputs))
    return runs


def backward(runs: list[LayerRun], outputs: tuple[str, ...]) -> None:
    """Run every layer's backward, last layer first, from the first of the loss ``outputs``."""
    gradients: dict[str, torch.Tensor] = {outputs[0]: torch.ones_like(runs[-1].outputs[outputs[0]])}
    for run in reversed(runs):
        known = [name for name, tensor in run.outputs.items() if name in gradients and tensor.requires_grad]
        if known:
            torch.autograd.backward([run.outputs[name] for name in known], [gradients.pop(name) for name in known])
        for name, tensor in run.inputs.items():
            if tensor.grad is not None:
                gradients[name] = gradients[name] + tensor.grad if name in gradients else tensor.grad
