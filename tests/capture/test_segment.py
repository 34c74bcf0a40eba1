"""Where layers begin, what crosses, and what does not."""
# ruff: noqa: ANN001, ANN003, ANN201, ANN202, ANN204

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from autopar.capture import capture, capture_module, load
from autopar.capture.check import check_gradients
from capture_zoo import Chain, build, mean_square, regression


def layers_of(name):
    model, batch, loss = build(name)
    return capture_module(model, batch, loss)


def test_layers_begin_at_blocks_and_are_named_after_them():
    graph = layers_of("language")
    names = [layer.name for layer in graph.layers]
    assert names == ["transformer.wte", *(f"transformer.h.{i}" for i in range(4)), "head"]
    assert graph.layers[0].modules == ("transformer.wte", "transformer.wpe")


def test_a_mask_made_of_inputs_is_computed_where_it_is_read_and_does_not_cross():
    graph = layers_of("language")
    assert all("batch.tokens" in layer.inputs for layer in graph.layers[:-1])
    assert [tensor.name for tensor in graph.tensors if tensor.producer] == [
        layer.outputs[0] for layer in graph.layers[:-1]
    ]


@pytest.mark.slow
def test_a_tied_parameter_has_one_name():
    graph = layers_of("language")
    assert graph.tied_parameters() == {"transformer.wte.weight": ("transformer.wte", "head")}


def test_values_without_a_batch_dimension_are_recomputed_and_their_parameters_shared():
    graph = layers_of("shared bias")
    steps = tuple(f"steps.{i}" for i in range(4))
    assert [layer.name for layer in graph.layers] == list(steps)
    assert graph.tied_parameters() == {"table.weight": steps, "temperature": steps}


def test_a_wrapper_with_one_child_is_walked_through():
    assert [layer.name for layer in layers_of("wrapped").layers] == ["net.0.0", "net.0.1", "net.0.2", "net.0.3"]


def test_a_second_call_of_a_module_is_another_layer():
    assert [layer.name for layer in layers_of("twice").layers] == ["first", "second", "first@2"]


def test_an_in_place_operator_stays_with_what_it_writes():
    graph = layers_of("norms")
    assert [layer.name for layer in graph.layers] == ["stem.0", "stem.1", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert graph.layers[1].modules == ("stem.1", "stem.2")


def test_what_writes_a_buffer_stays_with_all_that_reads_it():
    assert [layer.modules for layer in layers_of("norm twice").layers] == [
        ("first",),
        ("norm", "second", "norm@2"),
        ("third",),
    ]


def test_a_parametrised_weight_belongs_to_its_module():
    assert [layer.name for layer in layers_of("parametrized").layers] == ["first", "second", "third"]


def test_a_skip_connection_goes_straight_to_its_reader():
    graph = layers_of("skips")
    first = next(tensor for tensor in graph.tensors if tensor.producer == "down1")
    assert first.consumers == ("down2", "up2")  # what joins it runs behind up2 and ahead of up1
    assert first.bytes_per_sample == 6 * 8


def test_an_integer_crosses_without_gradient():
    crossing = {tensor.dtype: tensor.gradient for tensor in layers_of("integers").tensors if tensor.producer}
    assert crossing == {torch.float64: True, torch.int64: False}


def test_the_batch_dimension_of_a_crossing_tensor_is_known():
    specs = [tensor for tensor in layers_of("transformer").tensors if tensor.producer]
    assert {tensor.batch_dim for tensor in specs} == {1}
    assert specs[0].shape(7) == (5, 7, 8)


@pytest.mark.parametrize(("name", "expected"), [("dropout", True), ("chain", False)])
def test_layers_that_draw_random_numbers_are_marked(name, expected):
    assert all(layer.random == expected for layer in layers_of(name).layers[:-1])


def test_dropout_of_zero_and_in_evaluation_draws_nothing():
    class Zero(Chain):
        def between(self, x):
            return nn.functional.dropout(nn.functional.dropout(x, 0.0, True), 0.5, False)

    graph = capture_module(Zero().double(), regression(), mean_square)
    assert not any(layer.random for layer in graph.layers)


def test_equal_layers_have_equal_fingerprints():
    prints = [layer.fingerprint for layer in layers_of("language").layers]
    assert len(set(prints[1:5])) == 1
    assert len(set(prints)) == 3


def test_a_frozen_parameter_makes_another_fingerprint_and_no_gradient_flows_before_it():
    model, batch, loss = build("chain")
    model.steps[0].requires_grad_(False)
    graph = capture_module(model, batch, loss)
    assert graph.layers[0].fingerprint != graph.layers[1].fingerprint
    gradients = [tensor.gradient for tensor in graph.tensors if tensor.producer]
    assert gradients == [False, True, True]
    # The second layer's backward has no input gradient to compute, the third's has.
    assert graph.layers[1].fingerprint != graph.layers[2].fingerprint


def test_sum_and_count_are_two_loss_outputs():
    model, batch, _ = build("chain")
    graph = capture_module(model, batch, lambda output, batch: (output.square().sum(), output.shape[0] * 2))
    assert (graph.loss, graph.outputs) == ("sum_count", ("loss_sum", "loss_count"))
    assert graph.layers[-1].outputs == ("loss_sum", "loss_count")
    known = dict(zip(graph.layers[-1].inputs, [torch.zeros(5, 8, dtype=torch.float64)], strict=True))
    assert float(graph.layers[-1].module(5, *known.values())[1]) == 10


def test_the_models_own_loss_is_used_without_a_loss_function():
    class Own(Chain):
        def forward(self, x):
            return {"loss": super().forward(x).square().mean(), "extra": x}

    graph = capture_module(Own().double(), regression()[0])
    assert (graph.loss, graph.inputs) == ("mean", ("batch",))


def test_a_forward_that_takes_any_keyword_is_given_all_keys():
    class Keywords(Chain):
        def forward(self, **batch):
            return {"loss": (super().forward(batch["x"]) - batch["y"]).square().mean()}

    x, y = regression()
    graph = capture_module(Keywords().double(), {"x": x, "y": y})
    assert graph.inputs == ("batch.x", "batch.y")
    assert len(graph.layers) == 4


class Named(nn.Module):
    """Modules that are called one after another under the names they are given."""

    def __init__(self, **modules):
        super().__init__()
        self.order = list(modules)
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def norm(width=8):
    return nn.LayerNorm(width)


def blocks():
    return nn.ModuleList(nn.Sequential(norm(), nn.Linear(8, 8)) for _ in range(3))


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        # To the layer before: no other is like that one.
        (
            {"stem": nn.Linear(8, 8), "drop": nn.Dropout(0.5), "norm": norm(), "head": nn.Linear(8, 4)},
            [("stem", "drop", "norm"), ("head",)],
        ),
        # Nowhere, for one of two equal layers would no longer be like the other.
        ({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "norm": norm()}, [("a",), ("b",), ("norm",)]),
        (
            {"norm": norm(), "a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "head": nn.Linear(8, 4)},
            [("norm",), ("a",), ("b",), ("head",)],
        ),
        # Every one of two equal layers has its own normalisation, and all keep it.
        (
            {"n0": norm(), "a": nn.Linear(8, 8), "n1": norm(), "b": nn.Linear(8, 8), "n2": norm()},
            [("n0", "a"), ("n1", "b"), ("n2",)],
        ),
        # The boundary that is kept is the one that fewer bytes cross.
        ({"a": nn.Linear(8, 6), "pad": nn.ZeroPad1d(3), "b": nn.Linear(12, 2)}, [("a",), ("pad", "b")]),
        ({"a": nn.Linear(8, 6), "pool": nn.ZeroPad1d(-2), "b": nn.Linear(2, 4)}, [("a", "pool"), ("b",)]),
        # Whoever wrote a list has cut there.
        ({"all": nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8))}, [("all.0",), ("all.1",), ("all.2",)]),
        ({"only": norm()}, [("only",)]),
    ],
)
def test_modules_that_multiply_nothing_are_joined_to_a_neighbour(modules, expected):
    model, batch = Named(**modules), [torch.ones(3, 8), torch.ones(3, 1)]
    graph = capture_module(model, batch, lambda output, _: output.square().mean())
    assert [layer.modules for layer in graph.layers] == expected


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
    made = {"drop": nn.Dropout(0.5), "head": nn.Linear(8, 4), "stem": norm()}
    model = Named(**{name: made.get(name, norm()) for name in modules})
    batch = [torch.ones(3, 8), torch.ones(3, 1)]
    graph = capture_module(model, batch, lambda output, _: output.square().mean())
    assert [layer.name for layer in graph.layers] == expected


