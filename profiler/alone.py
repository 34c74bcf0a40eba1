"""One layer at a time, of a model that is larger than memory: given weights, measured, and emptied again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from autopar.capture import Layer, LayerGraph, materialize
from autopar.profiler.passes import Inputs

__all__ = ["drawn", "filled", "renamed"]

# The usual scale of initial weights.
SCALE = 0.02


@contextmanager
def filled(layer: Layer, buffers: Mapping[str, torch.Tensor], device: torch.device) -> Iterator[None]:
    """Give a layer random weights in the block: normal ones, vectors of ones, biases of zeros; then take them away.

    Times and bytes depend on shapes; values only have to stay finite.
    """
    empty = {name: layer.parameter(attribute) for attribute, name in layer.parameters.items()}
    weights = {name: nn.Parameter(_weight(name, shape, device), shape.requires_grad) for name, shape in empty.items()}
    held = {name: buffer.to(device) for name, buffer in buffers.items() if name in set(layer.buffers.values())}
    materialize(layer, {**weights, **held}, device)
    try:
        yield
    finally:
        materialize(layer, {**empty, **buffers})


def _weight(name: str, shape: torch.Tensor, device: torch.device) -> torch.Tensor:
    if shape.dim() > 1:
        return torch.randn(shape.shape, dtype=shape.dtype, device=device) * SCALE
    make = torch.zeros if name.endswith("bias") else torch.ones
    return make(shape.shape, dtype=shape.dtype, device=device)


def drawn(
    graph: LayerGraph, layer: Layer, batch: Mapping[str, torch.Tensor], made: Mapping[str, torch.dtype], rows: int
) -> Inputs:
    """Return what a layer reads: rows of the batch; else random numbers of the type that was ``made``, or zeros."""
    tensors, gradient = {}, {}
    device = next(iter(batch.values())).device
    for name in layer.inputs:
        spec = graph.tensor(name)
        gradient[name] = spec.gradient
        if name in batch:
            tensors[name] = batch[name][:rows].clone()
            continue
        tensors[name] = torch.zeros(spec.shape(rows), dtype=made.get(name, spec.dtype), device=device)
        if tensors[name].is_floating_point():
            tensors[name].normal_()
    return Inputs(rows, tensors, gradient)


def renamed(saved: Mapping[str, int], measured: Layer, other: Layer) -> dict[str, int]:
    """Return what an identical layer keeps: the same storages under that layer's names."""
    names = dict(zip((*measured.inputs, *measured.outputs), (*other.inputs, *other.outputs), strict=True))
    own = f"{measured.name}#"
    return {
        f"{other.name}#{name.removeprefix(own)}" if name.startswith(own) else names.get(name, name): size
        for name, size in saved.items()
    }
