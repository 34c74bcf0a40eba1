"""Weights on disk."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from autopar.capture.model.effects import StorageTracker
from autopar.errors import FileError, TrainingError
from autopar.runtime.checkpoint import weights
from autopar.runtime.checkpoint.saving import folder_of, make_folder
from paths import MODELS
from training_cases import make_case


def test_weights_of_any_file_read_the_same_also_complex_or_of_many_experts(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(2, i + 1) for i in range(4)}
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    weights.write(one / weights.SINGLE, tensors)
    parts = {"a": ("w0", "w2"), "b": ("w1", "w3")}.items()
    held = {many / f"{file}.safetensors": {name: tensors[name] for name in names} for file, names in parts}
    weights.publish(many, [weights.write(*each) for each in held.items()])
    for folder in (one, many):
        found = weights.read(folder, ["w1", "w2", "absent"])
        assert sorted(found) == ["w1", "w2"]
        assert all(torch.equal(found[name], tensors[name]) for name in found)
    assert sorted(path.name for path in one.iterdir()) == [weights.SINGLE]
    tensors = {"both": torch.randn(2, 3, dtype=torch.complex128).conj(), "real": torch.randn(2, 2)}
    weights.write(tmp_path / weights.SINGLE, tensors)
    found = weights.read(tmp_path, tensors)
    assert all(torch.equal(found[name], tensor.resolve_conj()) for name, tensor in tensors.items())
    assert weights.shapes(tmp_path) == {name: weights.shape_of(tensor) for name, tensor in tensors.items()}
    # Other libraries read them in pairs.
    assert torch.equal(load_file(tmp_path / weights.SINGLE)["both"], torch.view_as_real(found["both"]))
    names = [f"model.layers.{index // 768}.mlp.experts.{index % 768}.weight" for index in range(45_000)]
    (tmp_path / weights.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "a.bin")}))
    assert weights.indexed_file_names(tmp_path) == set()
    with pytest.raises(FileError, match=r"cannot read weights .*a\.bin"):
        weights.shapes(tmp_path)
    nothing = "\n\ndef loss(output, batch):\n    return output.sum() * 0, (batch[1] < 0).sum()\n"
    case = make_case(tmp_path / "nothing.py", (MODELS / "dropout.py").read_text() + nothing)
    with pytest.raises(TrainingError, match="count of 0 for the whole mini-batch"):
        case.train(case.plan([1], 2, 4), tmp_path, 1)


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


@pytest.mark.reliability(16)
def test_writing_copies_little_and_a_new_folder_goes_with_a_run_that_fails(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    parts = {"whole": whole, "again": whole, "row": whole.view(2, 3)[1], "column": whole.view(2, 3).T}
    weights.write(tmp_path / weights.SINGLE, parts)
    found = weights.read(tmp_path, parts)
    assert all(torch.equal(found[name], tensor) for name, tensor in parts.items())
    layer = nn.Linear(3, 4)
    with StorageTracker() as tracker:
        weights.write(tmp_path / weights.SINGLE, dict(layer.named_parameters()))
    assert tracker.peak_bytes == 0
    asked: list[str] = []
    with pytest.raises(FileError, match="cannot write"):
        weights.write(tmp_path / "absent" / "file", dict.fromkeys("abc", torch.zeros(1)), asked.append)
    # Others wait until their parts were asked for.
    assert asked == ["a", "b", "c"]
    (tmp_path / "old").mkdir()
    for name, made in (("old", ()), ("new", ()), ("begun", ("model.safetensors",))):
        with pytest.raises(TrainingError), folder_of(tmp_path / name):  # noqa: PT012
            for each in made:
                (tmp_path / name / each).touch()
            raise TrainingError("the disk is full")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["begun", "old"]
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"cannot make the folder .*file/trained: Not a directory"):
        make_folder(tmp_path / "file" / "trained")


@pytest.mark.reliability(21, 22)
def test_damaged_weights_and_pickles_are_refused_by_name(tmp_path: Path) -> None:
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
    (tmp_path / weights.INDEX).unlink()
    payload = type("Touching", (), {"__reduce__": lambda _: (Path.touch, (tmp_path / "ran",))})()
    torch.save(payload, tmp_path / "pytorch_model.bin")
    with pytest.raises(FileError, match=r"holds neither model\.safetensors nor"):
        weights.read(tmp_path, ["w"])
    for write in (torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))):
        write(payload, tmp_path / weights.SINGLE)
        for read in (lambda: weights.read(tmp_path, ["w"]), lambda: weights.shapes(tmp_path)):
            with pytest.raises(FileError, match="cannot read weights"):
                read()
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "ran").exists()
