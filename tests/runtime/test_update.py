"""Clipping, scaled losses and schedules that watch the loss do what they do in a plain loop."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from autopar.errors import ModelError, TrainingError
from autopar.formats.plan import Plan
from autopar.options.train import TrainSettings
from autopar.runtime.job import DEFAULTS
from autopar.runtime.loss import LossScale, StepRecord
from drawn_models import model_case
from paths import MODELS
from training_cases import TYPES, Case, make_case

STEPS = 8
MICRO_BATCHES, ROWS = 2, 4


def _train(case: Case, plan: Plan, folder: Path, settings: TrainSettings = DEFAULTS) -> list[list[StepRecord]]:
    """Train with a thread per rank; return every rank's records."""
    records: dict[int, list[StepRecord]] = {}
    case.train(plan, folder, STEPS, settings, records)
    return [records[rank] for rank in range(len(plan.devices))]


def _trained_plainly(
    case: Case, precision: str = "fp64", clip_norm: float | None = None, clipped: Sequence[Collection[str]] = ()
) -> tuple[dict[str, nn.Parameter], list[float | None]]:
    """Train in one process with torch's scaler; return parameters, and the norms of all gradients, none of an overflow.

    Gradients are clipped to ``clip_norm`` by the norm of all, or by that of each of the sets of names ``clipped``.
    """
    user, model, data = case.model, case.model.build(), case.model.dataset()
    optimizer = user.make_optimizer(model.named_parameters())
    scheduler, scaler = user.make_scheduler(optimizer), torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    order, norms = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)), list[float | None]()
    for rows in order[: STEPS * MICRO_BATCHES * ROWS].view(STEPS, MICRO_BATCHES, ROWS):
        optimizer.zero_grad()
        total = 0.0
        for part in rows.tolist():
            batch = torch.utils.data.default_collate([data[index] for index in part])
            with torch.autocast("cpu", TYPES.get(precision), enabled=precision in TYPES):
                loss = user.functions["loss"](model(batch[0]), batch) / MICRO_BATCHES
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        parameters = dict(model.named_parameters())
        norm = nn.utils.get_total_norm([each.grad for each in parameters.values()])
        norms.append(norm.item() if norm.isfinite() else None)
        for names in (clipped or [parameters]) if clip_norm is not None else ():
            nn.utils.clip_grad_norm_([each for name, each in parameters.items() if name in names], clip_norm)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step(total)  # type: ignore[attr-defined]
    return parameters, norms


def _close(truth: Mapping[str, torch.Tensor], plan: Plan, folder: Path, tolerance: float) -> None:
    for rank in range(len(plan.devices)):
        for name, value in load_file(folder / f"parameters-{rank}").items():
            torch.testing.assert_close(value, truth[name].detach(), rtol=tolerance, atol=tolerance)


@pytest.fixture
def double(tmp_path: Path) -> Case:
    text = (MODELS / "steep.py").read_text().replace("return Steep()", "return Steep().double()")
    text = text.replace("torch.randn(64, 6, ", "torch.randn(64, 6, dtype=torch.float64, ")
    return make_case(tmp_path / "steep_double.py", text)


def _single(precision: str, widths: tuple[int, ...]) -> tuple[Case, Plan]:
    case = model_case("steep")
    return case, case.plan(widths, MICRO_BATCHES, ROWS).model_copy(update={"precision": precision})


