"""Kernels and saved bytes of layers on fake tensors; profiles of GPUs that are not there."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.api.estimates import estimate_profile
from autopar.capture import LayerGraph, capture, capture_module, load, named_tensors
from autopar.capture.model.batch import given_model
from autopar.errors import CaptureError
from autopar.formats.profile import Precision
from autopar.hardware.clusters import cluster_named
from autopar.hardware.gpus import find
from autopar.options.profile import ProfileOptions
from autopar.planner import plan
from autopar.profiler.device import peak_bytes
from autopar.profiler.estimate import RESERVED_BYTES, graph_work, layer_seconds, workload
from autopar.profiler.kernels import Constants
from autopar.profiler.layer_runs import LayerPass, record
from autopar.profiler.optimizer import moved_per_number
from autopar.profiler.profile import measure_layers
from autopar.profiler.subject import Subject, prepare
from autopar.progress import no_progress
from capture_zoo import Doubled, Made, build
from families import tiny_config
from paths import EXAMPLES
from subjects import gpt_subject

A100 = find("A100")


class _Attending(nn.Module):
    """A block around one attention; heads of 64 numbers."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.masked = nn.Linear(128, 384), nn.Linear(128, 128), masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 2, 64).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(length, length, dtype=torch.bool).tril() if self.masked else None
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.1, is_causal=not self.masked)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, 128)).square().mean()


@cache
def _attending(masked: bool = False) -> LayerGraph:
    return capture_module(_Attending(masked), (torch.randn(2, 256, 128),), None)


