"""Batch normalisations of layers: where they are called, in graphs and in modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.capture.graph import Layer

__all__ = ["calls_of", "modules_of", "normalizes", "override", "rewritable"]


def calls_of(module: nn.Module) -> list[tuple[fx.GraphModule, fx.Node]]:
    """Return the nodes of a captured layer, sub-graphs included, that normalise by the statistics of their input."""
    graphs = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    nodes = [(part, node) for part in graphs for node in part.graph.nodes]
    return [(part, node) for part, node in nodes if node.target is torch.ops.aten.batch_norm.default and node.args[5]]


def modules_of(module: nn.Module) -> list[_BatchNorm]:
    """Return the modules of a layer of ``layers(model)`` that do."""
    return [each for each in module.modules() if isinstance(each, _BatchNorm) and each.training]


def normalizes(layer: Layer) -> bool:
    """Tell whether a layer normalises by batch statistics."""
    return bool(calls_of(layer.module) or modules_of(layer.module))


def rewritable(layer: Layer) -> Layer:
    """Return a captured layer whose graphs may be changed without changing the given one; tensors are the same."""
    module = layer.module
    if not isinstance(module, fx.GraphModule):
        return layer
    return replace(layer, module=_copy(module))


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    copied = fx.GraphModule(module, copy.deepcopy(module.graph), class_name="Layer")
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, _copy(child))
    return copied


def override(module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let a module run another forward."""
    module.forward = forward
