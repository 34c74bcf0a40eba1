"""Clipping, scaled losses and schedules that watch the loss do what they do in a plain loop."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import plain
from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import load
from autopar.errors import ModelError, TrainingError, UsageError
from autopar.formats.plan import Plan
from autopar.runtime.execute import StepRecord
from autopar.runtime.loss import LossScale
from autopar.runtime.settings import TrainSettings
from dictated import dictate
from paths import MODELS
from threads import train_in_threads

STEPS = 8
MICRO_BATCHES, ROWS = 2, 4


class Truth(NamedTuple):
    model: nn.Module
    norms: list[float | None]
    """Of all gradients, step by step; none of an overflow."""
    scale: float


def _plain(
    file: Path,
    autocast: torch.dtype | None = None,
    clip_norm: float | None = None,
    stages: Sequence[Collection[str]] = (),
) -> Truth:
    """Train as one would by hand, with torch's own scaler and clipping: of all gradients, or stage by stage."""
    source = plain.load_file(file)
    torch.manual_seed(0)
    model = source.model()
    optimizer = source.optimizer(model.parameters())
    scheduler = source.scheduler(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=autocast == torch.float16)
    data, norms, batch = source.dataset(), list[float | None](), MICRO_BATCHES * ROWS
    for step in range(STEPS):
        epoch, index = divmod(step, len(data) // batch)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        optimizer.zero_grad()
        total = 0.0
        for part in order[index * batch : (index + 1) * batch].split(ROWS):
            x, kinds = torch.utils.data.default_collate([data[at] for at in part.tolist()])
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                loss = source.loss(model(x), (x, kinds)) / MICRO_BATCHES
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
        for names in stages or [dict(model.named_parameters())]:
            own = [each for name, each in model.named_parameters() if name in names]
            nn.utils.clip_grad_norm_(own, clip_norm or float("inf"))
        norms.append(norm.item() if norm.isfinite() else None)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step(total)
    return Truth(model, norms, scaler.get_scale())


def _planned(file: Path, widths: Sequence[int], precision: str, **how: Any) -> tuple[Plan, LayerGraph]:  # noqa: ANN401
    model = load(str(file))
    graph = capture(model, model.build(0))
    plan = dictate(graph, model, widths, MICRO_BATCHES, ROWS, **how).model_copy(update={"precision": precision})
    return plan, graph


def _train(
    file: Path,
    widths: Sequence[int],
    precision: str,
    settings: TrainSettings,
    folder: Path,
    **how: Any,  # noqa: ANN401
) -> list[list[StepRecord]]:
    """Train with a thread per rank; return every rank's records."""
    model, (plan, graph) = load(str(file)), _planned(file, widths, precision, **how)
    module = model.build(0)
    state = {name: each.detach() for name, each in [*module.named_parameters(), *module.named_buffers()]}
    records: dict[int, list[StepRecord]] = {}
    train_in_threads(plan, graph, model, state, folder, STEPS, settings, records)
    return [records[rank] for rank in range(len(plan.devices))]


def _assert_equal(truth: nn.Module, folder: Path, ranks: int, tolerance: float) -> None:
    parameters = dict(truth.named_parameters())
    seen: set[str] = set()
    for rank in range(ranks):
        for name, value in load_file(folder / f"parameters-{rank}").items():
            seen.add(name)
            torch.testing.assert_close(value, parameters[name].detach(), rtol=tolerance, atol=tolerance)
    assert seen == parameters.keys()


@pytest.fixture
def double(tmp_path: Path) -> Path:
    """The model file, in float64."""
    file = tmp_path / "steep_double.py"
    text = (MODELS / "steep.py").read_text().replace("return Steep()", "return Steep().double()")
    file.write_text(text.replace("torch.randn(64, 6, ", "torch.randn(64, 6, dtype=torch.float64, "))
    return file


@pytest.mark.parametrize("widths", [(1,), (1, 1), (2, 1, 3)])
@pytest.mark.parametrize("clip_norm", [1e-3, 40.0, 1e6])
def test_one_norm_over_all_stages_clips_all_gradients(
    double: Path, widths: tuple[int, ...], clip_norm: float, tmp_path: Path
) -> None:
    truth = _plain(double, clip_norm=clip_norm)
    for records in _train(double, widths, "fp64", TrainSettings(clip_norm=clip_norm), tmp_path):
        assert [record.gradient_norm for record in records] == pytest.approx(truth.norms, rel=1e-10)
    _assert_equal(truth.model, tmp_path, sum(widths), 1e-10)


@pytest.mark.parametrize(
    ("precision", "widths", "how"),
    [
        ("fp64", (1,), {}),
        ("fp64", (2, 1, 3), {}),
        ("fp64", (2, 1), {"turns": [0]}),
        ("fp64", (2, 1), {"schedule": "interleaved", "chunks": 2}),
        ("fp64", (1, 1), {"schedule": "zb-v", "chunks": 2}),
        ("fp16", (1, 1, 1), {}),
        ("fp16", (1, 1), {"schedule": "zb-v", "chunks": 2}),
    ],
)
def test_every_stage_is_clipped_by_the_norm_of_its_own_gradients(
    double: Path, precision: str, widths: tuple[int, ...], how: dict[str, Any], tmp_path: Path
) -> None:
    text = (double if precision == "fp64" else MODELS / "steep.py").read_text()
    file = tmp_path / "untied.py"
    file.write_text(text.replace("self.again.weight = self.first.weight", "pass"))
    plan, graph = _planned(file, widths, precision, **how)
    stages = [
        {name for layer in stage.layers for name in graph.layer(layer).parameters.values()} for stage in plan.stages
    ]
    clip_norm, tolerance = (1e-3, 1e-10) if precision == "fp64" else (5.0, 2e-3)
    truth = _plain(file, torch.float16 if precision == "fp16" else None, clip_norm, stages)
    settings = TrainSettings(clip_norm=clip_norm, clip="stage")
    for records in _train(file, widths, precision, settings, tmp_path, **how):
        assert [record.overflow for record in records] == [norm is None for norm in truth.norms]
        assert {record.gradient_norm for record in records} == {None}
    _assert_equal(truth.model, tmp_path, sum(widths), tolerance)


@pytest.mark.parametrize("clip_norm", [None, 5.0])
@pytest.mark.parametrize("widths", [(1,), (1, 1), (2, 1, 1)])
def test_scaled_losses_overflow_and_recover_as_with_torchs_scaler(
    widths: tuple[int, ...], clip_norm: float | None, tmp_path: Path
) -> None:
    truth = _plain(MODELS / "steep.py", torch.float16, clip_norm)
    assert None in truth.norms
    assert any(truth.norms)
    for records in _train(MODELS / "steep.py", widths, "fp16", TrainSettings(clip_norm=clip_norm), tmp_path):
        assert [record.overflow for record in records] == [norm is None for norm in truth.norms]
        norms = [record.gradient_norm for record in records]
        assert [norm for norm in norms if norm] == pytest.approx([norm for norm in truth.norms if norm], rel=2e-3)
    _assert_equal(truth.model, tmp_path, sum(widths), 2e-3)


def test_all_ranks_see_an_overflow_of_one(tmp_path: Path) -> None:
    truth = [norm is None for norm in _plain(MODELS / "steep.py", torch.float16).norms]
    first, *others = _train(MODELS / "steep.py", (1, 2), "fp16", TrainSettings(), tmp_path)
    overflowed = [record.overflow for record in first]
    assert any(overflowed)
    # Replicas add up fewer rows each, so that less overflows.
    assert all(plainly for plainly, here in zip(truth, overflowed, strict=True) if here)
    assert all([record.overflow for record in records] == overflowed for records in others)


def test_bfloat16_needs_no_scale(tmp_path: Path) -> None:
    truth = _plain(MODELS / "steep.py", torch.bfloat16)
    (records, _) = _train(MODELS / "steep.py", (1, 1), "bf16", TrainSettings(), tmp_path)
    assert not any(record.overflow or record.gradient_norm for record in records)
    _assert_equal(truth.model, tmp_path, 2, 2e-2)


def test_a_scale_follows_torchs_rule() -> None:
    overflows = [True, False, False, False, True, False, False]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scale = LossScale(8.0, growth_interval=2)
    for overflow in overflows:
        weight.grad = torch.full((1,), float("inf") if overflow else 1.0)
        scaler.scale(torch.ones(1))
        scaler.step(optimizer)
        scaler.update()
        scale.settle(overflow)
        assert scale.value == scaler.get_scale()


def test_an_optimizer_that_runs_the_model_itself_is_refused(double: Path, tmp_path: Path) -> None:
    double.write_text(double.read_text().replace("Adam(parameters, lr=1e-3)", "LBFGS(parameters)"))
    with pytest.raises(ModelError, match="returned a LBFGS, whose step runs the model itself"):
        _train(double, (1,), "fp64", TrainSettings(), tmp_path)


@pytest.mark.parametrize("whose", ["optimizer", "scheduler"])
def test_a_step_that_raises_is_said_to_be_the_optimizers_or_the_schedulers(
    double: Path, tmp_path: Path, whose: str
) -> None:
    with double.open("a") as file:
        file.write(f"""
class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        if "{whose}" == "optimizer":
            raise ValueError("no luck")


class Scheduler(torch.optim.lr_scheduler.ConstantLR):
    steps = 0

    def step(self, *given):
        if "{whose}" == "scheduler" and self.steps:
            raise ValueError("no luck")
        self.steps += 1


def optimizer(parameters):
    return Optimizer(parameters, lr=0.1)


def scheduler(optimizer):
    return Scheduler(optimizer)
""")
    with pytest.raises(TrainingError, match=rf"step 0, U@0\): the {whose}'s step raised ValueError: no luck"):
        _train(double, (1,), "fp64", TrainSettings(), tmp_path)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_norm_to_clip_to_is_positive(value: float) -> None:
    with pytest.raises(UsageError, match="`clip_norm` must be positive"):
        TrainSettings(clip_norm=value)
