"""A whole profile, of a small model."""

import gc
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.capture import load
from autopar.formats.profile import Profile
from autopar.options.profile import ProfileOptions
from autopar.profiler import profile
from autopar.profiler.profile import _ModelMeasurement, _waiting_s, sizes_up_to

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(64, 10)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)
def model(): return Net()
def dataset(): return torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(0, 10, (64,)))
def loss(output, batch): return nn.functional.cross_entropy(output, batch[1])
def optimizer(parameters): return torch.optim.AdamW(parameters)
"""
SPREAD = "times of the same layer spread by 50% of their median"


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def test_a_profile_comes_back_from_its_file(model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["autopar.profiler.measure"], "spread", lambda times: 0.0)
    measured = profile(load(str(model_file)), ProfileOptions(batch=32, device="cpu", budget_s=0.05))
    measured.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == measured
    # The first block's backward has no gradient of its input to compute: it is not like the others.
    assert [layer.measured_as for layer in measured.layers] == [None, None, "blocks.1", "blocks.1", None]
    assert [cost.micro_batch for cost in measured.layers[0].costs] == [1, 2, 4, 16, 32]
    block = measured.layers[1]
    assert block.parameters_bytes == block.gradient_bytes == (64 * 64 + 64) * 4
    # AdamW: two moments and one step count for each of two parameters.
    assert block.optimizer_bytes == 2 * block.parameters_bytes + 2 * 4
    assert block.costs[-1].output_bytes == 32 * 64 * 4
    assert {saved.storage for saved in block.costs[-1].saved} == {measured.tensors[2].name, measured.tensors[3].name}
    assert 0 < (measured.loading_s(32) or 0) < measured.step_overhead_s
    assert all(cost.repeats > 0 for layer in measured.layers for cost in layer.costs)
    assert not any("loss" in note or note.startswith(SPREAD) for note in measured.notes)


@pytest.mark.slow
def test_nothing_of_a_model_is_left_alive_behind_its_profile(model_file: Path) -> None:
    """Autograd's own tapes are no garbage to Python: what saves a tensor with its history holds it for ever."""
    user = load(str(model_file))

    def parameters_alive() -> int:
        profile(user, ProfileOptions(batch=32, device="cpu", budget_s=0.05))
        gc.collect()
        every = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
        return sum(1 for each in every if each.numel() >= 64 * 64)

    assert parameters_alive() == parameters_alive()


@pytest.mark.reliability(48)
def test_times_that_spread_are_noted_with_the_layer_of_most(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["autopar.profiler.measure"], "spread", lambda times: 0.5)
    measured = profile(load(str(model_file)), ProfileOptions(batch=2, device="cpu", budget_s=0.05))
    assert (measured.noise.median_spread, measured.noise.max_spread) == (0.5, 0.5)
    assert sum(note.startswith(SPREAD) for note in measured.notes) == 1
    times = SimpleNamespace(forward_s=3.0, forward_launch_s=1.0, backward_s=5.0, backward_launch_s=0.5)
    layers: Any = [SimpleNamespace(name="a", most_rows=most, least_rows=2, costs=[times]) for most in (6, None)]
    assert _waiting_s(layers) == 2 * (2.0 + 4.5)
    measurement: Any = SimpleNamespace(_graph=SimpleNamespace(layers=layers), _options=ProfileOptions(batch=64))
    assert _ModelMeasurement._sizes(measurement) == sizes_up_to(6, 2)
