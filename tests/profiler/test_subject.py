"""A model that is prepared to be measured or estimated, and what is refused before that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.capture import load
from autopar.errors import ModelError, UsageError
from autopar.profiler.subject import ProfileOptions, Subject, prepare


@pytest.mark.parametrize("option", ["batch", "threads"])
@pytest.mark.parametrize("value", [0, 2**31, 2**40])
def test_numbers_that_nothing_is_measured_with_are_refused(option: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"`{option}` must be .* found {value}"):
        ProfileOptions(**{option: value})  # type: ignore[arg-type]


FILE = """
import torch
from torch import nn


def model():
    made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    return made{change}


def dataset():
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(torch.randn({samples}, 8, generator=generator), torch.ones({samples}, 1))


def loss(output, batch):
    return (output - batch[1]).square().mean()
"""


def _prepare(folder: Path, options: ProfileOptions, change: str = "", samples: int = 8) -> Subject:
    path = folder / "model.py"
    path.write_text(FILE.format(change=change, samples=samples))
    return prepare(load(str(path)), options)


@pytest.mark.parametrize(
    ("change", "samples", "options", "error", "said"),
    [
        ("", 0, {}, ModelError, r"dataset\(\) is empty"),
        ("", 7, {}, UsageError, "the dataset has 7 samples, `batch` asks for 8: .* give `batch=7` or less"),
        (".requires_grad_(False)", 8, {}, ModelError, "there is nothing to train"),
        (".half()", 8, {}, ModelError, "parameters are float16; all must be float32"),
        ("", 8, {"precision": "fp64"}, UsageError, "are fp32; leave the option out"),
        (".double()", 8, {"precision": "bf16"}, UsageError, "are fp64; leave the option out, or build them in float32"),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_it_is_measured(
    change: str, samples: int, options: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        _prepare(tmp_path, ProfileOptions(batch=8, **options), change, samples)


def test_a_model_is_captured_with_its_samples_and_the_precision_of_its_layers(tmp_path: Path) -> None:
    subject = _prepare(tmp_path, ProfileOptions(batch=8, precision="bf16"))
    assert [layer.name for layer in subject.graph.layers] == ["0", "1"]
    assert (subject.precision, subject.loss_difference) == ("bf16", None)
    assert subject.parameter_bytes == 4 * (8 * 8 + 8 + 8 + 1)
    whole, part = subject.batch(8), subject.batch(3)
    assert whole.keys() == set(subject.graph.inputs)
    assert all(torch.equal(part[name], whole[name][:3]) for name in whole)
    assert _prepare(tmp_path, ProfileOptions(batch=4)).precision == "fp32"
