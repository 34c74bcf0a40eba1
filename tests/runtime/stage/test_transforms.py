"""Layers are transformed in an order in which each transform finds what it changes, and only where one is asked for."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from autopar.options.train import TrainSettings
from autopar.runtime.messages.transport import Exchange, InProcessTransport
from autopar.runtime.stage.batch_norm import deferred_batch_norm
from autopar.runtime.stage.parameters import RankInputs, Team
from autopar.runtime.stage.stage import Stage
from autopar.runtime.stage.transforms import RankLayers, transform
from autopar.schedules.expand import expand
from drawn_models import model_case
from threads import own


def _transformed(monkeypatch: pytest.MonkeyPatch, **asked: bool) -> tuple[Any, RankLayers, list[Any]]:
    """Return a rank's layers, and what was compiled of them."""
    compiled = list[Any]()

    def compile_at_once(module: torch.nn.Module, **_: object) -> torch.nn.Module:
        compiled.append(module)
        return module

    monkeypatch.setattr(torch, "compile", compile_at_once)
    case = model_case("batch_normed")
    plan, transport = case.plan((1,), 2, 4), InProcessTransport(Exchange(), 0)
    place = TrainSettings(**asked), Team(plan, 0, transport), transport, torch.device("cpu"), 0  # type: ignore[arg-type]

    def read(names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: case.state[name].clone() for name in names}

    inputs = RankInputs(plan, expand(plan), own(case.graph), read, *place)
    return inputs, transform(inputs), compiled


def test_what_nobody_asks_for_leaves_layers_as_they_were_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, made, compiled = _transformed(monkeypatch)
    assert made.layers == {0: list(inputs.graph.layers)}
    assert (made.mesh, made.optimizer_checks, made.kinds, made.notes, compiled) == (None, (), {}, (), [])
    assert made.kinds.get(0, Stage) is Stage
    assert made.local.state().keys() == model_case("batch_normed").state.keys()


def test_layers_are_compiled_as_they_normalise(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, made, compiled = _transformed(monkeypatch, deferred_batch_norm=True, compile=True)
    captured = [layer.module for layer in inputs.graph.layers]
    compiled_calls, captured_calls = (
        [node.target for module in modules for node in module.graph.nodes] for modules in (compiled, captured)
    )
    assert deferred_batch_norm in compiled_calls
    assert deferred_batch_norm not in captured_calls
    before = {name: value.clone() for name, value in made.local.buffers.items()}
    made.before_update()
    assert any(not torch.equal(value, before[name]) for name, value in made.local.buffers.items())