@pytest.mark.parametrize("widths", [(1,), (1, 1), (2, 1, 3)])
@pytest.mark.parametrize("clip_norm", [1e-3, 40.0, 1e6])
def test_one_norm_over_all_stages_clips_all_gradients(
    double: Case, widths: tuple[int, ...], clip_norm: float, tmp_path: Path
) -> None:
    plan = double.plan(widths, MICRO_BATCHES, ROWS)
    truth, norms = _trained_plainly(double, clip_norm=clip_norm)
    for records in _train(double, plan, tmp_path, TrainSettings(clip_norm=clip_norm)):
        assert [record.gradient_norm for record in records] == pytest.approx(norms, rel=1e-10)
    _close(truth, plan, tmp_path, 1e-10)


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
    double: Case, precision: str, widths: tuple[int, ...], how: dict[str, Any], tmp_path: Path
) -> None:
    text = (double.file if precision == "fp64" else MODELS / "steep.py").read_text()
    case = make_case(tmp_path / "untied.py", text.replace("self.again.weight = self.first.weight", "pass"))
    plan = case.plan(widths, MICRO_BATCHES, ROWS, **how).model_copy(update={"precision": precision})
    held = ([case.graph.layer(layer) for layer in stage.layers] for stage in plan.stages)
    stages = [{name for layer in layers for name in layer.parameters.values()} for layers in held]
    clip_norm, tolerance = (1e-3, 1e-10) if precision == "fp64" else (5.0, 2e-3)
    truth, norms = _trained_plainly(case, precision, clip_norm, stages)
    for records in _train(case, plan, tmp_path, TrainSettings(clip_norm=clip_norm, clip="stage")):
        assert [record.overflow for record in records] == [norm is None for norm in norms]
        assert {record.gradient_norm for record in records} == {None}
    _close(truth, plan, tmp_path, tolerance)


@pytest.mark.parametrize("clip_norm", [None, 5.0])
@pytest.mark.parametrize("widths", [(1,), (1, 1), (2, 1, 1)])
def test_scaled_losses_overflow_and_recover_as_with_torchs_scaler(
    widths: tuple[int, ...], clip_norm: float | None, tmp_path: Path
) -> None:
    case, plan = _single("fp16", widths)
    truth, norms = _trained_plainly(case, "fp16", clip_norm)
    assert None in norms
    assert any(norms)
    for records in _train(case, plan, tmp_path, TrainSettings(clip_norm=clip_norm)):
        assert [record.overflow for record in records] == [norm is None for norm in norms]
        found = [record.gradient_norm for record in records if record.gradient_norm]
        assert found == pytest.approx([norm for norm in norms if norm], rel=2e-3)
    _close(truth, plan, tmp_path, 2e-3)


def test_scales_follow_torchs_rule_and_bfloat16_needs_none(tmp_path: Path, double: Case) -> None:
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
        scale.update(overflow)
        assert scale.value == scaler.get_scale()
    case, plan = _single("bf16", (1, 1))
    (records, _) = _train(case, plan, tmp_path)
    assert not any(record.overflow or record.gradient_norm for record in records)
    _close(_trained_plainly(case, "bf16")[0], plan, tmp_path, 2e-2)
    text = double.file.read_text().replace("Adam(parameters, lr=1e-3)", "LBFGS(parameters)")
    case = make_case(tmp_path / "other.py", text)
    with pytest.raises(ModelError, match="returned a LBFGS, whose step runs the model itself"):
        _train(case, case.plan((1,), MICRO_BATCHES, ROWS), tmp_path)


RAISING = """
class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        if WHOSE == "optimizer": raise ValueError("no luck")
class Scheduler(torch.optim.lr_scheduler.ConstantLR):
    steps = 0
    def step(self, *given):
        if WHOSE == "scheduler" and self.steps: raise ValueError("no luck")
        self.steps += 1
def optimizer(parameters): return Optimizer(parameters, lr=0.1)
scheduler = Scheduler
"""


@pytest.mark.parametrize("whose", ["optimizer", "scheduler"])
def test_a_step_that_raises_is_said_to_be_the_optimizers_or_the_schedulers(
    double: Case, tmp_path: Path, whose: str
) -> None:
    case = make_case(tmp_path / "raising.py", f"{double.file.read_text()}\nWHOSE = {whose!r}\n{RAISING}")
    with pytest.raises(TrainingError, match=rf"step 0, U@0\): the {whose}'s step raised ValueError: no luck"):
        _train(case, case.plan((1,), MICRO_BATCHES, ROWS), tmp_path)
