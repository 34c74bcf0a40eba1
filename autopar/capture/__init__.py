"""Capture: a user's model file becomes a graph of layers.

In: a model, its loss, its optimizer, and an example batch (``model/source.py``, ``model/batch.py``). Out: a
``LayerGraph`` (``graph.py``), whose layers run on their own, with a split backward where a schedule asks for it.
``layers/export.py`` has the steps in their order: read it first. What cannot be captured is refused by
``model/effects.py`` and ``layers/check.py``, with its line. ``split/`` divides a layer's tensors among the devices of a
team, ``cache/`` keeps what was captured. ``plain/`` is the plain loop that every training run is held to; it uses the
model alone.
"""

from autopar.capture.graph import Layer, LayerGraph, TensorSpec
from autopar.capture.layers.export import capture, capture_module
from autopar.capture.model.batch import named_tensors, slice_rows
from autopar.capture.model.meta import materialize, materialize_random, release, retarget
from autopar.capture.model.source import UserModel, load

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
