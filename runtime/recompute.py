"""Recompute: layers that keep their inputs only, and run forward again before their backward.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. The first run is one with gradients, whose graph
saves nothing, so that operators are chosen as in the second. The second sees what the first saw: buffers and model
inputs that a forward writes are kept as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from autopar.capture.graph import Layer

__all__ = ["Before", "called", "called_again", "forgetting", "kept"]


class Before(NamedTuple):
    """What a layer is about to write, as it was before its first run."""

    inputs: dict[str, torch.Tensor]
    """By name."""
    buffers: dict[str, torch.Tensor]
    """By attribute of the layer's module."""


def forgetting() -> AbstractContextManager[object]:
    """Return a context for a forward that saves nothing for a backward."""
    return saved_tensors_hooks(lambda tensor: None, _forgotten)


def _forgotten(nothing: None) -> torch.Tensor:
    raise AssertionError("a layer that is recomputed has not been")


def kept(layer: Layer, values: Mapping[str, torch.Tensor]) -> Before:
    """Copy what a layer's forward writes, before it first runs on ``values``."""
    inputs = () if layer.writes is None else layer.writes.inputs
    copies = {attribute: buffer.detach().clone() for attribute, buffer in _written_buffers(layer).items()}
    return Before({name: values[name].clone() for name in inputs}, copies)


def called(layer: Layer, rows: int, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run a layer's module.

    Buffers and parameters that it writes are copies meanwhile, and are given the copies' values at the end: what the
    backward of this micro-batch saved of them stays as it is when the next one's forward writes them.
    """
    held = {**_written_buffers(layer), **_written_parameters(layer)}
    result: Sequence[torch.Tensor]
    if not held:
        result = layer.module(rows, *inputs)
        return result
    # A parameter's copy hands its gradient on to the parameter. What the module assigns anew is in the dict, too.
    copies = {attribute: tensor.clone() for attribute, tensor in held.items()}
    result = torch.func.functional_call(layer.module, copies, (rows, *inputs))
    with torch.no_grad():
        for attribute, tensor in held.items():
            tensor.copy_(copies[attribute])
    return result


def called_again(layer: Layer, rows: int, inputs: Sequence[torch.Tensor], before: Before) -> Sequence[torch.Tensor]:
    """Run a layer's module once more; what it updates in place, as batch statistics, is updated once only."""
    module, arguments = layer.module, (rows, *inputs)
    written = before.buffers
    copies = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in written} | written
    result: Sequence[torch.Tensor]
    result = torch.func.functional_call(module, copies, arguments) if copies else module(*arguments)
    return result


def _written_buffers(layer: Layer) -> dict[str, torch.Tensor]:
    names = () if layer.writes is None else layer.writes.buffers
    return {each: layer.module.get_buffer(each) for each in _first_attributes(layer.buffers, names)}


def _written_parameters(layer: Layer) -> dict[str, torch.Tensor]:
    names = () if layer.writes is None else layer.writes.parameters
    return {each: layer.module.get_parameter(each) for each in _first_attributes(layer.parameters, names)}


def _first_attributes(attributes: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Return one attribute of each of the names: others that hold the same tensor follow it."""
    if not names:
        return []
    by_name = {name: attribute for attribute, name in reversed(list(attributes.items()))}
    return [by_name[name] for name in names]
