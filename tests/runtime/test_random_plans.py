"""Any plan of a hard model gives what plain training gives; ranks are threads, so that many plans can be tried."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import plain
import pytest
import torch
from dictated import dictate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from threads import train_in_threads

from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.formats.layout import chunks_of, layout_of
from autopar.formats.plan import Plan
from autopar.formats.program import Program
from autopar.schedules import SCHEDULES
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


@st.composite
def divisions(draw: st.DrawFn, rows: int, width: int) -> list[int]:
    """Any shares, none empty."""
    inner = st.sets(st.integers(1, max(1, rows - 1)), min_size=width - 1, max_size=width - 1)
    edges = [0, *sorted(draw(inner)), rows] if width > 1 else [0, rows]
    return [after - before for before, after in pairwise(edges)]


@st.composite
def plans(draw: st.DrawFn, name: str) -> Plan:
    """Any cuts, widths, shares, depths and schedule for a model."""
    model, graph, _ = captured(name)
    layers = len(graph.layers)
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    layout = layout_of(schedule)
    groups = draw(st.integers(1, min(4, layers // (chunks_of(layout) or 1))))
    chunks = chunks_of(layout) or draw(st.integers(1, min(3, layers // groups)))
    stages = groups * chunks
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1)))
    rows = draw(st.integers(1, 5))
    widths = draw(st.lists(st.integers(1, min(3, rows)), min_size=groups, max_size=groups))
    shares = []
    for width in widths:
        edges = (
            sorted(draw(st.sets(st.integers(1, rows - 1), min_size=width - 1, max_size=width - 1))) if rows > 1 else []
        )
        shares.append([after - before for before, after in zip([0, *edges], [*edges, rows], strict=True)])
    micro_batches = draw(st.integers(1, 5))
    warmup: list[int] | None = None
    if schedule in ("1f1b", "zb-h1", "zb-h2"):
        warmup = sorted(draw(st.lists(st.integers(1, micro_batches), min_size=stages, max_size=stages)), reverse=True)
    return dictate(graph, model, widths, micro_batches, rows, schedule, warmup, cuts, shares, chunks=chunks)


def equals_plain(name: str, plan: Plan, program: Program | None = None) -> None:
    model, graph, state = captured(name)
    random = [layer.name for layer in graph.layers if layer.random]
    truth = plain.train(
        MODELS / f"{name}.py",
        plan.micro_batches,
        plan.micro_batch_size,
        lambda module: _shares_of(graph, plan, module),
        random,
        steps=STEPS,
    )
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
            for key, buffer in load_file(Path(folder) / f"buffers-{rank}").items() if not _replicas(plan, rank) else ():
                torch.testing.assert_close(buffer, truth.buffers[key], rtol=1e-10, atol=1e-10)


def _shares_of(graph: LayerGraph, plan: Plan, module: str) -> Sequence[int]:
    """Return how the stage that a module is in divides a micro-batch."""
    stage_of = {layer: stage for stage in plan.stages for layer in stage.layers}
    layer_of = {each: layer.name for layer in graph.layers for each in layer.modules}
    while module not in layer_of:
        module = module.rpartition(".")[0]
    return stage_of[layer_of[module]].shares


def _replicas(plan: Plan, rank: int) -> int:
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
