"""How many samples a captured layer needs.

Batch normalisation in training refuses a single value per channel, as torch's modules do; its operator, which is what a
graph holds, goes on, and makes its running variance not a number.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from autopar.capture.effects import submodules

__all__ = ["least_rows"]

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
