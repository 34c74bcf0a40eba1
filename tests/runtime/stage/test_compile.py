"""Compiled layers train as plain ones do, and one that does not compile is run as it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import plain
from autopar.capture.export import capture
from autopar.capture.source import load
from autopar.errors import UsageError
from autopar.runtime.messages.in_process import Exchange, InProcessTransport
from autopar.runtime.settings import TrainSettings
from autopar.runtime.start.job import Job
from autopar.runtime.start.launch import RunOptions, run
from autopar.schedules.expand import expand
from dictated import dictate
from paths import MODELS

MICRO_BATCHES, ROWS, STEPS = 2, 4, 3
# What torch's compiler warns of is none of ours.
pytestmark = pytest.mark.filterwarnings("ignore")
needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU"
)


def _job(file: Path, settings: TrainSettings, precision: str = "fp64", width: int = 1, **wanted: Any) -> Job:  # noqa: ANN401
    """Return the job of a stage's first rank."""
    model = load(str(file))
    module = model.build(0)
    state = {key: value.detach() for key, value in module.state_dict().items()}
    graph = capture(model, module)
    plan = dictate(graph, model, (width,), MICRO_BATCHES, ROWS, **wanted)
    plan = plan.model_copy(update={"precision": precision})
    place = InProcessTransport(Exchange(), 0), torch.device("cpu"), lambda step, position: None
    return Job(
        plan, expand(plan), 0, graph, model, lambda names: {n: state[n].clone() for n in names}, *place, settings
    )


def _assert_alike(one: Job, other: Job, tolerance: float) -> None:
    for step in range(STEPS):
        assert one.step(step).loss == pytest.approx(other.step(step).loss, rel=tolerance)
    expected = other.state()
    for name, value in one.state().items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=name)


@needs_a_compiler
@pytest.mark.parametrize(
    ("name", "settings", "precision", "recompute", "tolerance"),
    [
        ("dropout", {}, "fp64", True, 1e-10),
        ("small_normed", {"deferred_batch_norm": True}, "fp64", True, 1e-10),
        ("normed_layers", {}, "fp64", False, 1e-10),
        ("small_normed", {}, "bf16", False, 1e-2),
    ],
)
def test_compiled_layers_train_as_plain_ones(
    name: str, settings: dict[str, bool], precision: str, recompute: bool, tolerance: float, tmp_path: Path
) -> None:
    file = MODELS / f"{name}.py"
    if precision != "fp64":
        file = tmp_path / file.name
        file.write_text((MODELS / file.name).read_text().replace("torch.float64", "torch.float32"))
    plainly = _job(file, TrainSettings(**settings), precision, recompute=recompute)  # type: ignore[arg-type]
    compiled = _job(file, TrainSettings(**settings, compile=True), precision, recompute=recompute)  # type: ignore[arg-type]
    before = {key: value.clone() for key, value in compiled.state().items()}
    assert compiled.warm_up() == []
    assert all(torch.equal(value, before[key]) for key, value in compiled.state().items())
    _assert_alike(compiled, plainly, tolerance)


def _counting(made: list[object], fails: Callable[[int], bool]) -> Callable[..., object]:
    """Stand in for ``torch.compile``: what it returns runs as it is, or fails in its first run."""

    def stand_in(module: torch.nn.Module, **options: object) -> object:
        made.append(module)
        index = len(made)

        def run(*arguments: object) -> object:
            if fails(index):
                raise RuntimeError("no code for it\nand more")
            return module(*arguments)

        return run

    return stand_in


def test_layers_of_a_kind_share_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(torch, "compile", _counting(made, lambda index: False))
    compiled = _job(MODELS / "dropout.py", TrainSettings(compile=True))
    layers = [layer for stage in compiled.stages.values() for layer in stage.layers]
    assert len(made) == len({layer.fingerprint for layer in layers}) < len(layers)
    assert compiled.warm_up() == []
    _assert_alike(compiled, _job(MODELS / "dropout.py", TrainSettings()), 0.0)


def test_a_layer_that_does_not_compile_is_named_and_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(torch, "compile", _counting(made, lambda index: index == 2))
    compiled = _job(MODELS / "batch_normed.py", TrainSettings(compile=True))
    assert compiled.warm_up() == ["layer 1 is not compiled: RuntimeError: no code for it"]
    _assert_alike(compiled, _job(MODELS / "batch_normed.py", TrainSettings()), 0.0)


def test_halves_of_backwards_are_not_compiled() -> None:
    with pytest.raises(UsageError, match=r"`compile`: the program \(schedule zb-v\) runs backwards in halves"):
        _job(MODELS / "small_normed.py", TrainSettings(compile=True), schedule="zb-v", chunks=2)


def test_sharded_layers_are_not_compiled() -> None:
    with pytest.raises(UsageError, match="`compile`: sharded layers are not compiled"):
        _job(MODELS / "small_normed.py", TrainSettings(compile=True), width=2, shard="parameters")


@needs_a_compiler
def test_compiled_replicas_with_synchronised_statistics_train_as_the_whole_model(tmp_path: Path) -> None:
    file = MODELS / "small_normed.py"
    model = load(str(file))
    plan = dictate(capture(model, model.build(0)), model, (2,), MICRO_BATCHES, ROWS, shares=[[3, 1]])
    settings = TrainSettings(sync_batch_norm=True, compile=True)
    outcome = run(plan, str(file), RunOptions(steps=STEPS, save=tmp_path / "trained", settings=settings))
    truth = plain.train(file, MICRO_BATCHES, ROWS, lambda name: (ROWS,), steps=STEPS)
    assert outcome.report.notes == ()
    assert outcome.report.loss == pytest.approx(truth.losses, rel=1e-10)
    (file,) = (tmp_path / "trained").glob("model-00001-of-00001-*.safetensors")
    for name, value in load_file(file).items():
        expected = {**truth.parameters, **truth.buffers}[name]
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10, msg=name)
