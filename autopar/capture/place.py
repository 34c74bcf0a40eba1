"""Give a layer its weights, and fit its graph to a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.graph import Layer
from autopar.errors import FileError

__all__ = ["materialize", "retarget"]


_CPU = torch.device("cpu")


def materialize(layer: Layer, tensors: Mapping[str, torch.Tensor], device: torch.device = _CPU) -> None:
    """Set a layer's parameters and buffers to the caller's objects, by their names in the model.

    Layers that are given the same ``nn.Parameter`` share it, so a parameter used twice in a stage is one. The tensors
    are expected on ``device``; what the layer makes itself is made there too.

    Raises:
        FileError: one is missing or has another shape.
    """
    for attribute, name in layer.parameters.items():
        value = _find(layer, name, tensors, layer.module.get_parameter(attribute))
        if not isinstance(value, nn.Parameter):
            raise TypeError(f"layer {layer.name}: {name} must be given as an nn.Parameter")
        _set(layer.module, attribute, value)
    for attribute, name in layer.buffers.items():
        _set(layer.module, attribute, _find(layer, name, tensors, layer.module.get_buffer(attribute)))
    if device.type != "cpu":
        retarget(layer, device)


def _find(layer: Layer, name: str, tensors: Mapping[str, torch.Tensor], expected: torch.Tensor) -> torch.Tensor:
    if name not in tensors:
        raise FileError(f"layer {layer.name}: the weights lack {name}")
    if tensors[name].shape != expected.shape:
        found, wanted = tuple(tensors[name].shape), tuple(expected.shape)
        raise FileError(f"layer {layer.name}: {name} has shape {found} in the weights, the model needs {wanted}")
    return tensors[name]


def _set(module: nn.Module, attribute: str, value: torch.Tensor) -> None:
    parent, _, last = attribute.rpartition(".")
    setattr(module.get_submodule(parent), last, value)


def retarget(layer: Layer, device: torch.device) -> None:
    """Make what a layer's graph creates, and its constants, live on a device."""
    buffers = set(layer.buffers)
    for name, constant in layer.module.named_buffers():
        if name not in buffers:
            _set(layer.module, name, constant.to(device))
    for module in layer.module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.args = _moved(node.args, device)
                node.kwargs = _moved(node.kwargs, device)
            module.recompile()


def _moved(value: Any, device: torch.device) -> Any:  # noqa: ANN401
    return fx.node.map_aggregate(value, lambda item: device if isinstance(item, torch.device) else item)
