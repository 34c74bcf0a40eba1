"""Data is the same however often, and in whichever order, it is read: or it is refused by name."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from autopar.capture.batch import check_reading
from autopar.capture.source import load
from autopar.errors import ModelError

FILE = """
import itertools, random, functools
import numpy as np
import torch

class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.values = torch.arange(40.0).reshape(10, 4)
        self.calls, self.cached, self.own = 0, {}, torch.Generator().manual_seed(0)
        self.noise = np.random.default_rng(0)
        self.shift = SHIFT
    def __len__(self): return 10
    def __getitem__(self, index):
        ITEM

def collate(samples):
    COLLATE

seen = itertools.count()
def model(): ...
def dataset(): return Data()
"""
STACK = "return torch.stack(samples)"


def model_file(folder: Path, item: str, collate: str = STACK, shift: str = "0"):  # noqa: ANN201
    path = folder / "model.py"
    path.write_text(FILE.replace("ITEM", item).replace("COLLATE", collate).replace("SHIFT", shift))
    return load(str(path))


@pytest.mark.parametrize(
    ("item", "collate"),
    [
        ("return self.values[index]", STACK),
        ("return self.cached.setdefault(index, self.values[index].clone())", STACK),
        ("self.calls += 1; return self.values[index]", STACK),
        ("return self.values[index] + torch.randn(4) + np.random.rand() + random.random()", STACK),
        ("return self.values[index] + self.shift", "random.shuffle(samples); " + STACK),
        ("return {'x': np.ones(3) * index, 'name': str(index)}", "return [sample['x'] for sample in samples]"),
        ("return torch.full((3,), float('nan'))", STACK),
        ("return self.values[index].to(torch.bfloat16)", STACK),
    ],
)
def test_data_that_caches_or_draws_from_seeded_generators_is_taken(item: str, collate: str, tmp_path: Path) -> None:
    before = random.getstate()[1], torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    check_reading(model_file(tmp_path, item, collate), 0)
    assert before[0] == random.getstate()[1]
    assert torch.equal(before[1], torch.get_rng_state())
    assert (before[2] == np.random.get_state()[1]).all()  # type: ignore[index,operator]


@pytest.mark.parametrize(
    ("item", "collate", "message"),
    [
        ("self.calls += 1; return self.values[index] * self.calls", STACK, r"dataset\(\)\[0\] gives another"),
        ("return self.values[index].add_(1)", STACK, r"dataset\(\)\[0\] gives another"),
        ("return self.values[index] + torch.randn(4, generator=self.own)", STACK, r"dataset\(\)\[\d\] gives"),
        ("return self.values[index] + self.noise.random()", STACK, r"dataset\(\)\[\d\] gives"),
        ("return {'x': index, 'n': next(seen)}", "return [sample['x'] for sample in samples]", r"\[0\] gives"),
        ("return self.values[index]", "return torch.stack(samples) * next(seen)", r"collate\(\) makes another"),
        ("return self.values[index]", "collate.n = getattr(collate, 'n', 0) + 1; return [collate.n]", "collate"),
    ],
)
def test_data_that_depends_on_what_was_read_before_is_refused(
    item: str, collate: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        check_reading(model_file(tmp_path, item, collate), 0)


def test_a_dataset_that_draws_unseeded_is_refused(tmp_path: Path) -> None:
    drawn = model_file(tmp_path, "return self.values[index] + self.shift", shift="float(torch.rand(()))")
    check_reading(drawn, 0)
    unseeded = model_file(tmp_path, "return self.values[index] + self.shift", shift="np.random.default_rng().random()")
    with pytest.raises(ModelError, match=r"dataset\(\)\[0\] of dataset\(\) called again gives another"):
        check_reading(unseeded, 0)
