"""Layers in parts whose inputs and outputs come and go in slices of the sequence, against the whole layers."""

import random
from collections import Counter
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.split.names import MismatchError
from autopar.capture.split.rewrite import split_layer
from autopar.capture.split.sequence import sequence_dims
from drawn_streams import drawn_stream
from part_threads import Comparison, compare
from single_layers import AttentionBlock, layer_of, numbers

CLOSE = 1e-12


def moves(found: Comparison, least: int) -> tuple[Counter[str], Counter[str]]:
    """Return how often tensors of a size at least were summed or moved, forwards and backwards."""
    both = zip(found.kinds, (found.forward, found.backward), strict=True)
    forward, backward = (
        Counter(kind for kind, shape in zip(kinds, shapes, strict=True) if prod(shape) >= least)
        for kinds, shapes in both
    )
    return forward, backward


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_block_gathers_twice_and_scatters_twice_forwards_and_backwards(count: int) -> None:
    layer, x = layer_of(AttentionBlock(heads=12, width=24).double(), numbers(2, 12, 24)), numbers(2, 12, 24)
    dims = sequence_dims(layer, count)
    assert dims == dict.fromkeys((*layer.inputs, *layer.outputs), 1)
    found = compare(layer, [x], count, sequence=dims)
    assert found.error < CLOSE
    assert moves(found, 2 * 12 * 24) == ({"gather": 2, "reduce_scatter": 2},) * 2
    # Scales and shifts of both norms, and the biases that are added to what regions sum.
    assert moves(found, 1)[1]["sum"] == 6


class Rescaled(AttentionBlock):
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
    layer = layer_of(AttentionBlock().double(), numbers(2, 8, 16))
    dims = dict.fromkeys(layer.inputs if ends == "input" else layer.outputs, 1)
    found = compare(layer, [numbers(2, 8, 16)], 2, sequence=dims)
    assert found.error < CLOSE
    extra = Counter({"gather": 1})
    forward, backward = moves(found, 2 * 8 * 16)
    usual = Counter({"gather": 2, "reduce_scatter": 2})
    assert (forward - usual, backward - usual) == ((extra, Counter()) if ends == "input" else (Counter(), extra))


def test_sums_are_over_the_sequences_parts_and_may_be_made_after_the_last_backward() -> None:
    """All that a block has as a whole: scales and shifts of two norms, and two biases behind sums."""
    layer = layer_of(AttentionBlock(), torch.zeros(2, 8, 16))
    part = split_layer(layer, None, 0, 4, sequence=sequence_dims(layer, 4))  # type: ignore[arg-type]
    assert part.summing_parts == {(0, 1, 2, 3)}
    layer = layer_of(AttentionBlock().double(), numbers(2, 8, 16))
    apart, inside = (
        compare(layer, [numbers(2, 8, 16)], 2, sequence=sequence_dims(layer, 2), deferred=deferred)
        for deferred in (True, False)
    )
    whole = sum(not is_cut for is_cut in apart.parameters.values())
    assert inside.kinds[1].count("sum") == whole
    assert apart.kinds[1][-whole:].count("sum") == whole
    assert apart.kinds[1][:-whole].count("sum") == 0
    assert apart.error < CLOSE


@pytest.mark.some(4)
@pytest.mark.parametrize("seed", range(40))
def test_drawn_streams_in_slices_are_the_whole(seed: int) -> None:
    """Some inputs and outputs are in slices, of tokens or of the width, however little is computed so."""
    (layer, inputs), draw, count = drawn_stream(seed), random.Random(seed), 4 if seed % 4 > 1 else 2
    names = [name for name in (*layer.inputs, *layer.outputs) if draw.random() < 0.7]
    some = {name: 1 if count == 4 else draw.choice([1, 1, 2]) for name in names}
    for sequence in (some, sequence_dims(layer, count)):
        assert compare(layer, inputs, count, sequence=sequence, deferred=seed % 2 == 0).error < CLOSE


def test_drawn_streams_are_worth_slices_and_uneven_ones_refused_or_whole() -> None:
    """Both inputs of a product have rows that parts divide; no parameter is there to read either."""
    layers = [drawn_stream(seed)[0] for seed in range(0, 40, 5)]
    assert 3 <= len([layer for layer in layers if sequence_dims(layer, 2)]) < 8
    layer = layer_of(AttentionBlock(), torch.ones(2, 6, 16))
    name = layer.inputs[0]
    for names, count in (({"other": 1}, 2), ({name: 1}, 4), ({name: 0}, 2), ({name: 3}, 2), ({name: -1}, 2)):
        with pytest.raises(MismatchError, match=next(iter(names))):
            split_layer(layer, None, 0, count, sequence=names)  # type: ignore[arg-type]
    assert sequence_dims(layer, 4) == {}

    class Product(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x @ y

    layer = layer_of(Product(), torch.ones(2, 8, 8), torch.ones(2, 8, 8))
    assert sequence_dims(layer, 2) == {}
    layer = layer_of(AttentionBlock(), torch.ones(2, 8, 16))
    plain, empty = (split_layer(layer, None, 1, 2, sequence=each) for each in (None, {}))  # type: ignore[arg-type]
    assert plain.module.code == empty.module.code
    assert "gather" not in plain.module.code
