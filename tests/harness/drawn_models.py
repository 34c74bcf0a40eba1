"""Models and plans that are drawn at random, trained in threads beside plain training."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file

from any_plan import plans_of, truth_of
from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.formats.plan import Plan
from autopar.formats.program import Program
from autopar.schedules.expand import stages_of
from paths import MODELS
from threads import train_in_threads

STEPS = 2


@cache
def captured(name: str) -> tuple[UserModel, LayerGraph, dict[str, torch.Tensor]]:
    model = load(str(MODELS / f"{name}.py"))
    module = model.build(0)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state = {key: value.detach().clone() for key, value in state.items()}
    return model, capture(model, module), state


def plans(name: str, **limits: int) -> st.SearchStrategy[Plan]:
    """Draw plans of a model, within limits of :func:`any_plan.plans_of`."""
    model, graph, _ = captured(name)
    return plans_of(graph, model, **limits)


def equals_plain(name: str, plan: Plan, program: Program | None = None) -> None:
    model, graph, state = captured(name)
    truth = truth_of(MODELS / f"{name}.py", graph, plan, STEPS)
    with tempfile.TemporaryDirectory() as folder:
        losses = train_in_threads(plan, graph, model, state, Path(folder), STEPS, program=program)
        if graph.loss == "mean":
            assert losses == pytest.approx(truth.losses, rel=1e-12)
        largest = max(float(gradient.abs().max()) for gradient in truth.gradients.values())
        for rank in range(len(plan.devices)):
            for key, gradient in load_file(Path(folder) / f"gradients-{rank}").items():
                assert float((gradient - truth.gradients[key]).abs().max()) <= 1e-12 * largest, key
            for key, parameter in load_file(Path(folder) / f"parameters-{rank}").items():
                torch.testing.assert_close(parameter, truth.parameters[key], rtol=0, atol=1e-10)
            for key, buffer in load_file(Path(folder) / f"buffers-{rank}").items() if not replica(plan, rank) else ():
                torch.testing.assert_close(buffer, truth.buffers[key], rtol=1e-10, atol=1e-10)


def replica(plan: Plan, rank: int) -> int:
    """Return which replica a rank is; buffers are those of the first."""
    return stages_of(plan, rank)[1]
