"""Precision: in what type the forwards of a plan compute, and in what type its tensors cross."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from autopar.capture.evaluation import EvaluationGraph
from autopar.capture.graph import LayerGraph, TensorSpec
from autopar.formats.plan import Plan
from autopar.formats.profile import Precision

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_of(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return what makes the context that every layer's forward runs in."""
    dtype = _AUTOCAST.get(precision)
    if dtype is None:
        return nullcontext
    return lambda: torch.autocast(device.type, dtype)


def crossing_specs(plan: Plan, graph: LayerGraph | EvaluationGraph) -> list[TensorSpec]:
    """Return the tensors that layers of the model make and others read, of the types that they have in the plan.

    The graph knows the types that the model has without autocast; those with it were found when it was profiled.
    """
    specs = [tensor for tensor in graph.tensors if tensor.producer is not None]
    if plan.precision not in _AUTOCAST:
        return specs
    floating = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, *_AUTOCAST.values())}
    planned = {tensor.name: floating[tensor.dtype] for tensor in plan.tensors if tensor.dtype in floating}
    return [
        replace(spec, dtype=planned.get(spec.name, spec.dtype)) if spec.dtype == torch.float32 else spec
        for spec in specs
    ]
