"""A model that is larger than memory is measured one layer at a time."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from autopar.capture import load
from autopar.errors import UsageError
from autopar.formats.profile import Profile
from autopar.options.profile import ProfileOptions
from autopar.profiler import device as devices
from autopar.profiler import prepare
from autopar.profiler.profile import _ModelMeasurement, measure_layers
from autopar.profiler.subject import Subject

DATA = """
def dataset(): return [{"input": torch.arange(8) + index} for index in range(16)]
def loss(output, batch): return nn.functional.cross_entropy(output.flatten(0, 1), batch["input"].flatten())
"""
MODEL = f"""
import torch
from torch import nn
def model():
    blocks = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
    made = nn.Sequential(nn.Embedding(50, 16), *blocks, nn.Linear(16, 50, bias=False))
    made[-1].weight = made[0].weight
    return made
{DATA}
"""
# Listed layers with a branch on values in one of them, which no graph holds.
LISTED = f"""
import torch
from torch import nn
class Deciding(nn.Module):
    def forward(self, x):
        return torch.tanh(x) if x.sum() < 1e9 else x
def model(): return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), Deciding(), nn.Linear(32, 50))
def layers(model): return list(model)
{DATA}
"""
CHAIN = LISTED.replace("Deciding()", "nn.Tanh()").replace("def layers", "def unused")
Prepare = Callable[..., tuple[Subject, ProfileOptions]]


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Give what prepares a model file where there is so much memory."""

    def call(text: str, memory_bytes: int, batch: int = 4, **options: Any) -> tuple[Subject, ProfileOptions]:  # noqa: ANN401
        (tmp_path / "model.py").write_text(text)
        monkeypatch.setattr(devices, "memory_bytes", lambda device: memory_bytes)
        asked = ProfileOptions(batch=batch, device="cpu", budget_s=0.05, **options)
        return prepare(load(str(tmp_path / "model.py")), asked), asked

    return call


def described(profile: Profile) -> list[object]:
    """Return all of a profile but its seconds."""
    layers = [
        [
            (each.name, each.measured_as, each.parameters_bytes, each.optimizer_bytes),
            [(cost.micro_batch, cost.output_bytes, cost.saved, cost.peak_bytes) for cost in each.costs],
        ]
        for each in profile.layers
    ]
    return [layers, profile.tensors, profile.tied]


@pytest.mark.parametrize(
    ("text", "memory_bytes", "precision"), [(MODEL, 3000, None), (CHAIN, 20_000, "bf16"), (LISTED, 8000, None)]
)
def test_a_profile_of_shapes_alone_has_the_sizes_and_names_of_the_real_ones(
    text: str, memory_bytes: int, precision: str | None, prepared: Prepare
) -> None:
    real = measure_layers(*prepared(text, 2**40, precision=precision))
    subject, options = prepared(text, memory_bytes, precision=precision)
    assert subject.graph.on_meta
    on_meta = measure_layers(subject, options)
    assert all(parameter.device.type == "meta" for parameter in subject.module.parameters())
    assert "larger than memory" in on_meta.notes[0]
    assert on_meta.noise.caches == "warm"
    assert described(on_meta) == described(real)
    assert ("bfloat16" in {tensor.dtype for tensor in real.tensors}) == (precision == "bf16")
    every = [cost for layer in on_meta.layers for cost in layer.costs]
    assert all(min(cost.forward_s, cost.backward_s, cost.repeats) > 0 for cost in every)


def test_sizes_too_slow_are_left_out_and_too_large_ones_refused(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        _ModelMeasurement, "_enough", lambda self, sizes, forward_s: sizes >= 3 and len(self._costs.timings) > 5
    )
    found = measure_layers(*prepared(CHAIN, 8000, 16))
    assert {tuple(cost.micro_batch for cost in layer.costs) for layer in found.layers} == {(1, 2, 4)}
    with pytest.raises(UsageError, match=r"^`compile`: .*model\.py is larger than memory, .*leave the option out$"):
        measure_layers(*prepared(CHAIN, 8000, 2, compile=True))
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.\nTried"))
    subject, options = prepared(CHAIN, 2**40, 2)
    monkeypatch.setitem(inspect.unwrap(measure_layers).__globals__, "measure", full)
    with pytest.raises(UsageError, match=r"^`batch=2`: .* more memory than the device has; give less.*$"):
        measure_layers(subject, options)
    with pytest.raises(UsageError, match="`batch=16`: so many samples of"):
        prepared(MODEL, 500, 16)
