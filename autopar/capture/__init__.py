"""Capture: a user's model file becomes a graph of layers."""

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
