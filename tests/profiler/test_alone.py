"""A model that is larger than memory is measured one layer at a time."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from autopar.capture import load
from autopar.errors import UsageError
from autopar.profiler import ProfileOptions, prepare
from autopar.profiler import device as devices
from autopar.profiler.profile import _ModelMeasurement, measure_layers

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

def model():
    return Net()

def dataset():
    return [{"tokens": torch.arange(8) + index} for index in range(16)]

def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["tokens"].flatten())
"""


def test_a_hollow_models_profile_has_the_sizes_and_names_of_the_real_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    options = ProfileOptions(batch=4, device="cpu", budget_s=0.2)
    real = measure_layers(prepare(load(str(path)), options), options)
    monkeypatch.setattr(devices, "memory_bytes", lambda device: 3000)
    subject = prepare(load(str(path)), options)
    assert subject.graph.hollow
    hollow = measure_layers(subject, options)
    assert all(parameter.device.type == "meta" for parameter in subject.module.parameters())
    assert "larger than memory" in hollow.notes[0]
    assert hollow.noise.caches == "warm"
    assert (hollow.tensors, hollow.tied) == (real.tensors, real.tied)
    for one, other in zip(hollow.layers, real.layers, strict=True):
        assert (one.name, one.measured_as, one.parameters_bytes) == (
            other.name,
            other.measured_as,
            other.parameters_bytes,
        )
        assert one.optimizer_bytes == other.optimizer_bytes
        for found, expected in zip(one.costs, other.costs, strict=True):
            assert (found.micro_batch, found.output_bytes) == (expected.micro_batch, expected.output_bytes)
            assert (found.saved, found.peak_bytes) == (expected.saved, expected.peak_bytes)
            assert found.forward_s > 0
            assert found.backward_s > 0
            assert found.repeats > 0


CHAIN = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 50))

def dataset():
    return [{"input": torch.arange(8) + index} for index in range(16)]

def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["input"].flatten())
"""


def test_a_hollow_models_layers_read_what_the_layers_before_them_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.py"
    path.write_text(CHAIN)
    options = ProfileOptions(batch=4, device="cpu", budget_s=0.2, precision="bf16")
    real = measure_layers(prepare(load(str(path)), options), options)
    monkeypatch.setattr(devices, "memory_bytes", lambda device: 8000)
    hollow = measure_layers(prepare(load(str(path)), options), options)
    assert "bfloat16" in {tensor.dtype for tensor in real.tensors}
    assert hollow.tensors == real.tensors
    for one, other in zip(hollow.layers, real.layers, strict=True):
        assert [(each.saved, each.peak_bytes) for each in one.costs] == [
            (each.saved, each.peak_bytes) for each in other.costs
        ]


# A branch on values in one of the modules, which no graph holds.
LISTED = (
    CHAIN.replace("nn.Tanh()", "Deciding()").replace(
        "def model():",
        """class Deciding(nn.Module):
    def forward(self, x):
        return torch.tanh(x) if x.sum() < 1e9 else x

def model():""",
    )
    + """
def layers(model):
    return list(model)
"""
)


def test_the_listed_layers_of_a_hollow_model_are_measured_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.py"
    path.write_text(LISTED)
    options = ProfileOptions(batch=4, device="cpu", budget_s=0.2)
    real = measure_layers(prepare(load(str(path)), options), options)
    monkeypatch.setattr(devices, "memory_bytes", lambda device: 8000)
    subject = prepare(load(str(path)), options)
    assert subject.graph.hollow
    hollow = measure_layers(subject, options)
    assert all(parameter.device.type == "meta" for parameter in subject.module.parameters())
    assert hollow.tensors == real.tensors
    for one, other in zip(hollow.layers, real.layers, strict=True):
        assert one.name == other.name
        assert one.optimizer_bytes == other.optimizer_bytes
        assert [(each.saved, each.peak_bytes, each.output_bytes) for each in one.costs] == [
            (each.saved, each.peak_bytes, each.output_bytes) for each in other.costs
        ]


def test_a_size_that_one_kind_of_layer_is_too_slow_for_is_left_out_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.py"
    path.write_text(CHAIN)
    monkeypatch.setattr(devices, "memory_bytes", lambda device: 8000)
    options = ProfileOptions(batch=16, device="cpu", budget_s=0.1)
    monkeypatch.setattr(
        _ModelMeasurement, "_enough", lambda self, sizes, forward_s: sizes >= 3 and len(self._costs.timings) > 5
    )
    found = measure_layers(prepare(load(str(path)), options), options)
    assert {tuple(cost.micro_batch for cost in layer.costs) for layer in found.layers} == {(1, 2, 4)}


def test_layers_that_are_measured_one_at_a_time_are_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.py"
    path.write_text(CHAIN)
    monkeypatch.setattr(devices, "memory_bytes", lambda device: 8000)
    options = ProfileOptions(batch=2, device="cpu", compile=True)
    with pytest.raises(UsageError, match=r"^`compile`: .*model\.py is larger than memory, .*leave the option out$"):
        measure_layers(prepare(load(str(path)), options), options)


def test_a_tied_parameter_is_updated_once(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    options = ProfileOptions(batch=2, device="cpu", budget_s=0.1, precision="bf16")
    found = measure_layers(prepare(load(str(path)), options), options)
    assert found.layers[0].update_s > 0
    # The head shares its only parameter with the embedding.
    assert found.layers[-1].update_s == 0 or found.layers[-1].update_s < found.layers[0].update_s
    assert found.layers[-1].optimizer_bytes > 0
    assert found.precision == "bf16"
    made = {tensor.name: tensor.dtype for tensor in found.tensors if tensor.producer is not None}
    assert "float32" in made.values()


def test_a_device_without_room_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried")

    path = tmp_path / "model.py"
    path.write_text(MODEL)
    options = ProfileOptions(batch=2, device="cpu")
    subject = prepare(load(str(path)), options)
    monkeypatch.setitem(inspect.unwrap(measure_layers).__globals__, "measure", full)
    with pytest.raises(UsageError, match=r"^`batch=2`: .* more memory than the device has; give less.*$"):
        measure_layers(subject, options)


def test_a_batch_that_no_memory_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    monkeypatch.setattr(devices, "memory_bytes", lambda device: 500)
    with pytest.raises(UsageError, match="`batch=16`: so many samples of"):
        prepare(load(str(path)), ProfileOptions(batch=16, device="cpu"))