def test_joined_modules_leave_equal_layers_equal():
    modules = {"stem": nn.Linear(8, 8), "drop": nn.Dropout(0.5), "norm": norm(), "head": nn.Linear(8, 4)}
    model = Named(**modules)
    model.blocks = blocks()
    model.forward = lambda x: model.head(model.norm(nn.Sequential(*model.blocks)(model.drop(model.stem(x)))))
    batch = [torch.randn(4, 8), torch.ones(4, 1)]
    graph = capture_module(model, batch, lambda output, _: output.square().mean())
    assert [layer.modules for layer in graph.layers] == [
        ("stem", "drop"),
        *((f"blocks.{i}",) for i in range(3)),
        ("norm", "head"),
    ]
    assert len({layer.fingerprint for layer in graph.layers}) == 3
    assert [layer.random for layer in graph.layers] == [True, False, False, False, False]
    check_gradients(model, graph, batch, lambda output, _: output.square().mean())


def test_a_gpt_has_a_layer_for_its_embeddings_one_for_each_block_and_one_for_its_head(tmp_path):
    pytest.importorskip("transformers", reason="autopar[hf] is not installed")
    content = {"model_type": "gpt2", "n_layer": 5, "n_embd": 12, "n_head": 2, "vocab_size": 31, "n_positions": 9}
    (tmp_path / "config.json").write_text(json.dumps(content | {"architectures": ["GPT2LMHeadModel"]}))
    user = load(f"hf:{tmp_path}")
    graph = capture(user, user.build(hollow=True))
    blocks = [f"transformer.h.{index}" for index in range(5)]
    assert [layer.name for layer in graph.layers] == ["transformer.wte", *blocks, "transformer.ln_f+lm_head"]
    assert len({layer.fingerprint for layer in graph.layers}) == 3


def test_a_draw_that_nobody_reads_is_made_in_its_layer():
    class Drawing(Chain):
        def between(self, x):
            torch.rand_like(x)
            return x * torch.rand_like(x)

    graph = capture_module(Drawing(count=2).double(), regression(), mean_square)
    nodes = [node for layer in graph.layers for node in layer.module.graph.nodes]
    assert sum("rand_like" in str(node.target) for node in nodes) == 4
