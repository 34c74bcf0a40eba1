"""Compare a captured graph with the plain model: gradients and buffers that one batch gives.

The graph's layers run one after another in this process, with one autograd tape per layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.capture.batch import StepModule, named_tensors, row_count
from autopar.capture.effects import FALLBACK
from autopar.capture.graph import LayerGraph
from autopar.capture.model_state import preserve_buffers, preserve_parameters
from autopar.errors import CaptureError, ModelError


def _backpropagate(graph: LayerGraph, batch: Mapping[str, torch.Tensor]) -> None:
    """Run every layer on the named tensors of a batch, and backward, last layer first, from the first loss output.

    Inputs are leaves of a layer's own tape; they require a gradient where the producer's output does.
    """
    rows, known = row_count(batch), dict(batch)
    runs = []
    for layer in graph.layers:
        inputs = {name: known[name].detach().requires_grad_(known[name].requires_grad) for name in layer.inputs}
        outputs = dict(zip(layer.outputs, layer.module(rows, *inputs.values()), strict=True))
        known.update(outputs)
        runs.append((inputs, outputs))
    gradients = {graph.outputs[0]: torch.ones_like(known[graph.outputs[0]])}
    for inputs, outputs in reversed(runs):
        reached = [name for name, tensor in outputs.items() if name in gradients and tensor.requires_grad]
        if reached:
            torch.autograd.backward([outputs[name] for name in reached], [gradients.pop(name) for name in reached])
        for name, tensor in inputs.items():
            if tensor.grad is not None:
                gradients[name] = gradients[name] + tensor.grad if name in gradients else tensor.grad


# Relative tolerance of a gradient's norm. A wrong gradient is off by tenths, a reordered sum by far less than this.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def check_gradients(
    model: nn.Module, graph: LayerGraph, batch: object, loss: Callable[..., Any] | None, seed: int = 0
) -> None:
    """Compare one batch's gradients of the layers, run one after another, with those of the plain model.

    And what both leave in the buffers: a write that the graph does not show is found so.

    Raises:
        CaptureError: a parameter's gradient, or a buffer, differs by more than rounding; names it.
        ModelError: the plain model's is sparse, or not finite; names it.
    """
    tensors = named_tensors(batch)
    expected, left = _plain(model, batch, loss, tensors, seed)
    for name, gradient in expected.items():
        if gradient.layout is not torch.strided:
            raise ModelError(f"the gradient of {name} is sparse, which ranks cannot add up; build it with sparse=False")
        if not math.isfinite(float(gradient.norm())):
            raise ModelError(
                f"the plain model's gradient of {name} is not finite in the first samples; correct the loss"
            )
    found, buffers = _run_layers(model, graph, tensors, seed)
    _check_buffers(left, buffers)
    largest = max((float(gradient.norm()) for gradient in expected.values()), default=0.0)
    for name in sorted(expected.keys() | found.keys()):
        _check_gradient(name, expected.get(name), found.get(name), largest)


def _check_gradient(name: str, plain: torch.Tensor | None, other: torch.Tensor | None, largest: float) -> None:
    """Compare the gradients of a parameter, of which one at most is none; ``largest`` is the norm of the model's."""
    reference = plain if plain is not None else other
    assert reference is not None
    zero = torch.zeros_like(reference)
    difference = float(((zero if plain is None else plain) - (zero if other is None else other)).norm())
    # A gradient that is zero but for rounding is compared with the largest one instead of with itself.
    scale = max(float(reference.norm()), 1e-3 * largest)
    if not difference <= TOLERANCE.get(reference.dtype, 1e-4) * scale:
        raise CaptureError(
            f"the captured graph gives another gradient of {name} than the model (relative difference "
            f"{difference / scale if scale else difference:.1e}); give layers(model) in the model file"
        )


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def _check_buffers(plain_buffers: Mapping[str, torch.Tensor], layer_buffers: Mapping[str, torch.Tensor]) -> None:
    for name, expected in plain_buffers.items():
        other = layer_buffers[name]
        tolerance = TOLERANCE.get(expected.dtype, 1e-4) if expected.is_floating_point() else 0.0
        if expected.shape != other.shape or not torch.allclose(expected, other, tolerance, tolerance, equal_nan=True):
            raise CaptureError(
                f"the captured graph leaves another buffer {name} than the model's forward; write into it in place "
                f"(self.{name.rpartition('.')[2]}.copy_(...)), {FALLBACK}"
            )


def _plain(
    model: nn.Module, batch: object, loss: Callable[..., Any] | None, tensors: Mapping[str, torch.Tensor], seed: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the gradients, and the buffers afterwards."""
    with preserve_buffers(model), preserve_parameters(model):
        torch.manual_seed(seed)
        outputs = StepModule(model, batch, loss)(*(tensor.clone() for tensor in tensors.values()))
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        gradients = torch.autograd.grad(outputs[0], list(trained.values()), allow_unused=True)
        buffers = _buffers(model)
    return {name: each for name, each in zip(trained, gradients, strict=True) if each is not None}, buffers


def _run_layers(
    model: nn.Module, graph: LayerGraph, tensors: Mapping[str, torch.Tensor], seed: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the gradients, and the buffers afterwards."""
    parameters = dict(model.named_parameters())
    kept = {name: parameter.grad for name, parameter in parameters.items()}
    with preserve_buffers(model), preserve_parameters(model):
        torch.manual_seed(seed)
        for parameter in parameters.values():
            parameter.grad = None
        try:
            _backpropagate(graph, {name: tensor.clone() for name, tensor in tensors.items()})
            return {name: p.grad for name, p in parameters.items() if p.grad is not None}, _buffers(model)
        finally:
            for name, parameter in parameters.items():
                parameter.grad = kept[name]
