"""Captured: what the plain loop is told of a captured graph: its layers' names, modules, and which draw numbers."""

from __future__ import annotations

from typing import NamedTuple

from autopar.capture import LayerGraph

__all__ = ["Captured", "described"]


class Captured(NamedTuple):
    """Layers in order."""

    layers: tuple[tuple[str, tuple[str, ...], bool], ...]
    """Name, modules, whether it draws random numbers."""


def described(graph: LayerGraph) -> Captured:
    """Return what the plain loop needs to know of a graph."""
    return Captured(tuple((layer.name, layer.modules, layer.random) for layer in graph.layers))
