"""Layers run one after another give the plain model's loss, gradients and buffers."""
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import random

import pytest
import torch

from autopar.capture import capture_module, load, named_tensors, slice_rows
from autopar.capture.batch import rebuild
from autopar.capture.check import check_gradients
from autopar.capture.store import load_graph, save_graph
from capture_zoo import MODELS, build
from paths import EXAMPLES
from stage_runs import assert_equal_to_plain


def some_cuts(count):
    """Every boundary at once, and a few random choices of 2 to 8 stages."""
    yield tuple(range(1, count))
    draw = random.Random(count)
    for stages in range(2, min(8, count) + 1):
        yield tuple(sorted(draw.sample(range(1, count), stages - 1)))


@pytest.mark.parametrize("name", MODELS)
def test_stages_at_any_boundaries_equal_the_plain_model(name):
    model, batch, loss = build(name)
    graph = capture_module(model, batch, loss)
    for cuts in some_cuts(len(graph.layers)):
        assert_equal_to_plain(model, graph, batch, loss, cuts)


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_captured_at_two_samples_runs_at_one_and_at_six(name):
    model, batch, loss = build(name)
    tensors = named_tensors(batch)
    graph = capture_module(model, rebuild(batch, slice_rows(tensors, 0, 2)), loss)
    for rows in (1, 6):
        part = rebuild(batch, slice_rows(tensors, 0, rows))
        assert_equal_to_plain(model, graph, part, loss, range(1, len(graph.layers)))


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_graph_is_the_same_and_small(name, tmp_path):
    model, batch, loss = build(name)
    graph = capture_module(model, batch, loss)
    save_graph(graph, tmp_path)
    loaded = load_graph(tmp_path)
    assert not any(buffer.requires_grad for layer in loaded.layers for buffer in layer.module.buffers())
    attributes = ("name", "modules", "inputs", "outputs", "parameters", "buffers", "random", "fingerprint")
    for one, other in zip(graph.layers, loaded.layers, strict=True):
        assert [getattr(one, a) for a in attributes] == [getattr(other, a) for a in attributes]
        assert all(p.device.type == "meta" for p in other.module.parameters())
    assert (loaded.tensors, loaded.inputs, loaded.outputs) == (graph.tensors, graph.inputs, graph.outputs)
    assert loaded.loss == graph.loss
    assert_equal_to_plain(model, loaded, batch, loss, range(1, len(graph.layers)))


@pytest.mark.parametrize("name", ["gpt", "resnet", "mlp"])
def test_the_examples_equal_the_plain_model(name):
    user = load(str(EXAMPLES / f"{name}.py"))
    model = user.build(0).double()
    batch = named_tensors(user.load_batch(user.dataset(), range(4)))
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    batch = rebuild(user.load_batch(user.dataset(), range(4)), batch)
    graph = capture_module(model.train(), batch, user.loss)
    assert len(graph.layers) >= 8
    assert_equal_to_plain(model, graph, batch, user.loss, range(1, len(graph.layers)))


def test_capturing_leaves_the_model_as_it_was():
    model, batch, loss = build("norms")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    graph = capture_module(model, batch, loss)
    check_gradients(model, graph, batch, loss)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    own = {id(parameter) for parameter in model.parameters()}
    assert all(id(parameter) in own for layer in graph.layers for parameter in layer.module.parameters())
