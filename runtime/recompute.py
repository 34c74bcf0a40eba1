"""Recompute: layers that keep their inputs only, and run forward again before their backward.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. The first run is one with gradients, whose graph
saves nothing, so that operators are chosen as in the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["called_again", "forgetting"]


def forgetting() -> AbstractContextManager[object]:
    """Return a context for a forward that saves nothing for a backward."""
    return saved_tensors_hooks(lambda tensor: None, _forgotten)


def _forgotten(nothing: None) -> torch.Tensor:
    raise AssertionError("a layer that is recomputed has not been")


def called_again(module: nn.Module, rows: int, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run a layer's module once more; what it updates in place, as batch statistics, is updated once only."""
    copies = {name: buffer.clone() for name, buffer in module.named_buffers()}
    arguments = (rows, *inputs)
    result: Sequence[torch.Tensor]
    result = torch.func.functional_call(module, copies, arguments) if copies else module(*arguments)
    return result
