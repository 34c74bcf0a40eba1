"""Batches whose sizes differ are refused, and the collate that is proposed pads them to one size when it is pasted."""

import re
from pathlib import Path

import pytest
import torch

from autopar.capture.model.batch import check_reading, named_tensors
from autopar.capture.model.source import load
from autopar.errors import ModelError

FILE = """
import torch
from torch.nn.utils.rnn import pad_sequence
def dataset():
    draw = torch.Generator().manual_seed({seed})
    sizes = [[8, 8], *torch.randint(2, 9, (39, 2), generator=draw).tolist()]
    return [{sample} for i, (n, m) in enumerate(sizes)]
{collate}
def model(): pass
"""
STACKED = [
    ("torch.randn(n), i % 3", {"batch.0": (8,)}),
    ("torch.randn(1, n, m), i % 3", {"batch.0": (1, 8, 8)}),
    ("dict(x=torch.ones(n, dtype=torch.int64), labels=torch.ones(n, dtype=torch.int64))", {"batch.labels": (8,)}),
]
PADDED = """
def collate(rows):
    x = pad_sequence([x for x, _ in rows], True, {value})
    return {{"x": x, "kept": (x != {value}, torch.tensor([y for _, y in rows]))}}
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("sample", "collate", "sizes"),
    [
        *((sample, "", sizes) for sample, sizes in STACKED),
        ("torch.randn(n), i % 3", PADDED.format(value=0), {"batch.x": (8,), "batch.kept.0": (8,), "batch.kept.1": ()}),
        ("torch.ones(n, m), i % 3", PADDED.format(value=-7).replace("pad_sequence(", "torch.stack("), None),
        ("torch.randn(n, 2), i % 3", PADDED.format(value=-100), {"batch.x": (8, 2), "batch.kept.0": (8, 2)}),
    ],
)
def test_the_collate_that_is_proposed_pads_to_one_size(
    sample: str, collate: str, sizes: dict[str, tuple[int, ...]] | None, seed: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.py"
    path.write_text(FILE.format(seed=seed, sample=f"({sample})", collate=collate))
    if sizes is None:
        with pytest.raises(ModelError, match="collate"):
            check_reading(load(str(path)), 0)
        return
    with pytest.raises(ModelError, match="batches differ in size: batch") as refused:
        check_reading(load(str(path)), 0)
    (pasted,) = re.findall("`(def collate.*)`", str(refused.value))
    path.write_text(f"{path.read_text()}\n{pasted}\n")
    user = load(str(path))
    check_reading(user, 0)
    dataset = user.dataset()
    for first in range(0, 36, 3):
        tensors = named_tensors(user.load_batch(dataset, range(first, first + 3)))
        assert {name: tuple(tensors[name].shape[1:]) for name in sizes} == sizes
    if "batch.labels" in tensors:
        assert set(tensors["batch.labels"].unique().tolist()) <= {1, -100}
        assert set(tensors["batch.x"].unique().tolist()) <= {0, 1}


def test_what_is_beyond_the_largest_sample_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(FILE.format(seed=0, sample="(torch.randn(n), i % 3)", collate=""))
    with pytest.raises(ModelError) as refused:
        check_reading(load(str(path)), 0)
    (pasted,) = re.findall("`(def collate.*)`", str(refused.value))
    path.write_text(f"{path.read_text()}\n{pasted}\n")
    assert named_tensors(load(str(path)).collate([(torch.randn(11), 0)]))["batch.0"].shape == (1, 11)
