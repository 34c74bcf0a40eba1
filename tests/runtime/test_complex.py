"""Complex numbers are profiled, sent, reduced, clipped, saved and evaluated as the plain model has them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from autopar.capture.model.source import load
from autopar.options.profile import ProfileOptions
from autopar.options.train import RunOptions, TrainSettings
from autopar.ownership import Shard
from autopar.profiler.subject import prepare
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint.weights import read, shapes
from autopar.runtime.loss import StepRecord
from autopar.runtime.messages.transport import sendable
from autopar.runtime.start.launch import run
from drawn_models import model_case
from paths import MODELS

FILE = MODELS / "conjugated.py"
STEPS = 3


@pytest.mark.parametrize(("widths", "shard"), [([1, 1], "none"), ([1, 2], "optimizer"), ([2, 1], "parameters")])
def test_trained_weights_equal_the_plain_loops(
    widths: Sequence[int], shard: Shard, pool: RankPool, tmp_path: Path
) -> None:
    case = model_case("conjugated")
    plan = case.plan(widths, 3, 4, shard=shard)
    run(plan, str(FILE), RunOptions(steps=STEPS, save=tmp_path / "saved"), pool=pool)
    found, truth = read(tmp_path / "saved", shapes(tmp_path / "saved")), case.truth(plan, STEPS)
    expected = {**truth.parameters, **truth.buffers}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.resolve_conj(), rtol=1e-10, atol=1e-10)
    if shard == "none":
        # Of files that a run has written, another run begins.
        options = RunOptions(steps=1, save=tmp_path / "last", weights=tmp_path / "saved")
        run(case.plan([2, 1], 3, 4), str(FILE), options, pool=pool)
        last = read(tmp_path / "last", shapes(tmp_path / "last"))
        assert last.keys() == found.keys()
        assert all((last[name] != found[name]).any() for name in truth.parameters)


def test_complex_numbers_are_profiled_and_their_norm_is_torchs(tmp_path: Path) -> None:
    narrow = tmp_path / "narrow.py"
    narrow.write_text(FILE.read_text().replace("complex128", "complex64").replace("float64", "float32"))
    for file, precision in ((FILE, "fp64"), (narrow, "fp32")):
        assert prepare(load(str(file)), ProfileOptions(batch=8)).precision == precision
    value = torch.randn(3, 4, dtype=torch.complex128)
    for view in (value.conj(), value.imag, value.conj().imag, value.conj().T, torch._neg_view(value.real)):
        sent = sendable(view)
        assert torch.equal(sent, view.clone())
        assert sent.view(torch.uint8).numel() == view.numel() * view.element_size()
    case = model_case("conjugated")
    module, data = case.model.build(), case.model.dataset()
    picked = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:12].tolist()
    batch = torch.utils.data.default_collate([data[index] for index in picked])
    case.model.functions["loss"](module(batch[0]), batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    records: dict[int, list[StepRecord]] = {}
    case.train(case.plan([1, 2], 1, 12), tmp_path, 1, TrainSettings(clip_norm=1.0), records)
    assert [record.gradient_norm for record in records[0]] == pytest.approx([float(norm)], rel=1e-12)
