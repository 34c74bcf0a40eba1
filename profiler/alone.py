"""One layer at a time, of a model that is larger than memory: given weights, measured, and emptied again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from autopar.capture import Layer, LayerGraph, materialize_random, release
from autopar.profiler.passes import Inputs


@contextmanager
def filled(layer: Layer, device: torch.device) -> Iterator[None]:
    """Give a layer random weights in the block, and take them away again.

    Times and bytes depend on shapes; values only have to stay finite.
    """
    materialize_random(layer, device=device)
    try:
        yield
    finally:
        release(layer)


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
