"""How many samples a captured layer needs.

Batch normalisation in training refuses a single value per channel, as torch's modules do; its operator, which is what a
graph holds, goes on, and makes its running variance not a number. And a model may do something else with a single
sample (``if len(x) == 1:``), of which a graph that was captured with two shows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import compress
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.nn import functional

from autopar.capture.batch import row_count
from autopar.capture.effects import submodules
from autopar.capture.graph import Layer
from autopar.capture.unchanged import kept_parameters, unchanged

_ALLOWED = 1e-3
"""Relative difference of what model and layers give; another order of sums makes far less."""

_INPUT, _TRAINING = 0, 5
"""Places of arguments of ``batch_norm``."""


def least_rows(module: fx.GraphModule) -> int:
    """Return the least number of samples that the forward of a layer can be given."""
    found = 1
    for node in module.graph.nodes:
        for inner in submodules(node):
            found = max(found, least_rows(inner))
        if node.target is torch.ops.aten.batch_norm.default and node.args[_TRAINING] is True:
            shape = node.args[_INPUT].meta["val"].shape
            if all(isinstance(size, int) for size in shape[2:]) and math.prod(shape[2:]) == 1:
                found = 2
    return found


def right_for_one(
    step: nn.Module,
    layers: Sequence[Layer],
    tensors: Mapping[str, torch.Tensor],
    compared: Sequence[bool] | None = None,
) -> bool:
    """Tell whether a model's layers give for one sample what the model gives for it.

    Args:
        step: the model with its loss, or with its outputs.
        layers: captured from it, in order.
        tensors: a batch of two samples or more, by name; on two of them layers that differ from the model tell nothing.
        compared: which of what ``step`` returns the layers give; none: all.
    """
    return _alike(step, layers, _first(tensors, 1), compared) or not _alike(step, layers, _first(tensors, 2), compared)


def _first(tensors: Mapping[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    return {name: tensor[:rows].clone() for name, tensor in tensors.items()}


def _alike(
    step: nn.Module, layers: Sequence[Layer], tensors: Mapping[str, torch.Tensor], compared: Sequence[bool] | None
) -> bool:
    known = {name: tensor.clone() for name, tensor in tensors.items()}
    rows = row_count(tensors)
    found: tuple[torch.Tensor, ...] = ()
    try:
        # Batch normalisation is known by its layers: elsewhere a single sample may do.
        with unchanged(step), kept_parameters(step), patch.object(functional, "_verify_batch_size"):
            expected = list(step(*(tensor.clone() for tensor in tensors.values())))
        with unchanged(step), kept_parameters(step):
            for layer in layers:
                found = layer.module(rows, *(known[name].detach() for name in layer.inputs))
                known.update(zip(layer.outputs, found, strict=True))
    except Exception:
        return False
    if compared is not None:
        expected = list(compress(expected, compared))
    return all(
        one.shape == other.shape and torch.allclose(one, other, _ALLOWED, _ALLOWED * 1e-3, equal_nan=True)
        for one, other in zip(expected, found[-len(expected) :], strict=True)
    )
