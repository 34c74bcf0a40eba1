"""Weights on disk, and the samples of a share."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from autopar.capture.export import capture
from autopar.capture.source import load
from autopar.capture.storages import StorageTracker
from autopar.errors import FileError, ModelError, TrainingError
from autopar.runtime.data import ShareLoader, sample_order
from autopar.runtime.result import weights
from autopar.runtime.stage.stage import Stage
from autopar.runtime.start.saving import folder_of, make_folder
from dictated import dictate
from paths import MODELS
from threads import train_in_threads


def test_weights_in_one_file_or_several_read_the_same(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(2, i + 1) for i in range(4)}
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    weights.write(one / weights.SINGLE, tensors)
    parts = {"a": ("w0", "w2"), "b": ("w1", "w3")}
    written = [
        weights.write(many / f"{file}.safetensors", {name: tensors[name] for name in held})
        for file, held in parts.items()
    ]
    weights.publish(many, written)
    for folder in (one, many):
        found = weights.read(folder, ["w1", "w2", "absent"])
        assert sorted(found) == ["w1", "w2"]
        assert all(torch.equal(found[name], tensors[name]) for name in found)
    assert sorted(path.name for path in one.iterdir()) == [weights.SINGLE]


def test_the_library_of_the_format_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.randn(3, 4).T,
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 5),
        "flags": torch.tensor([True, False]),
        "part": torch.randn(3, dtype=torch.float64)[1:],
        "complex": torch.randn(2).to(torch.complex64),
        **{str(kind): torch.randn(5).to(kind) for kind in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)},
    }
    weights.write(tmp_path / weights.SINGLE, tensors)
    found = load_file(tmp_path / weights.SINGLE)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].tolist() == tensor.tolist()
    assert weights.shapes(tmp_path) == {name: weights.shape_of(tensor) for name, tensor in tensors.items()}


def test_complex_numbers_of_double_precision_are_read_as_they_were_written(tmp_path: Path) -> None:
    tensors = {"both": torch.randn(2, 3, dtype=torch.complex128).conj(), "real": torch.randn(2, 2)}
    weights.write(tmp_path / weights.SINGLE, tensors)
    found = weights.read(tmp_path, tensors)
    assert all(torch.equal(found[name], tensor.resolve_conj()) for name, tensor in tensors.items())
    assert weights.shapes(tmp_path) == {name: weights.shape_of(tensor) for name, tensor in tensors.items()}
    # Other libraries read them in pairs.
    assert torch.equal(load_file(tmp_path / weights.SINGLE)["both"], torch.view_as_real(found["both"]))


def test_what_cannot_be_written_is_asked_for_all_the_same(tmp_path: Path) -> None:
    asked: list[str] = []
    with pytest.raises(FileError, match="cannot write"):
        weights.write(tmp_path / "absent" / "file", dict.fromkeys("abc", torch.zeros(1)), asked.append)
    # Others wait until their parts were asked for.
    assert asked == ["a", "b", "c"]


def test_writing_copies_only_tensors_that_have_no_bytes_in_a_row(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    parts = {"whole": whole, "again": whole, "row": whole.view(2, 3)[1], "column": whole.view(2, 3).T}
    weights.write(tmp_path / weights.SINGLE, parts)
    found = weights.read(tmp_path, parts)
    assert all(torch.equal(found[name], tensor) for name, tensor in parts.items())
    layer = nn.Linear(3, 4)
    with StorageTracker() as tracker:
        weights.write(tmp_path / weights.SINGLE, dict(layer.named_parameters()))
    assert tracker.peak_bytes == 0


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"cannot make the folder .*file/trained: Not a directory"):
        make_folder(tmp_path / "file" / "trained")


def test_a_new_folder_goes_with_a_run_that_fails_unless_there_is_something_in_it(tmp_path: Path) -> None:
    def write(folder: Path, name: str | None) -> None:
        if name is not None:
            (folder / name).touch()
        raise TrainingError("the disk is full")

    def fail(folder: Path, name: str | None = None) -> None:
        with pytest.raises(TrainingError), folder_of(folder):
            write(folder, name)

    old = tmp_path / "old"
    old.mkdir()
    for folder in (old, tmp_path / "new"):
        fail(folder)
    fail(tmp_path / "begun", "model.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun", "old"]


def test_damaged_weights_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / weights.SINGLE).write_bytes(b"not safetensors")
    with pytest.raises(FileError, match=r"cannot read weights .*model.safetensors"):
        weights.read(tmp_path, ["w"])
    (tmp_path / weights.SINGLE).unlink()
    for text, said in (
        ("{", r"not JSON"),
        ('{"weight_map": 3}', r"\$.weight_map: expected an object"),
        ('{"weight_map": {"w": "../x"}}', r"\$.weight_map.w: expected the name of a file"),
    ):
        (tmp_path / weights.INDEX).write_text(text)
        with pytest.raises(FileError, match=said):
            weights.read(tmp_path, ["w"])


def test_shares_of_a_mini_batch_are_its_rows_in_order_and_epochs_reshuffle() -> None:
    model = load(str(MODELS / "dropout.py"))
    graph = capture(model, model.build(0))
    plan = dictate(graph, model, [3, 1], 2, 7, seed=5)
    device = torch.device("cpu")
    inputs, targets = (graph.tensor(name) for name in ("batch.0", "batch.1"))
    loaders = [ShareLoader(model, plan, rank, [inputs], device) for rank in range(3)]
    whole = ShareLoader(model, plan, 3, [inputs, targets], device)
    data = model.dataset()
    # 100 samples make 7 mini-batches of 14; the last 2 are dropped.
    for step, epoch, first in ((0, 0, 0), (6, 0, 84), (7, 1, 0), (15, 2, 14)):
        order = sample_order(100, 5, epoch)
        expected = torch.stack([data[int(index)][0] for index in order[first : first + 14]])
        parts = [loader.load(step) for loader in loaders]
        rows = [torch.cat([part[m]["batch.0"] for part in parts]) for m in range(2)]
        assert torch.equal(torch.cat(rows), expected)
        assert torch.equal(torch.cat([m["batch.0"] for m in whole.load(step)]), expected)
    assert not torch.equal(sample_order(100, 5, 0), sample_order(100, 5, 1))
    assert ShareLoader(model, plan, 3, (), device).load(3) == [{}, {}]


def test_an_incomplete_mini_batch_is_filled_up_with_the_first_samples_of_the_epoch() -> None:
    model = load(str(MODELS / "dropout.py"))
    graph = capture(model, model.build(0))
    data, inputs = model.dataset(), graph.tensor("batch.0")
    for rows, steps in ((7, 8), (60, 1)):
        # 100 samples make 8 mini-batches of 14, 12 samples twice; or one of 120, 20 samples twice.
        plan = dictate(graph, model, [1], 2, rows, seed=5)
        loader = ShareLoader(model, plan, 0, [inputs], torch.device("cpu"), "pad")
        for epoch in (0, 1):
            order = sample_order(100, 5, epoch).tolist()
            taken = (order * 2)[: steps * 2 * rows]
            loaded = [loader.load(epoch * steps + step) for step in range(steps)]
            found = torch.cat([part["batch.0"] for parts in loaded for part in parts])
            assert torch.equal(found, torch.stack([data[index][0] for index in taken]))


def test_a_dataset_smaller_than_a_mini_batch_is_refused() -> None:
    model = load(str(MODELS / "dropout.py"))
    graph = capture(model, model.build(0))
    plan = dictate(graph, model, [1], 2, 51)
    said = r"dropout.py: the dataset has 100 samples, a mini-batch takes 102; plan with .* or pass `last='pad'`"
    with pytest.raises(FileError, match=said):
        ShareLoader(model, plan, 0, [graph.tensor("batch.0")], torch.device("cpu"))


def test_samples_and_outputs_of_another_shape_are_refused_by_name() -> None:
    model = load(str(MODELS / "dropout.py"))
    graph = capture(model, model.build(0))
    plan = dictate(graph, model, [1, 1], 2, 3)
    longer = torch.utils.data.TensorDataset(torch.randn(9, 7, dtype=torch.float64), torch.zeros(9, dtype=torch.long))
    other = replace(model, functions={**model.functions, "dataset": lambda: longer})
    said = r"rank 0 \(step 0, micro-batch 0\): batch.0 is torch.float64 of shape \(7,\) per sample, .* of shape \(5,\)"
    with pytest.raises(TrainingError, match=said):
        ShareLoader(other, plan, 0, [graph.tensor("batch.0")], torch.device("cpu")).load(0)
    broken = replace(model, functions={**model.functions, "dataset": lambda: {}.fromkeys(range(8))})
    with pytest.raises(ModelError, match=r"rank 0 \(step 0, micro-batch 0\): .*dropout.py: collate raised TypeError"):
        ShareLoader(broken, plan, 0, [graph.tensor("batch.0")], torch.device("cpu")).load(0)
    gone = replace(model, functions={**model.functions, "dataset": lambda: {}.fromkeys(range(8, 16))})
    with pytest.raises(ModelError, match=r"rank 0 \(step 0, .*dropout.py: dataset\(\)\[(\d)\] raised KeyError: \1$"):
        ShareLoader(gone, plan, 0, [graph.tensor("batch.0")], torch.device("cpu")).load(0)
    layers = [graph.layer(name) for name in plan.stages[0].layers]
    stage = Stage(layers, [spec for spec in graph.tensors if spec.producer is not None], graph.inputs, graph.outputs)
    (sent,) = stage.sent_specs
    with pytest.raises(TrainingError, match=rf"tensor {sent.name} has shape \(3, 9\), the plan sends \(3, 8\)"):
        stage.sendable(3, {sent.name: torch.zeros(3, 9)})


DRAWN = """
import random

