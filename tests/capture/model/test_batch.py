"""What ``collate`` gives, as named tensors, and as arguments of the model's call; data that reading changes."""

import random
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.capture.model.batch import (
    StepModule,
    check_reading,
    loss_outputs,
    model_arguments,
    named_tensors,
    rebuild,
    row_count,
    slice_rows,
    structure_of,
)
from autopar.capture.model.source import load
from autopar.errors import ModelError

Pair = namedtuple("Pair", ("left", "right"))


def _draw(draw: random.Random, rows: int, depth: int) -> Any:  # noqa: ANN401
    kind = draw.choice(("dict", "tuple", "list", "pair")) if depth else "tensor"
    if kind == "tensor":
        return torch.rand(rows, draw.randint(1, 3))
    items = [_draw(draw, rows, draw.randrange(depth)) for _ in range(2 if kind == "pair" else draw.randint(1, 3))]
    if kind == "dict":
        return {f"key{index}": item for index, item in enumerate(items)}
    return Pair(*items) if kind == "pair" else tuple(items) if kind == "tuple" else items


def _rows_of(value: Any, start: int, stop: int) -> Any:  # noqa: ANN401
    if isinstance(value, torch.Tensor):
        return value[start:stop].tolist()
    if isinstance(value, dict):
        return {key: _rows_of(item, start, stop) for key, item in value.items()}
    return (type(value), [_rows_of(item, start, stop) for item in value])


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ([], "holds no tensors"),
        ({"x": torch.ones(2), "y": [torch.ones(3)]}, r"first dimension \(batch.x: 2, batch.y.0: 3\)"),
        ((torch.ones(2), torch.tensor(1.0)), "batch.1 has no dimensions"),
        ({"x": {3: torch.ones(2)}}, "batch.x has the key 3"),
        ((torch.ones(2), ["a"]), "batch.1.0 is a str"),
    ],
)
def test_what_is_no_batch_of_tensors_is_refused_by_its_place(batch: object, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        named_tensors(batch)


class _Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale


def test_a_step_gives_the_model_its_inputs_and_the_loss_the_whole_batch() -> None:
    x, scale, target = torch.rand(3, 2), torch.rand(3, 2), torch.rand(3, 2)

    def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:  # noqa: ANN401
        return (output - (batch["y"] if isinstance(batch, dict) else batch[-1])).sum(), 6

    for batch in ((x, scale, target), {"y": target, "scale": scale, "x": x}):
        total, count = StepModule(_Scaled(), batch, loss)(*named_tensors(batch).values())
        assert (total.item(), count.item()) == (pytest.approx((x * scale - target).sum().item()), 6)
    with pytest.raises(ModelError, match=r"no key of the batch \(z\) is a parameter of forward\(x, scale\)"):
        model_arguments(_Scaled(), {"z": x}, has_loss=False)
    with pytest.raises(ModelError, match="this one has a single item"):
        model_arguments(_Scaled(), (x,), has_loss=True)
    with pytest.raises(ModelError, match=r"test_batch.py:\d+: loss\(\) returned a tensor that has shape \(3, 2\)"):
        loss_outputs(x, loss)
    with pytest.raises(ModelError, match=r"test_batch.py:\d+: loss\(\) returned .*None.*write `return`"):
        loss_outputs(None, loss)
    with pytest.raises(ModelError, match=r"the model returned .*define loss"):
        loss_outputs("text", None)


def test_models_and_any_rows_of_a_batch_are_of_one_structure() -> None:
    models = [nn.Sequential(nn.Linear(2, 3), nn.ReLU()) for _ in range(2)]
    assert structure_of(models[0]) == structure_of(models[1])
    frozen = nn.Sequential(nn.Linear(2, 3), nn.ReLU()).requires_grad_(False)
    others = [frozen, nn.Sequential(nn.Linear(2, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 3), nn.ReLU())]
    assert len({structure_of(model) for model in (models[0], *others)}) == 4
    draw = random.Random(3)
    for _ in range(50):
        rows = draw.randint(1, 6)
        batch = _draw(draw, rows, 3)
        start, stop = sorted((draw.randint(0, rows), draw.randint(0, rows)))
        tensors = named_tensors(batch)
        part = rebuild(batch, slice_rows(tensors, start, stop))
        assert row_count(tensors) == rows
        assert _rows_of(part, 0, rows) == _rows_of(batch, start, stop)
        assert list(named_tensors(part)) == list(tensors)


FILE = """
import itertools, random, functools
import numpy as np
import torch

class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.values = torch.arange(40.0).reshape(10, 4)
        self.calls, self.cached, self.own = 0, {}, torch.Generator().manual_seed(0)
        self.noise = np.random.default_rng(0)
        self.drawn, self.noisy = float(torch.rand(())), np.random.default_rng().random()
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


GENERATORS = (random.getstate, lambda: torch.get_rng_state().tolist(), lambda: np.random.get_state()[1].tolist())


@pytest.mark.parametrize(
    ("item", "collate", "said"),
    [
        ("return self.values[index]", STACK, None),
        ("return self.cached.setdefault(index, self.values[index].clone())", STACK, None),
        ("self.calls += 1; return self.values[index]", STACK, None),
        ("return self.values[index] + torch.randn(4) + np.random.rand() + random.random()", STACK, None),
        ("return self.values[index] + self.drawn", "random.shuffle(samples); " + STACK, None),
        ("return {'x': np.ones(3) * index, 'name': str(index)}", "return [each['x'] for each in samples]", None),
        ("return torch.full((3,), float('nan'))", STACK, None),
        ("return self.values[index].to(torch.bfloat16)", STACK, None),
        ("self.calls += 1; return self.values[index] * self.calls", STACK, r"dataset\(\)\[0\] gives another"),
        ("return self.values[index].add_(1)", STACK, r"dataset\(\)\[0\] gives another"),
        ("return self.values[index] + torch.randn(4, generator=self.own)", STACK, r"dataset\(\)\[\d\] gives"),
        ("return self.values[index] + self.noise.random()", STACK, r"dataset\(\)\[\d\] gives"),
        ("return {'x': index, 'n': next(seen)}", "return [each['x'] for each in samples]", r"\[0\] gives"),
        ("return self.values[index]", "return torch.stack(samples) * next(seen)", r"collate\(\) makes another"),
        ("return self.values[index] + self.noisy", STACK, r"dataset\(\)\[0\] of dataset\(\) called again gives"),
        ("return self.values[index]", "collate.n = getattr(collate, 'n', 0) + 1; return [collate.n]", "collate"),
    ],
)
def test_data_that_depends_on_reads_is_refused(item: str, collate: str, said: str | None, tmp_path: Path) -> None:
    path, before = tmp_path / "model.py", [state() for state in GENERATORS]
    path.write_text(FILE.replace("ITEM", item).replace("COLLATE", collate))
    with pytest.raises(ModelError, match=said) if said else nullcontext():
        check_reading(load(str(path)), 0)
    assert before == [state() for state in GENERATORS]


SAMPLED = """
import random
import torch
from torch.nn.utils.rnn import pad_sequence
def dataset():
    draw = torch.Generator().manual_seed({seed})
    return [(torch.randn(draw.initial_seed() % 3 + 2 + i % 3, generator=draw), i % 5 % 3) for i in range(50)]
def padded(samples):
    return pad_sequence([x for x, _ in samples], True), torch.tensor([y for _, y in samples])
def collate(samples):
    x, y = padded(samples)
    {collate}
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("collate", "mixes"),
    [
        ("return x, y", False),
        ("order = sorted(range(len(y)), key=lambda i: -len(samples[i][0])); return x[order], y[order]", False),
        ("return x.masked_fill(torch.rand(x.shape) < 0.3, 0), y", False),
        ("return x + torch.tensor([random.random() for _ in y])[:, None], y", False),
        ("return x - x.mean(1, keepdim=True), y, torch.arange(len(y))", False),
        ("return x, {'y': y, 'w': len(y) / torch.bincount(y, minlength=3)[y].double()}", True),
        ("return x - x.mean(0), y", True),
        ("part, to = torch.rand(()), torch.randperm(len(y)); return part * x + (1 - part) * x[to], y, y[to]", True),
        ("return x / x.abs().max(), y", True),
        ("x[0], x[-1] = x[0] + x[-1], x[-1]; return x, y.roll(1)", True),
    ],
)
def test_a_collate_that_mixes_samples_is_found_and_padding_order_and_chance_are_no_mixing(
    collate: str, mixes: bool, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.capture.model.batch.check_sizes", lambda *_: None)
    text = SAMPLED.format(seed=seed, collate=collate)
    for name, more in (("alone", ""), ("whole", "whole_batches = True")):
        path = tmp_path / f"{name}.py"
        path.write_text(f"{text}\n{more}\ndef model(): pass\n")
        refused = pytest.raises(ModelError, match=r"makes of a sample depends on the others.*whole_batches")
        with refused if mixes and not more else nullcontext():
            check_reading(load(str(path)), seed)
        check_reading(load(str(path)), seed, accept_mixing=True)
