"""Layers run one after another give the plain model's loss, gradients and buffers."""
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path

import pytest
import torch
from capture_zoo import MODELS, build

from autopar.capture import capture_module, load, materialize, named_tensors, slice_rows
from autopar.capture.batch import StepModule, rebuild
from autopar.capture.check import check_gradients
from autopar.capture.store import load_graph, save_graph

EXAMPLES = Path(__file__).parents[2] / "examples"


def plain(model, batch, loss):
    """One ordinary forward and backward of a copy; loss outputs, gradients, buffers."""
    model = copy.deepcopy(model)
    torch.manual_seed(5)
    outputs = StepModule(model, batch, loss)(*(t.clone() for t in named_tensors(batch).values()))
    outputs[0].backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return outputs, gradients, dict(model.named_buffers())


def run_stages(graph, batch, cuts):
    """Run layers in stages, each on its own tape, as a pipeline does; gradients by the parameters' names."""
    known = {name: tensor.clone() for name, tensor in named_tensors(batch).items()}
    rows = len(next(iter(known.values())))
    edges = [0, *cuts, len(graph.layers)]
    stages = []
    torch.manual_seed(5)
    for low, high in itertools.pairwise(edges):
        layers = graph.layers[low:high]
        made = {name for layer in layers for name in layer.outputs}
        read = {name for layer in layers for name in layer.inputs if name not in made}
        entered = {name: known[name].detach().requires_grad_(known[name].requires_grad) for name in sorted(read)}
        values = dict(entered)
        for layer in layers:
            values.update(zip(layer.outputs, layer.module(rows, *(values[n] for n in layer.inputs)), strict=True))
        known.update({name: values[name] for name in made})
        stages.append((entered, {name: values[name] for name in made}))
    outputs = tuple(known[name] for name in graph.outputs)
    flowing = {graph.outputs[0]: torch.ones_like(outputs[0])}
    for entered, left in reversed(stages):
        names = [name for name in left if name in flowing]
        torch.autograd.backward([left[n] for n in names], [flowing[n] for n in names])
        for name, tensor in entered.items():
            if tensor.grad is not None:
                flowing[name] = flowing[name] + tensor.grad if name in flowing else tensor.grad
    return outputs


def clones(model):
    """Fresh parameters and buffers by name."""
    values = {n: torch.nn.Parameter(p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()}
    return values, {n: b.detach().clone() for n, b in model.named_buffers()}


def assert_equal_to_plain(model, graph, batch, loss, cuts):
    expected, gradients, buffers = plain(model, batch, loss)
    parameters, own_buffers = clones(model)
    for layer in graph.layers:
        materialize(layer, {**parameters, **own_buffers})
    outputs = run_stages(graph, batch, cuts)
    for one, other in zip(outputs, expected, strict=True):
        assert torch.equal(one, other)
    largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    for name, gradient in gradients.items():
        found = parameters[name].grad
        assert (found is None) == (gradient is None), name
        if gradient is not None:
            assert float((found - gradient).abs().max()) <= 1e-12 * largest, name
    for name, buffer in buffers.items():
        assert torch.equal(own_buffers[name], buffer), name


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
