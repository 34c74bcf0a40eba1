"""Capture: a user's model file becomes a graph of layers.

In: a model, its loss, its optimizer, and an example batch (``source.py``, ``batch.py``). Out: a ``LayerGraph``, whose
layers run on their own, with a split backward where a schedule asks for it. ``export.py`` has the steps in their order:
read it first. What cannot be captured is refused by ``effects.py`` and ``check.py``, with its line.
``plain.py`` is the plain loop that every training run is held to; it uses none of the rest.
"""

from autopar.capture.batch import named_tensors, slice_rows
from autopar.capture.export import capture, capture_module
from autopar.capture.graph import Layer, LayerGraph, TensorSpec
from autopar.capture.meta import materialize, materialize_random, release, retarget
from autopar.capture.source import UserModel, load

__all__ = [
    "Layer",
    "LayerGraph",
    "TensorSpec",
    "UserModel",
    "capture",
    "capture_module",
    "load",
    "materialize",
    "materialize_random",
    "named_tensors",
    "release",
    "retarget",
    "slice_rows",
]
