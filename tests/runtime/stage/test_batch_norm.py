"""Batch normalisation, deferred or synchronised, gives what torch gives of whole mini-batches, or micro-batches."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import plain
from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.runtime.settings import TrainSettings
from dictated import dictate
from paths import MODELS
from threads import train_in_threads

STEPS = 3
DEFERRED, SYNCED = TrainSettings(deferred_batch_norm=True), TrainSettings(sync_batch_norm=True)


@cache
def _captured(name: str) -> tuple[UserModel, LayerGraph, dict[str, torch.Tensor]]:
    model = load(str(MODELS / f"{name}.py"))
    module = model.build(0)
    state = {key: value.detach().clone() for key, value in module.state_dict().items()}
    return model, capture(model, module), state


def _plan(name: str, **wanted: Any) -> Plan:  # noqa: ANN401
    model, graph, _ = _captured(name)
    return dictate(graph, model, **wanted)


def _assert_equals_plain(name: str, plan: Plan, settings: TrainSettings, folder: Path) -> None:
    model, graph, state = _captured(name)
    stage_of = {layer: stage for stage in plan.stages for layer in stage.layers}

    def shares_of(module: str) -> tuple[int, ...]:
        if settings.sync_batch_norm:
            return (plan.micro_batch_size,)
        while module not in stage_of:
            module = module.rpartition(".")[0]
        return stage_of[module].shares if stage_of[module].division == "split" else stage_of[module].shares[:1]

    deferred = settings.deferred_batch_norm
    file = MODELS / f"{name}.py"
    truth = plain.train(file, plan.micro_batches, plan.micro_batch_size, shares_of, steps=STEPS, deferred=deferred)
    losses = train_in_threads(plan, graph, model, state, folder, STEPS, settings)
    assert losses == pytest.approx(truth.losses, rel=1e-12)
    largest = max(float(gradient.abs().max()) for gradient in truth.gradients.values())
    for rank in range(len(plan.devices)):
        for key, gradient in load_file(folder / f"gradients-{rank}").items():
            assert float((gradient - truth.gradients[key]).abs().max()) <= 1e-12 * largest, key
        kept = load_file(folder / f"parameters-{rank}") | load_file(folder / f"buffers-{rank}")
        for key, value in kept.items():
            expected = {**truth.parameters, **truth.buffers}[key]
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10, msg=f"{key} on rank {rank}")


PLANS = {
    "one rank": {"widths": (1,), "micro_batches": 3, "rows": 4},
    "uneven shares": {"widths": (2, 3), "micro_batches": 3, "rows": 7, "schedule": "1f1b"},
    "single rows": {"widths": (1, 2), "micro_batches": 2, "rows": 3, "cuts": [1], "shares": [[3], [2, 1]]},
    "recomputed": {"widths": (2, 1), "micro_batches": 3, "rows": 5, "schedule": "gpipe", "recompute": True},
    "chunks": {"widths": (2, 1), "micro_batches": 4, "rows": 5, "schedule": "interleaved", "chunks": 2},
    "in turn": {"widths": (2, 1, 2), "micro_batches": 3, "rows": 4, "turns": [0, 2]},
    "one waits": {"widths": (2, 2), "micro_batches": 1, "rows": 4, "turns": [0]},
}


@pytest.mark.parametrize("plan", [name for name in PLANS if name != "single rows"])
@pytest.mark.reliability(41)
def test_deferred_statistics_are_those_of_whole_mini_batches(plan: str, tmp_path: Path) -> None:
    _assert_equals_plain("batch_normed", _plan("batch_normed", **PLANS[plan]), DEFERRED, tmp_path)


@pytest.mark.parametrize("plan", ["one rank", "uneven shares", "single rows", "recomputed", "chunks"])
@pytest.mark.reliability(41)
def test_synchronised_statistics_are_those_of_whole_micro_batches(plan: str, tmp_path: Path) -> None:
    _assert_equals_plain("batch_normed", _plan("batch_normed", **PLANS[plan]), SYNCED, tmp_path)


@pytest.mark.parametrize("settings", [DEFERRED, SYNCED], ids=["deferred", "synced"])
@pytest.mark.parametrize("plan", ["one rank", "recomputed", "uneven shares"])
def test_cumulative_averages_of_listed_layers_too(plan: str, settings: TrainSettings, tmp_path: Path) -> None:
    _assert_equals_plain("normed_layers", _plan("normed_layers", **PLANS[plan]), settings, tmp_path)


def test_a_single_value_per_channel_is_refused_as_torch_refuses_it(tmp_path: Path) -> None:
    model, graph, state = _captured("batch_normed")
    plan = _plan("batch_normed", **PLANS["single rows"])
    assert {layer.least_rows for layer in graph.layers} == {1, 2}
    for settings in (TrainSettings(), DEFERRED):
        with pytest.raises(UsageError, match=r"1 sample of a micro-batch at once to layer \S+, which takes at least 2"):
            train_in_threads(plan, graph, model, state, tmp_path, 1, settings)


def test_a_model_without_batch_normalisation_is_refused(tmp_path: Path) -> None:
    model, graph, state = _captured("everything")
    plan = _plan("everything", widths=(1,), micro_batches=1, rows=2)
    with pytest.raises(UsageError, match="`sync_batch_norm`: the model has no batch normalisation"):
        train_in_threads(plan, graph, model, state, tmp_path, 1, SYNCED)
