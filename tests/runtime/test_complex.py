"""Complex numbers are profiled, sent, reduced, clipped, saved and evaluated as the plain model has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import plain
from any_plan import truth_of
from autopar.capture.export import capture
from autopar.capture.source import load
from autopar.formats.plan import Shard
from autopar.profiler.subject import ProfileOptions, prepare
from autopar.ranks.pool import RankPool
from autopar.runtime.messages.transport import sendable
from autopar.runtime.settings import TrainSettings
from autopar.runtime.start.launch import RunOptions, run
from autopar.runtime.weights import names, read
from dictated import dictate
from paths import MODELS

FILE = MODELS / "conjugated.py"
STEPS = 3


@pytest.mark.parametrize(
    ("widths", "shard", "weights"),
    [([1, 1], "none", False), ([2, 1], "none", True), ([1, 2], "optimizer", False), ([2, 1], "parameters", False)],
)
def test_trained_weights_equal_the_plain_loops(
    widths: Sequence[int], shard: Shard, weights: bool, pool: RankPool, tmp_path: Path
) -> None:
    model = load(str(FILE))
    graph = capture(model, model.build(0))
    plan = dictate(graph, model, widths, 3, 4, shard=shard)
    if weights:
        # Of files that a run has written, another run begins.
        run(dictate(graph, model, [1, 1], 1, 12), str(FILE), RunOptions(steps=1, save=tmp_path / "first"), pool=pool)
    options = RunOptions(steps=STEPS, save=tmp_path / "last", weights=tmp_path / "first" if weights else None)
    run(plan, str(FILE), options, pool=pool)
    found = read(tmp_path / "last", names(tmp_path / "last"))
    truth = truth_of(FILE, graph, plan, STEPS)
    assert found.keys() == {**truth.parameters, **truth.buffers}.keys()
    if weights:
        begun = read(tmp_path / "first", names(tmp_path / "first"))
        assert all((begun[name] != value).any() for name, value in found.items() if name in truth.parameters)
        return
    for name, value in {**truth.parameters, **truth.buffers}.items():
        torch.testing.assert_close(found[name], value.resolve_conj(), rtol=1e-10, atol=1e-10)


def test_the_norm_of_complex_gradients_is_torchs(pool: RankPool) -> None:
    source = plain.load_file(FILE)
    torch.manual_seed(0)
    module = source.model()
    model = load(str(FILE))
    plan = dictate(capture(model, model.build(0)), model, [1, 2], 1, 12)
    picked = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:12].tolist()
    batch = torch.utils.data.default_collate([source.dataset()[index] for index in picked])
    source.loss(module(batch[0]), batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    outcome = run(plan, str(FILE), RunOptions(steps=1, settings=TrainSettings(clip_norm=1.0)), pool=pool)
    assert outcome.report.gradient_norm == pytest.approx([float(norm)], rel=1e-12)


@pytest.mark.parametrize(("narrow", "precision"), [(False, "fp64"), (True, "fp32")])
def test_a_model_of_complex_and_real_numbers_of_one_width_is_profiled(
    narrow: bool, precision: str, tmp_path: Path
) -> None:
    text = FILE.read_text()
    file = tmp_path / "narrow.py"
    file.write_text(text.replace("complex128", "complex64").replace("float64", "float32") if narrow else text)
    assert prepare(load(str(file)), ProfileOptions(batch=8)).precision == precision


def test_numbers_are_sent_as_they_are_read() -> None:
    value = torch.randn(3, 4, dtype=torch.complex128)
    for view in (value.conj(), value.imag, value.conj().imag, value.conj().T, torch._neg_view(value.real)):
        sent = sendable(view)
        assert torch.equal(sent, view.clone())
        assert sent.view(torch.uint8).numel() == view.numel() * view.element_size()