import numpy as np
import torch
from torch import nn


class Drawn(torch.utils.data.Dataset):
    def __init__(self):
        self.scale = np.random.rand()

    def __len__(self):
        return 30

    def __getitem__(self, index):
        x = torch.rand(4) + random.random() + np.random.rand() * self.scale
        return x, x.sum(0, keepdim=True)


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def dataset():
    return Drawn()


def loss(output, batch):
    return (output - batch[1]).square().mean()
"""
COLLATE = """

def collate(samples):
    x = torch.stack([x for x, _ in samples])
    x = x - x.mean(0) + torch.rand(len(samples), 1)
    return x, x.sum(1, keepdim=True)
"""


@pytest.mark.parametrize("text", [DRAWN, DRAWN + COLLATE], ids=["samples", "collate"])
def test_what_is_drawn_for_a_sample_is_the_same_on_all_ranks(text: str, tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(text)
    model = load(str(tmp_path / "drawn.py"))
    graph = capture(model, model.build(0))
    plan = dictate(graph, model, [1, 2], 2, 5, shares=[[5], [2, 3]])
    names, device = ["batch.0", "batch.1", "batch.1"], torch.device("cpu")
    loaders = [ShareLoader(model, plan, rank, [graph.tensor(name)], device) for rank, name in enumerate(names)]
    seen = []
    # The last of four steps begins the second epoch.
    for step in range(4):
        parts = [loader.load(step) for loader in loaders]
        for m in range(2):
            inputs = parts[0][m]["batch.0"]
            targets = torch.cat([part[m]["batch.1"] for part in parts[1:]])
            assert torch.equal(inputs.sum(1, keepdim=True), targets)
            seen.append(inputs)
    assert not any(torch.equal(a, b) for a, b in combinations(seen, 2))


NOTHING = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def dataset():
    return torch.utils.data.TensorDataset(torch.rand(30, 4), torch.rand(30, 1))


def loss(output, batch):
    return (output - batch[1]).square().sum() * 0, (batch[1] < 0).sum()
"""


def test_a_mini_batch_in_which_nothing_counts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text(NOTHING)
    model = load(str(tmp_path / "nothing.py"))
    module = model.build(0)
    graph = capture(model, module)
    with pytest.raises(TrainingError, match="count of 0 for the whole mini-batch"):
        train_in_threads(dictate(graph, model, [1], 2, 4), graph, model, dict(module.named_parameters()), tmp_path, 1)


def test_an_index_names_as_many_tensors_as_a_mixture_of_experts_has(tmp_path: Path) -> None:
    names = [f"model.layers.{index // 768}.mlp.experts.{index % 768}.weight" for index in range(45_000)]
    (tmp_path / weights.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "a.bin")}))
    assert weights.indexed_file_names(tmp_path) == set()
    with pytest.raises(FileError, match=r"cannot read weights .*a\.bin"):
        weights.shapes(tmp_path)
