"""The backward of a part in two halves, against its whole backward: the first makes the sums that others wait for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge

from autopar.capture.graph import Layer
from autopar.capture.split.analysis import analyse
from autopar.capture.split.choice import choose
from autopar.capture.split.rewrite import rewrite
from autopar.capture.split_backward import SplitBackward
from drawn_split import Drawn
from part_threads import ThreadSums, run_parts
from single_layers import layer_of

Gradients = dict[str, torch.Tensor | None]


class Block(nn.Module):
    """Attention with grouped keys, dropout in and out of regions, a scale in every head, and two matrices."""

    def __init__(self, fused: bool, scaled: bool) -> None:
        super().__init__()
        self.fused = fused
        self.norm, self.query, self.both = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(2)) if scaled else None
        self.qkv, self.out = nn.Linear(8, 16), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 10), nn.Linear(10, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        found = self.qkv(hidden) if self.fused else torch.cat([self.query(hidden), self.both(hidden)], -1)
        query, key, value = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in found.split([8, 4, 4], -1))
        query = query if self.scale is None else query * self.scale
        key, value = (each.repeat_interleave(2, 1) for each in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.1))


def run(layer: Layer, x: torch.Tensor, count: int, halves: bool) -> list[tuple[Gradients, list[Sequence[int]], int]]:
    """Return, for every part, gradients, the shapes that were summed, and how many of them in the second half."""
    analysis = analyse(layer)
    splits = choose(analysis, count)

    def act(sums: ThreadSums, index: int) -> tuple[Gradients, list[Sequence[int]], int]:
        module = rewrite(analysis, splits, sums, index).module
        leaf, backward = x.clone().requires_grad_(), SplitBackward()
        if not halves:
            (output,) = module(len(x), leaf)
            output.backward(torch.cos(output.detach()))
            found = leaf.grad
            late = len(sums.shapes)
        else:
            with backward.recording():
                (output,) = module(len(x), leaf)
            (found,) = backward.input([get_gradient_edge(output)], [torch.cos(output.detach())], [leaf])
            late = len(sums.shapes)
            backward.weight()
        gradients: Gradients = {name: each.grad for name, each in module.named_parameters()}
        return {**gradients, "input": found}, [*sums.shapes], len(sums.shapes) - late

    return run_parts(count, act)


def check(layer: Layer, count: int) -> int:
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole, halves = run(layer, x, count, False), run(layer, x, count, True)
    for (wanted, shapes, _), (found, own_shapes, late) in zip(whole, halves, strict=True):
        assert wanted.keys() == found.keys()
        for name, gradient in wanted.items():
            other = found[name]
            assert gradient is other or (gradient is not None and other is not None and torch.equal(gradient, other))
        # Every part sums alike, the same tensors as in a whole backward.
        assert own_shapes == halves[0][1]
        assert sorted(own_shapes) == sorted(shapes)
        assert late == halves[0][2]
    return halves[0][2]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_halves_make_the_gradients_of_a_whole_backward(fused: bool, count: int) -> None:
    late = check(layer_of(Block(fused, False).double(), torch.zeros(2, 3, 8)), count)
    # Those of rows that several parts have, and of their bias; all that others wait for comes before.
    assert late == (0 if count == 2 else 2)


def test_the_second_half_sums_gradients_of_parameters_that_every_part_reads() -> None:
    assert check(layer_of(Block(True, True).double(), torch.zeros(2, 3, 8)), 2) == 1


@pytest.mark.parametrize("seed", range(12))
def test_halves_of_drawn_layers_make_the_gradients_of_a_whole_backward(seed: int) -> None:
    check(layer_of(Drawn(seed), torch.zeros(2, 3, 8, dtype=torch.float64)), 2 if seed % 2 else 4)
