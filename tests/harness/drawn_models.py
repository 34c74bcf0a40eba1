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
from in_teams import in_teams
from paths import MODELS
from threads import train_in_threads
from training_cases import own_part

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


@st.composite
def team_plans(draw: st.DrawFn, name: str, most_ranks: int = 8, **limits: int) -> Plan:
    """Draw plans some of whose replicas several ranks run together, of one size for every group of devices."""
    plan = draw(plans(name, most_groups=3, most_ranks=most_ranks // 2, **limits))
    sizes, left = [1] * len(plan.stages), most_ranks - len(plan.devices)
    for chunks in plan.groups:
        replicas = plan.stages[chunks[0]].replicas
        size = draw(st.sampled_from([each for each in (1, 2, 4) if (each - 1) * replicas <= left]))
        left -= (size - 1) * replicas
        for stage in chunks:
            sizes[stage] = size
    return in_teams(captured(name)[1], plan, sizes, sequence=draw(st.booleans()))


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
                expected = own_part(plan, rank, key, truth.gradients[key])
                assert float((gradient - expected).abs().max()) <= 1e-12 * largest, key
            for key, parameter in load_file(Path(folder) / f"parameters-{rank}").items():
                expected = own_part(plan, rank, key, truth.parameters[key])
                torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-10)
            for key, buffer in load_file(Path(folder) / f"buffers-{rank}").items() if not replica(plan, rank) else ():
                torch.testing.assert_close(buffer, truth.buffers[key], rtol=1e-10, atol=1e-10)


def replica(plan: Plan, rank: int) -> int:
    """Return which replica a rank is; buffers are those of the first."""
    return stages_of(plan, rank)[1]
