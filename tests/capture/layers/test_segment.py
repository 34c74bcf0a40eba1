"""Where layers begin, what crosses, and what does not."""
# ruff: noqa: ANN001, ANN003, ANN201, ANN202

from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture import capture_module
from capture_zoo import By, Chain, Made, build, captured, linear, mean_square, regression

STEPS = tuple(f"steps.{i}" for i in range(4))
BLOCKS = tuple(f"transformer.h.{i}" for i in range(4))
TWICE = ("first", "first@2")
TIED = {"transformer.wte.weight": ("transformer.wte", "head")}


@pytest.mark.parametrize(
    ("name", "expected", "tied"),
    [
        # Layers begin at blocks, and are named after them; a tied parameter has one name.
        ("language", [("transformer.wte", "transformer.wpe"), *BLOCKS, "head"], TIED),
        # Values without a batch dimension are recomputed, and their parameters shared.
        ("shared bias", [("steps.0", "table"), *STEPS[1:]], {"table.weight": STEPS, "temperature": STEPS}),
        # A wrapper with one child is walked through.
        ("wrapped", [f"net.0.{at}" for at in range(4)], {}),
        # A second call of a module is another layer.
        ("twice", ["first", "second", "first@2"], {"first.weight": TWICE, "first.bias": TWICE}),
        # An in-place operator stays with what it writes.
        ("norms", ["stem.0", ("stem.1", "stem.2"), *(f"blocks.{at}" for at in range(3)), "head"], {}),
        # What writes a buffer stays with all that reads it.
        ("norm twice", ["first", ("norm", "second", "norm@2"), "third"], {}),
        # A parametrised weight belongs to its module.
        ("parametrized", ["first", "second", "third"], {}),
    ],
)
def test_layers_begin_and_end_where_they_may(name, expected, tied):
    *_, graph = captured(name)
    modules = [each if isinstance(each, tuple) else (each,) for each in expected]
    assert [layer.modules for layer in graph.layers] == modules
    assert [layer.name for layer in graph.layers] == [
        "norm+second+norm@2" if names[0] == "norm" else names[0] for names in modules
    ]
    assert graph.tied_parameters() == tied


def test_what_crosses_is_known_by_its_readers_size_type_and_batch_dimension_and_a_mask_made_of_inputs_does_not():
    first = next(tensor for tensor in captured("skips")[-1].tensors if tensor.producer == "down1")
    assert first.consumers == ("down2", "up2")  # what joins it runs behind up2 and ahead of up1
    assert first.bytes_per_sample == 6 * 8
    # An integer crosses without gradient.
    crossing = {tensor.dtype: tensor.gradient for tensor in captured("integers")[-1].tensors if tensor.producer}
    assert crossing == {torch.float64: True, torch.int64: False}
    *_, graph = captured("language")
    assert all("batch.tokens" in layer.inputs for layer in graph.layers[:-1])
    assert [tensor.name for tensor in graph.tensors if tensor.producer] == [
        layer.outputs[0] for layer in graph.layers[:-1]
    ]
    prints = [layer.fingerprint for layer in graph.layers]
    assert len(set(prints[1:5])) == 1
    assert len(set(prints)) == 3


@pytest.mark.slow
def test_the_batch_dimension_of_a_crossing_tensor_is_known():
    specs = [tensor for tensor in captured("transformer")[-1].tensors if tensor.producer]
    assert {tensor.batch_dim for tensor in specs} == {1}
    assert specs[0].shape(7) == (5, 7, 8)


