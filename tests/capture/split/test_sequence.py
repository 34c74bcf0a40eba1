"""Layers in parts whose inputs and outputs come and go in slices of the sequence, against the whole layers."""

from __future__ import annotations

import random
from collections import Counter
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.graph import Layer
from autopar.capture.split.names import MismatchError
from autopar.capture.split.rewrite import LayerPart, split_layer
from autopar.capture.split.sequence_choice import sequence_dims
from drawn_split import Drawn
from drawn_streams import TOKENS, Stream
from families import EAGER, LENGTH, WIDTH
from model_layers import CASES, LENGTHS, is_block, layers_of
from part_threads import Comparison, ThreadSums, compare, run_parts
from single_layers import layer_of

CLOSE = 1e-12
SINGLE = {"gemma": 1e-7, "gemma2": 1e-7}
"""How close those are that compute norms, and gradients of their scales, in single precision."""


def numbers(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def moves(found: Comparison, least: int) -> tuple[Counter[str], Counter[str]]:
    """Return how often tensors of a size at least were summed or moved, forwards and backwards."""
    both = zip(found.kinds, (found.forward, found.backward), strict=True)
    forward, backward = (
        Counter(kind for kind, shape in zip(kinds, shapes, strict=True) if prod(shape) >= least)
        for kinds, shapes in both
    )
    return forward, backward


class Block(nn.Module):
    """Attention and two matrices, with norms and dropout, before or behind a residual stream."""

    def __init__(self, heads: int = 4, width: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_block_gathers_twice_and_scatters_twice_forwards_and_backwards(count: int) -> None:
    layer, x = layer_of(Block(heads=12, width=24).double(), numbers(2, 12, 24)), numbers(2, 12, 24)
    dims = sequence_dims(layer, count)
    assert dims == dict.fromkeys((*layer.inputs, *layer.outputs), 1)
    found = compare(layer, [x], count, sequence=dims)
    assert found.error < CLOSE
    assert moves(found, 2 * 12 * 24) == ({"gather": 2, "reduce_scatter": 2},) * 2
    # Scales and shifts of both norms, and the biases that are added to what regions sum.
    assert moves(found, 1)[1]["sum"] == 6


@pytest.mark.parametrize("forgets", [False, True])
def test_gradients_of_whole_parameters_may_be_added_up_after_the_last_backward(forgets: bool) -> None:
    """All that a block has as a whole: scales and shifts of two norms, and two biases behind sums."""
    names: list[str] = []

    def look(part: LayerPart, index: int) -> None:
        names[:] = part.summands
        if forgets:
            part.summands.pop(names[0])  # type: ignore[attr-defined]

    layer = layer_of(Block().double(), numbers(2, 8, 16))
    dims = sequence_dims(layer, 2)
    apart = compare(layer, [numbers(2, 8, 16)], 2, sequence=dims, break_part=look, deferred=True)
    inside = compare(layer, [numbers(2, 8, 16)], 2, sequence=dims)
    assert sorted(names) == sorted(name for name, cut in apart.parameters.items() if not cut)
    assert inside.kinds[1].count("sum") == len(names)
    assert apart.kinds[1][: -len(names)].count("sum") == 0
    assert (apart.error < CLOSE) != forgets


class Rescaled(Block):
    """Scale what is in slices and what a region reads by the same numbers, twice or once, or the input, too."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads, self.scale = reads, nn.Parameter(torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale if "before" in self.reads else x
        x = super().forward(x * (self.scale.sum() if "whole" in self.reads else 1.0))
        x = F.gelu(F.linear(x, self.up.weight * self.scale)) @ self.up.weight if "inside" in self.reads else x
        return x * self.scale


@pytest.mark.parametrize("reads", ["", "before", "inside", "whole", "before, inside and whole"])
def test_a_parameter_with_several_readers_has_the_gradient_of_all(reads: str) -> None:
    layer, x = layer_of(Rescaled(reads).double(), numbers(2, 8, 16)), numbers(2, 8, 16)
    for dims in (sequence_dims(layer, 2), {}):
        assert compare(layer, [x], 2, sequence=dims, deferred=True).error < CLOSE


@pytest.mark.parametrize("ends", ["input", "output"])
def test_tensors_that_are_not_named_cross_whole(ends: str) -> None:
    layer = layer_of(Block().double(), numbers(2, 8, 16))
    dims = dict.fromkeys(layer.inputs if ends == "input" else layer.outputs, 1)
    found = compare(layer, [numbers(2, 8, 16)], 2, sequence=dims)
    assert found.error < CLOSE
    extra = Counter({"gather": 1})
    forward, backward = moves(found, 2 * 8 * 16)
    usual = Counter({"gather": 2, "reduce_scatter": 2})
    assert (forward - usual, backward - usual) == ((extra, Counter()) if ends == "input" else (Counter(), extra))


def test_without_names_nothing_changes() -> None:
    layer = layer_of(Block().double(), numbers(2, 8, 16))
    plain, empty = (split_layer(layer, None, 1, 2, sequence=each) for each in (None, {}))  # type: ignore[arg-type]
    assert plain.module.code == empty.module.code
    assert "gather" not in plain.module.code


def test_what_is_no_tensor_of_the_layer_or_has_no_even_slices_is_refused() -> None:
    layer = layer_of(Block().double(), numbers(2, 6, 16))
    for names, count in (({"other": 1}, 2), ({layer.inputs[0]: 1}, 4), ({layer.inputs[0]: 0}, 2)):
        with pytest.raises(MismatchError, match=next(iter(names))):
            split_layer(layer, None, 0, count, sequence=names)  # type: ignore[arg-type]
    assert sequence_dims(layer, 4) == {}


def test_sums_are_over_the_parts_that_the_sequence_is_split_among() -> None:
    layer = layer_of(Block(), torch.zeros(2, 8, 16))
    part = split_layer(layer, None, 0, 4, sequence=sequence_dims(layer, 4))  # type: ignore[arg-type]
    assert part.summing_parts == {(0, 1, 2, 3)}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_layers_of_models_in_slices_are_the_whole(name: str, attention: str, count: int) -> None:
    for layer, inputs in layers_of(name, attention):
        if attention == "eager" and name not in EAGER and not is_block(layer):
            # It was tried with fused attention.
            continue
        dims = sequence_dims(layer, count)
        found = compare(layer, inputs, count, sequence=dims, deferred=count == 4)
        assert found.error < SINGLE.get(name, CLOSE)
        if name == "vit":
            # A token that stands for the image makes their number odd.
            assert dims == {}
        elif is_block(layer):
            check_block(name, found, dims)


@pytest.mark.parametrize("name", ["gpt2", "bart", "llama", "t5"])
def test_layers_whose_heads_do_not_divide_are_the_whole_in_slices_too(name: str) -> None:
    for layer, inputs in layers_of(name, "eager"):
        names = [each for each in (*layer.inputs, *layer.outputs) if each.split(".")[0] != "batch" and each != "loss"]
        assert compare(layer, inputs, 3, sequence=dict.fromkeys(names, 1)).error < CLOSE


def check_block(name: str, found: Comparison, dims: dict[str, int]) -> None:
    assert set(dims.values()) == {1}
    forward, backward = moves(found, 3 * LENGTHS.get(name, LENGTH) * WIDTH)
    assert forward["sum"] == backward["sum"] == 0
    assert forward["reduce_scatter"] == backward["gather"] == len(found.splits)
    assert forward["gather"] == backward["reduce_scatter"]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("seed", range(30))
def test_drawn_layers_in_slices_are_the_whole(seed: int, count: int) -> None:
    """Slices are of the sequence, of three, or of the width; what cannot be computed in slices is computed whole."""
    layer = layer_of(Drawn(seed), numbers(2, 3, 8))
    names = [layer.inputs, layer.outputs, (*layer.inputs, *layer.outputs)][seed % 3]
    found = compare(layer, [numbers(2, 3, 8)], count, sequence=dict.fromkeys(names, 2), deferred=seed % 2 == 0)
    assert found.error < CLOSE


def drawn_stream(seed: int) -> tuple[Layer, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(3, TOKENS, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
    return layer_of(Stream(seed), *inputs), inputs


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("seed", range(30))
def test_drawn_streams_in_slices_are_the_whole(seed: int, count: int) -> None:
    """Some inputs and outputs are in slices, of tokens or of the width, however little is computed so."""
    layer, inputs = drawn_stream(seed)
    draw = random.Random(seed)
    names = [name for name in (*layer.inputs, *layer.outputs) if draw.random() < 0.7]
    some = {name: 1 if count == 4 else draw.choice([1, 1, 2]) for name in names}
    for sequence in (some, sequence_dims(layer, count)):
        assert compare(layer, inputs, count, sequence=sequence, deferred=seed % 2 == 0).error < CLOSE


def test_most_drawn_streams_are_worth_slices() -> None:
    layers = [drawn_stream(seed)[0] for seed in range(60)]
    worth = [layer for layer in layers if sequence_dims(layer, 2)]
    assert 30 <= len(worth) < 60


class Scaled(nn.Module):
    """Read a slice of parameters of as many as there are tokens, and a sum over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.places = nn.LayerNorm(6), nn.Parameter(torch.randn(8, 6))
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x) + self.places
        x = x / (1 + x.mean(1, keepdim=True).square())
        return x + self.down(self.up(x.cumsum(1)).tanh())


@pytest.mark.parametrize("count", [2, 4])
def test_operators_that_need_all_slices_are_computed_whole(count: int) -> None:
    layer = layer_of(Scaled().double(), numbers(2, 8, 6))
    assert sequence_dims(layer, count) == {}
    found = compare(layer, [numbers(2, 8, 6)], count, sequence=dict.fromkeys((*layer.inputs, *layer.outputs), 1))
    assert found.error < CLOSE


@pytest.mark.parametrize(
    ("name", "directions"),
    [
        ("gather", ("gather", "take")),
        ("reduce_scatter", ("take", "gather")),
        ("enter", None),
    ],
)
def test_slices_that_are_moved_wrongly_are_found(name: str, directions: tuple[str, str] | None) -> None:
    def forget(part: LayerPart, index: int) -> None:
        if directions is not None:
            part.module.get_submodule(name)._directions = directions  # type: ignore[assignment]
            return
        for node in part.module.graph.nodes:
            if node.target == name:
                node.replace_all_uses_with(node.args[0])
        part.module.recompile()

    layer = layer_of(Block().double(), numbers(2, 8, 16))
    found = compare(layer, [numbers(2, 8, 16)], 2, sequence=sequence_dims(layer, 2), break_part=forget)
    assert found.error > 1e-3


def test_halves_of_a_backward_in_slices_make_the_gradients_of_a_whole_one() -> None:
    from torch.autograd.graph import get_gradient_edge

    from autopar.capture.split_backward import SplitBackward

    layer, x = layer_of(Block().double(), numbers(2, 8, 16)), numbers(2, 8, 16)
    dims = sequence_dims(layer, 2)

    def act(sums: ThreadSums, index: int, halves: bool) -> tuple[dict[str, torch.Tensor | None], list[str]]:
        module = split_layer(layer, sums, index, 2, sequence=dims).module
        leaf, backward = x.chunk(2, 1)[index].clone().requires_grad_(), SplitBackward()
        with backward.recording():
            (output,) = module(len(x), leaf)
        if halves:
            (found,) = backward.input([get_gradient_edge(output)], [torch.cos(output.detach())], [leaf])
            backward.weight()
        else:
            output.backward(torch.cos(output.detach()))
            found = leaf.grad
        return {**{name: each.grad for name, each in module.named_parameters()}, "input": found}, sorted(sums.kinds)

    whole, parted = (run_parts(2, lambda sums, index, h=h: act(sums, index, h)) for h in (False, True))  # type: ignore[misc]
    for (wanted, kinds), (found, own) in zip(whole, parted, strict=True):
        assert kinds == own
        for name, gradient in wanted.items():
            assert gradient is not None
            assert torch.equal(gradient, found[name])  # type: ignore[arg-type]
