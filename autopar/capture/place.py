"""Give a layer its weights, and fit its graph to a device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.graph import Layer
from autopar.errors import FileError

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
        place(layer.module, attribute, value)
    for attribute, name in layer.buffers.items():
        place(layer.module, attribute, _find(layer, name, tensors, layer.module.get_buffer(attribute)))
    if device.type != "cpu":
        retarget(layer, device)


def _find(layer: Layer, name: str, tensors: Mapping[str, torch.Tensor], expected: torch.Tensor) -> torch.Tensor:
    if name not in tensors:
        raise FileError(f"layer {layer.name}: the weights lack {name}")
    if tensors[name].shape != expected.shape:
        found, wanted = tuple(tensors[name].shape), tuple(expected.shape)
        raise FileError(f"layer {layer.name}: {name} has shape {found} in the weights, the model needs {wanted}")
    return tensors[name]


def place(module: nn.Module, attribute: str, value: torch.Tensor) -> None:
    """Set the parameter or buffer at an attribute path of a module."""
    parent, _, last = attribute.rpartition(".")
    setattr(module.get_submodule(parent), last, value)


RANDOM_DEVIATION = 0.02
"""Of the weights that stand in for those of a model larger than memory: what most language models start from."""


def materialize_random(layer: Layer, seed: int = 0, device: torch.device = _CPU) -> None:
    """Give the parameters of a hollow layer values of the usual scale, drawn from the seed and the parameter's name.

    Matrices are normal with deviation 0.02, one-dimensional weights (of normalisations) are one, biases zero: neither
    the model's own initial weights nor good ones to train from, but numbers that a kernel meets in training. Buffers
    keep their values. :func:`release` takes the values away again.
    """
    values: dict[str, nn.Parameter] = {}
    for attribute, name in layer.parameters.items():
        if name not in values:
            shape = layer.module.get_parameter(attribute)
            values[name] = nn.Parameter(usual_values(shape, name, seed, device), requires_grad=shape.requires_grad)
        place(layer.module, attribute, values[name])
    for attribute in layer.buffers:
        place(layer.module, attribute, layer.module.get_buffer(attribute).to(device))
    if device.type != "cpu":
        retarget(layer, device)


def usual_values(shape: torch.Tensor, name: str, seed: int = 0, device: torch.device = _CPU) -> torch.Tensor:
    """Return values for a parameter of the model that has a shape alone; see :func:`materialize_random`."""
    value = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device)
    if shape.dim() < 2:
        return value.fill_(1.0 if name.endswith("weight") else 0.0)
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1
    return value.normal_(std=RANDOM_DEVIATION, generator=torch.Generator(device).manual_seed(key))


def release(layer: Layer) -> None:
    """Take the values of a layer's parameters, and their gradients, away again: it becomes hollow."""
    shapes: dict[str, nn.Parameter] = {}
    for attribute, name in layer.parameters.items():
        value = layer.module.get_parameter(attribute)
        if name not in shapes:
            shapes[name] = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=value.requires_grad)
        place(layer.module, attribute, shapes[name])


def retarget(layer: Layer, device: torch.device) -> None:
    """Make what a layer's graph creates, and its constants, live on a device."""
    buffers = set(layer.buffers)
    for name, constant in layer.module.named_buffers():
        if name not in buffers:
            place(layer.module, name, constant.to(device))
    for module in layer.module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.args = _moved(node.args, device)
                node.kwargs = _moved(node.kwargs, device)
            module.recompile()


def _moved(value: Any, device: torch.device) -> Any:  # noqa: ANN401
    return fx.node.map_aggregate(value, lambda item: device if isinstance(item, torch.device) else item)
