"""Outline: a model captured without values for its parameters, for whoever needs its graph and shapes only."""

from __future__ import annotations

from torch import nn

from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel
from autopar.errors import CaptureError, ModelError


def outline(model: UserModel, seed: int) -> tuple[nn.Module, LayerGraph]:
    """Build and capture a model that may be larger than memory; its buffers have values.

    One that cannot do without the values of its parameters is built with them.

    Raises:
        ModelError: as :func:`autopar.capture.export.capture`.
        CaptureError: likewise.
    """
    try:
        module = model.build(seed, hollow=True)
        graph = capture(model, module)
    except (CaptureError, ModelError):
        # It wants them, or what is wrong with it is said where it has them.
        module = None
    if module is None or not (graph.portable or _complete(module, graph)):
        module = model.build(seed)
        graph = capture(model, module)
    return module, graph


def _complete(module: nn.Module, graph: LayerGraph) -> bool:
    """Tell whether layers hold all parameters: listed ones may read others, which nobody would give values."""
    held = {name for layer in graph.layers for name in layer.parameters.values()}
    return held.issuperset(name for name, _ in module.named_parameters())