def test_layers_are_marked_and_named_by_what_they_draw_freeze_read_and_return():
    # Dropout of zero and in evaluation draws nothing.
    zero = By(lambda _, x: F.dropout(F.dropout(x, 0.0, True), 0.5, False)).double()
    graphs = captured("dropout")[-1], captured("chain")[-1], capture_module(zero, regression(), mean_square)
    assert [{layer.random for layer in graph.layers[:-1]} for graph in graphs] == [{True}, {False}, {False}]
    model = By(lambda _, x: x * [torch.rand_like(x), torch.rand_like(x)][1])
    graph = capture_module(model.double(), regression(), mean_square)
    nodes = [node for layer in graph.layers for node in layer.module.graph.nodes]
    assert sum("rand_like" in str(node.target) for node in nodes) == 8
    model, batch, loss = build("chain")
    model.steps[0].requires_grad_(False)
    graph = capture_module(model, batch, loss)
    assert graph.layers[0].fingerprint != graph.layers[1].fingerprint
    assert [tensor.gradient for tensor in graph.tensors if tensor.producer] == [False, True, True]
    # The second layer's backward has no input gradient to compute, the third's has.
    assert graph.layers[1].fingerprint != graph.layers[2].fingerprint

    class Keywords(Chain):
        def forward(self, **batch):
            return {"loss": (super().forward(batch["x"]) - batch["y"]).square().mean(), "extra": batch["x"]}

    x, y = regression()
    graph = capture_module(Keywords().double(), {"x": x, "y": y})
    assert (graph.loss, graph.inputs) == ("mean", ("batch.x", "batch.y"))
    assert len(graph.layers) == 4
    model, batch, _ = build("chain")
    graph = capture_module(model, batch, lambda output, batch: (output.square().sum(), output.shape[0] * 2))
    assert (graph.loss, graph.outputs) == ("sum_count", ("loss_sum", "loss_count"))
    assert graph.layers[-1].outputs == ("loss_sum", "loss_count")
    known = dict(zip(graph.layers[-1].inputs, [torch.zeros(5, 8, dtype=torch.float64)], strict=True))
    assert float(graph.layers[-1].module(5, *known.values())[1]) == 10


def norm():
    return nn.LayerNorm(8)


def layers_by_name(modules):
    model = Made(lambda m, x: reduce(lambda x, name: getattr(m, name)(x), modules, x), **modules)
    batch = [torch.ones(3, 8), torch.ones(3, 1)]
    return capture_module(model, batch, lambda output, _: output.square().mean()).layers


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        # To the layer before: no other is like that one.
        ({"stem": linear(), "drop": nn.Dropout(0.5), "norm": norm(), "head": linear(8, 4)}, ["stem drop norm", "head"]),
        # Nowhere, for one of two equal layers would no longer be like the other.
        ({"a": linear(), "b": linear(), "norm": norm()}, ["a", "b", "norm"]),
        ({"norm": norm(), "a": linear(), "b": linear(), "head": linear(8, 4)}, ["norm", "a", "b", "head"]),
        # Every one of two equal layers has its own normalisation, and all keep it.
        ({"n0": norm(), "a": linear(), "n1": norm(), "b": linear(), "n2": norm()}, ["n0 a", "n1 b", "n2"]),
        # The boundary that is kept is the one that fewer bytes cross.
        ({"a": linear(8, 6), "pad": nn.ZeroPad1d(3), "b": nn.Linear(12, 2)}, ["a", "pad b"]),
        ({"a": linear(8, 6), "pool": nn.ZeroPad1d(-2), "b": nn.Linear(2, 4)}, ["a pool", "b"]),
        # Whoever wrote a list has cut there.
        ({"all": nn.Sequential(linear(8, 4), nn.Tanh(), nn.Linear(4, 8))}, ["all.0", "all.1", "all.2"]),
        ({"only": norm()}, ["only"]),
    ],
)
def test_modules_that_multiply_nothing_are_joined_to_a_neighbour(modules, expected):
    assert [" ".join(layer.modules) for layer in layers_by_name(modules)] == expected


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (("norm", "head"), ["norm+head"]),
        (("norm", "drop", "head"), ["norm+head"]),
        (("head", "drop"), ["head"]),
        (("stem", "norm", "other"), ["stem+norm+other"]),
        (("stem", "norm", "other", "last"), ["stem+...+last"]),
    ],
)
def test_a_layer_that_joins_modules_is_named_after_those_that_hold_parameters(modules, expected):
    made = {"drop": nn.Dropout(0.5), "head": linear(8, 4), "stem": norm()}
    layers = layers_by_name({name: made.get(name, norm()) for name in modules})
    assert [layer.name for layer in layers] == expected
