"""Saved bytes and peaks, against whole models and counting by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture import capture_module, materialize, named_tensors
from autopar.capture.batch import StepModule
from autopar.capture.effects import StorageTracker
from autopar.profiler.device import peak_bytes
from autopar.profiler.layer_runs import LayerPass, SavedStorages, record
from capture_zoo import build


@pytest.mark.parametrize("name", ["chain", "language", "norms", "skips", "recurrent"])
def test_the_layers_saved_storages_are_those_of_the_whole_model(name: str) -> None:
    model, batch, loss = build(name)
    graph = capture_module(model, batch, loss)
    tensors = named_tensors(batch)
    saved = record(graph, tensors, {tensor.name for tensor in graph.tensors}).saved_bytes
    union = {storage: size for storages in saved.values() for storage, size in storages.items()}
    whole = SavedStorages("model", (*model.parameters(), *model.buffers()))
    with whole.recording():
        outputs = StepModule(model, batch, loss)(*tensors.values())
    expected = whole.bytes_by_name({}, {})
    free = {size for storage, size in union.items() if "#" in storage}
    if name == "language":
        # Masks and positions are made again in every layer that reads them, so each layer may keep its own.
        assert sum(union.values()) >= sum(expected.values())
        assert free
    else:
        assert sorted(union.values()) == sorted(expected.values())
    assert outputs[0].requires_grad


def test_the_tracker_counts_what_is_alive_at_once() -> None:
    with StorageTracker() as tracker:
        a = torch.zeros(100)
        b = a.view(10, 10)
        c = a + 1
        del c
        d = b.exp()
        d.mul_(2)
    assert tracker.peak_bytes == 800
    assert tracker.alive_bytes == 800


def test_the_peak_of_a_linear_layer_is_what_one_counts_by_hand() -> None:
    model, batch, loss = build("chain")
    graph = capture_module(model, batch, loss)
    inputs = record(graph, named_tensors(batch), {tensor.name for tensor in graph.tensors}).inputs
    layer = graph.layers[1]
    for parameter in layer.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    work = LayerPass(layer, inputs[layer.name], graph.outputs)
    activation, weight, bias = 6 * 8 * 8, 8 * 8 * 8, 8 * 8
    # Forward: linear, tanh (saved). Backward: gradient of the output; of tanh; then at once the gradients of the
    # input, of the weight and of the bias, before they are added to those that are there.
    found = peak_bytes(work.whole, torch.device("cpu"))
    assert 3 * activation + weight <= found <= 4 * activation + weight + bias


@pytest.mark.parametrize("name", ["chain", "language", "recurrent"])
def test_fake_tensors_save_and_peak_as_real_ones_do(name: str) -> None:
    model, batch, loss = build(name)
    graph = capture_module(model, batch, loss)
    crossing = {tensor.name for tensor in graph.tensors}
    real = record(graph, named_tensors(batch), crossing)
    layer = graph.layers[1]
    peak = peak_bytes(LayerPass(layer, real.inputs[layer.name], graph.outputs).whole, torch.device("cpu"))
    with FakeTensorMode() as fake:
        weights = {name: nn.Parameter(fake.from_tensor(tensor)) for name, tensor in model.named_parameters()}
        buffers = {name: fake.from_tensor(tensor) for name, tensor in model.named_buffers()}
        for part in graph.layers:
            materialize(part, {**weights, **buffers})
        faked = {key: fake.from_tensor(tensor) for key, tensor in named_tensors(batch).items()}
        found = record(graph, faked, crossing)
        assert peak_bytes(LayerPass(layer, found.inputs[layer.name], graph.outputs).whole, torch.device("cpu")) == peak
    assert (found.saved_bytes, found.output_bytes) == (real.saved_bytes, real.output_bytes)
