"""The optimizer's step, on copies of layers' parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar.capture import load
from autopar.profiler import optimizer
from autopar.profiler.optimizer import measure_updates

MODEL = """
import torch
def model():
    return torch.nn.Linear(2, 2)
"""
CPU = torch.device("cpu")


def test_updates_are_of_copies_and_free_for_what_is_not_trained(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    weight = torch.nn.Parameter(torch.ones(64, 64))
    found = measure_updates(load(str(path)), [("own", [("w", weight)]), ("own", [("v", weight)]), ("none", [])], CPU)
    assert found["own"].seconds > 0
    assert found["own"].accumulate_s > 0
    assert found["none"].seconds < found["own"].seconds
    assert torch.equal(weight, torch.ones(64, 64))
    assert weight.grad is None


def test_parameters_without_room_are_measured_by_their_first_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    weights = [torch.nn.Parameter(torch.ones(64, 64)), torch.nn.Parameter(torch.ones(64))]
    copies, scale = optimizer._copies(weights, room=4 * 64 * 65 // 4)
    assert [tuple(copy.shape) for copy in copies] == [(16, 64), (16,)]
    assert scale == 4.0
    monkeypatch.setattr(optimizer, "_free_bytes", lambda device: 4000)
    assert (
        measure_updates(load(str(path)), [("large", list(zip("wb", weights, strict=True)))], CPU)["large"].seconds > 0
    )
