"""Any plan of a hard model gives what plain training gives; ranks are threads, so that many plans can be tried."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from any_plan import plans_of, truth_of
from dictated import dictate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from threads import train_in_threads

from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.formats.plan import Plan
from autopar.formats.program import Program
from autopar.schedules.expand import stages_of

MODELS = Path(__file__).parent / "models"
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
            for key, buffer in load_file(Path(folder) / f"buffers-{rank}").items() if not _replica(plan, rank) else ():
                torch.testing.assert_close(buffer, truth.buffers[key], rtol=1e-10, atol=1e-10)


def _replica(plan: Plan, rank: int) -> int:
    """Return which replica a rank is; buffers are those of the first."""
    return stages_of(plan, rank)[1]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans("everything"))
def test_skips_ties_masks_integers_and_token_counts_survive_any_plan(plan: Plan) -> None:
    equals_plain("everything", plan)


@pytest.mark.parametrize("widths", [(1, 1), (2, 1, 2)])
def test_a_tied_parameter_stays_equal_where_only_one_of_its_stages_gives_it_a_gradient(widths: tuple[int, ...]) -> None:
    model, graph, _ = captured("detached")
    equals_plain("detached", dictate(graph, model, widths, 2, 4))


@pytest.mark.parametrize("widths", [(2,), (3, 1)])
def test_a_parameter_of_several_recomputed_layers_is_reduced_when_all_of_them_have_run(widths: tuple[int, ...]) -> None:
    model, graph, _ = captured("everything")
    cuts = [len(graph.layers) - 1] if len(widths) > 1 else None
    equals_plain("everything", dictate(graph, model, widths, 2, 5, cuts=cuts, recompute=True))


@pytest.mark.parametrize("name", ["narrow_gpt", "narrow_resnet"])
def test_dropout_and_batch_statistics_survive_any_plan(name: str) -> None:
    # Two rows or more for batch statistics; blocks draw random numbers, by a generator that threads take in turn.
    @settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
    @given(plan=plans(name, most_ranks=6, most_rows=7, least_share=2))
    def trains_alike(plan: Plan) -> None:
        equals_plain(name, plan)

    trains_alike()
