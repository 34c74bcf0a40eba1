"""Which tensors between layers a gradient flows back over: those that lead from the loss to something trained.

Nothing is computed: layers run on fake tensors, forwards to find what depends on trained parameters, and the graphs
that autograd makes of them are walked back from the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.capture.frontier import walk
from autopar.capture.graph import Layer, LayerGraph
from autopar.capture.hollow import faked_parameter

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class _Reach(NamedTuple):
    """Of every output of a layer: whether it requires a gradient, and the inputs that its backward leads to."""

    requires_grad: bool
    inputs: frozenset[int]


def gradient_flow(graph: LayerGraph) -> dict[str, bool]:
    """Return for every output of a layer whether a gradient flows back from its readers.

    That a tensor requires a gradient does not tell: what reads it may detach it, or lead to no loss. Layers that are
    alike, and whose inputs require gradients alike, are looked at once.
    """
    shapes = {tensor.name: (tensor.shape(2), tensor.dtype) for tensor in graph.tensors}
    required = dict.fromkeys(graph.inputs, False)
    seen: dict[tuple[str, tuple[bool, ...]], tuple[_Reach, ...]] = {}
    reaches: list[tuple[Layer, tuple[_Reach, ...]]] = []
    for layer in graph.layers:
        flags = tuple(required[name] for name in layer.inputs)
        key = layer.fingerprint, flags
        if key not in seen:
            seen[key] = _reaches(layer, flags, shapes)
        reaches.append((layer, seen[key]))
        required |= {name: each.requires_grad for name, each in zip(layer.outputs, seen[key], strict=True)}
    flows = {graph.outputs[0]}
    for layer, found in reversed(reaches):
        for name, reach in zip(layer.outputs, found, strict=True):
            if name in flows:
                flows |= {layer.inputs[index] for index in reach.inputs}
    return {name: name in flows for layer, _ in reaches for name in layer.outputs}


def _reaches(layer: Layer, flags: tuple[bool, ...], shapes: Shapes) -> tuple[_Reach, ...]:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    held: dict[str, Any] = {name: faked_parameter(mode, value) for name, value in layer.module.named_parameters()}
    held |= {name: mode.from_tensor(layer.module.get_buffer(name), static_shapes=True) for name in layer.buffers}
    with mode:
        inputs = []
        for name, flag in zip(layer.inputs, flags, strict=True):
            shape, dtype = shapes[name]
            inputs.append(torch.empty(shape, dtype=dtype).requires_grad_(flag))
        outputs = torch.func.functional_call(layer.module, held, (2, *inputs))
    leaves = {get_gradient_edge(leaf).node: index for index, leaf in enumerate(inputs) if flags[index]}
    found = []
    for output in outputs:
        known = walk([get_gradient_edge(output).node]) if output.requires_grad else {}
        found.append(_Reach(bool(output.requires_grad), frozenset(at for leaf, at in leaves.items() if leaf in known)))
    return tuple(found)