def test_flash_attention_is_one_kernel_that_saves_its_inputs_output_and_sums() -> None:
    work = graph_work(_attending(), 4, A100, "bf16").layers[0]
    attention = [kernel for kernel in work.forward if kernel.kind == "attention"]
    # Two products of 256 x 256 x 64 for each of 4 x 2 heads, of which a causal mask leaves half.
    assert [kernel.flops for kernel in attention] == [2 * 2 * (4 * 2) * 256 * 256 * 64 // 2]
    assert not [kernel for kernel in work.forward if "softmax" in kernel.op]
    matrix_bytes = 2 * 4 * 2 * 256 * 256
    assert max(work.saved_bytes.values()) < matrix_bytes
    sums = 4 * 2 * 256 * 4
    assert sums in work.saved_bytes.values()


@pytest.mark.parametrize(
    ("gpu", "precision", "masked", "op"),
    [
        ("A100", "fp16", True, "efficient"),
        ("A100", "fp32", False, "efficient"),
        ("V100", "fp16", False, "efficient"),
        ("H100", "bf16", False, "flash"),
    ],
)
def test_attention_is_by_gpu_precision_and_mask(gpu: str, precision: Precision, masked: bool, op: str) -> None:
    work = graph_work(_attending(masked), 2, find(gpu), precision).layers[0]
    assert [k.op for k in work.forward if k.kind == "attention"] == [f"_scaled_dot_product_{op}_attention"]
    assert any(k.op == f"_scaled_dot_product_{op}_attention_backward" for k in work.backward)


def test_the_products_of_an_lstm_are_counted_at_every_step() -> None:
    model, before = nn.LSTM(32, 32, batch_first=True), torch._C._get_mkldnn_enabled()
    graph = capture_module(model, (torch.ones(2, 8, 32), torch.ones(2)), lambda output, _: output[0].mean())
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    for precision in precisions:
        flops = sum(kernel.flops for layer in graph_work(graph, 2, A100, precision).layers for kernel in layer.forward)
        # Of the inputs and of the states: two rows, eight steps, four gates.
        assert flops == 2 * (2 * 2 * 8 * 32 * 4 * 32)
    assert torch._C._get_mkldnn_enabled() == before


@pytest.mark.parametrize("name", ["chain", "skips", "norms"])
def test_saved_bytes_and_peaks_are_those_of_a_run_on_the_cpu(name: str) -> None:
    model, batch, loss = build(name)
    graph = capture_module(model, batch, loss)
    tensors = named_tensors(batch)
    rows = next(iter(tensors.values())).shape[0]
    real = record(graph, tensors, {tensor.name for tensor in graph.tensors})
    for layer, work in zip(graph.layers, graph_work(graph, rows, A100, "fp32").layers, strict=True):
        if any(kernel.op == "native_dropout" for kernel in work.forward):
            continue
        assert sorted(work.saved_bytes.values()) == sorted(real.saved_bytes[layer.name].values())
        for parameter in layer.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        run = LayerPass(layer, real.inputs[layer.name], graph.outputs)
        assert work.peak_bytes == pytest.approx(peak_bytes(run.whole, torch.device("cpu")), rel=0.01)


def test_parameters_without_values_are_estimated_alike_and_left_alone() -> None:
    graph = _attending.__wrapped__()
    before = [parameter.detach().clone() for layer in graph.layers for parameter in layer.module.parameters()]
    real = graph_work(graph, 4, A100, "bf16")
    after = [parameter for layer in graph.layers for parameter in layer.module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in after)
    for layer in graph.layers:
        layer.module.to("meta")
    assert graph_work(graph, 4, A100, "bf16") == real


def test_a_layer_that_reads_values_is_named() -> None:
    reading = Made(lambda _, x: x * x.detach().sum().item())
    modules = nn.Sequential(nn.Linear(4, 4), reading, nn.Linear(4, 1))
    graph = capture_module(modules, (torch.ones(2, 4), torch.ones(2, 1)), lambda out, batch: out.mean(), list)
    with pytest.raises(CaptureError, match="cannot be estimated without its tensors' values"):
        graph_work(graph, 2, A100, "fp32")


class Again(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_modules_that_are_not_captured_are_estimated_as_they_run() -> None:
    encoder = nn.TransformerEncoderLayer(64, 1, 128, dropout=0.0, batch_first=True)
    model = nn.Sequential(encoder, Again(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 1))
    batch = (torch.randn(2, 16, 64), torch.ones(2, 1))
    graph = capture_module(model, batch, lambda output, _: output.mean(), list)
    attending, again, _ = graph_work(graph, 4, A100, "fp32").layers
    # Two products of 16 x 16 x 64 for each of 4 samples, and five of that shape backward.
    attention = [kernel for kernel in (*attending.forward, *attending.backward) if kernel.kind == "attention"]
    assert [kernel.flops for kernel in attention] == [2 * 2 * 4 * 16 * 16 * 64, 5 * 2 * 4 * 16 * 16 * 64]
    assert [kernel.op for kernel in again.backward if kernel.flops] == ["addmm", "mm", "mm"]
    assert list(again.saved_bytes) == ["input 0"]


@pytest.mark.slow
def test_a_declared_plan_is_estimated_with_and_without_values(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="autopar[hf] is not installed")
    content = tiny_config("llama", 2, tie_word_embeddings=True, architectures=["LlamaForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(content))
    user, works = load(f"hf:{tmp_path}"), []
    for on_meta in (False, True):
        model: Any = user.build(on_meta=on_meta)
        for block in model.model.layers:
            block.mlp.act_fn = Made(lambda _, x: Doubled.apply(torch.tanh(x)))
        graph = capture(user, model)
        assert (graph.on_meta, graph.portable) == (on_meta, False)
        works.append(graph_work(graph, 4, A100, "bf16"))
    assert works[0] == works[1]


@pytest.fixture(scope="module")
def mlp() -> Subject:
    return prepare(load(str(EXAMPLES / "mlp.py")), ProfileOptions(batch=8), no_progress)


def prepared(*modules: nn.Module, **functions: Any) -> Subject:  # noqa: ANN401
    batch = torch.randn(8, 8), torch.randn(8, 1)
    user = given_model(nn.Sequential(*modules), batch, loss=lambda out, to: F.mse_loss(out, to[1]), **functions)
    return prepare(user, ProfileOptions(batch=8), no_progress)


def test_a_single_sample_without_a_variance_is_left_to_the_larger_sizes() -> None:
    subject = prepared(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    assert workload(subject, A100, 8).sizes == (2, 4, 8)
    with pytest.raises(CaptureError, match="cannot be estimated"):
        workload(subject, A100, 8, sizes=(1,))


def test_every_number_of_an_estimated_profile_says_so_and_a_plan_can_be_made_of_it() -> None:
    options = ProfileOptions(batch=4, precision="bf16", tensor=2)
    profile = estimate_profile(gpt_subject(4), find("H100"), options, no_progress)
    assert {cost.provenance for layer in profile.layers for cost in layer.costs} == {"estimated"}
    assert profile.device.name == "H100-SXM"
    assert profile.device.reserved_bytes == RESERVED_BYTES
    assert any("estimated for H100-SXM" in note for note in profile.notes)
    block = next(layer for layer in profile.layers if layer.name == "blocks.1")
    assert block.measured_as == "blocks.0"
    assert block.optimizer_bytes >= 2 * block.trainable_bytes
    assert all(0 < cost.backward_input_s < cost.backward_s for cost in block.costs if cost.backward_input_s)
    largest = block.costs[-1]
    # So small a layer is launched for longer than it computes.
    assert largest.forward_launch_s is not None
    assert largest.forward_launch_s > largest.forward_s > 0
    constants, load = Constants(forward_launch_s=1.0, backward_launch_s=100.0), workload(gpt_subject(4), A100, 4)
    launched, launches = layer_seconds(load, constants), load.table.launches.reshape(-1, 4)[load.places]
    assert np.array_equal(launched.forward_launch_s, launches[..., 0])
    assert np.array_equal(launched.backward_launch_s, 100 * launches[..., 1])
    assert np.array_equal(launched.backward_s, layer_seconds(load, Constants()).backward_s)
    assert (launched.accumulate_s[launches[0, :, 3] > 0] >= 100).all()
    found = plan(profile, cluster_named("4xH100"))
    assert found.predicted.step_s > 0


@pytest.mark.slow
def test_what_is_held_between_halves_is_what_is_measured(mlp: Subject) -> None:
    options = ProfileOptions(batch=8, budget_s=0.05, tensor=1)
    estimated, measured = estimate_profile(mlp, A100, options, no_progress), measure_layers(mlp, options)
    for one, other in zip(estimated.layers, measured.layers, strict=True):
        held = [{cost.micro_batch: cost.weight_saved_bytes for cost in layer.costs} for layer in (one, other)]
        common = held[0].keys() & held[1].keys()
        assert {size: held[0][size] for size in common} == {size: held[1][size] for size in common}
    assert any(cost.weight_saved_bytes for layer in estimated.layers for cost in layer.costs)


def test_listed_modules_without_halves_are_estimated_whole_and_named() -> None:
    subject = prepared(nn.Linear(8, 8), Again(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1), layers=list)
    profile = estimate_profile(subject, A100, ProfileOptions(batch=8, tensor=1), no_progress)
    assert {cost.backward_input_s for layer in profile.layers for cost in layer.costs} == {None}
    assert "backwards are not split in halves, which layer 1 does not have" in profile.notes


def test_storages_that_cross_boundaries_carry_their_tensors_names(mlp: Subject) -> None:
    profile = estimate_profile(mlp, A100, ProfileOptions(batch=8, tensor=1), no_progress)
    names = {tensor.name for tensor in profile.tensors}
    stored = {saved.storage for layer in profile.layers for cost in layer.costs for saved in cost.saved}
    own = {name for name in stored if "#" in name}
    assert stored - own <= names
    assert all(name.split("#")[0] in {layer.name for layer in profile.layers} for name in own)


def test_what_an_optimizer_moves_is_counted_over_its_kernels(mlp: Subject) -> None:
    # SGD with momentum: momentum times 0.9, plus the gradient, and the parameter minus it.
    trained = [("w", nn.Parameter(torch.ones(100, 10)))]
    assert moved_per_number(mlp.user, trained) == pytest.approx(4 * (2 + 3 + 3))
    assert moved_per_number(mlp.user, [("b", nn.Parameter(torch.ones(3), requires_grad=False))]) == 0.0
