"""What is summed among parts and moved between them, against plain tensors; and in a backward of two halves.

The first half makes the sums that others wait for.
"""

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
from autopar.capture.split.sums import Enter, Leave, Move
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


def numbers(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("parts", [(0, 1), (0, 2, 3), (0, 1, 2, 3)])
def test_what_enters_has_the_sum_of_gradients_and_what_leaves_is_the_sum(parts: tuple[int, ...]) -> None:
    factors, weights = numbers(4, 5), numbers(5, seed=1)

    def act(sums: ThreadSums, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = torch.ones(5, dtype=torch.float64, requires_grad=True)
        if index not in parts:
            return x.detach(), None
        output = Leave(sums)(Enter(sums)(x, parts) * factors[index], parts)
        (output * weights).sum().backward()
        return output.detach(), x.grad

    total = factors[list(parts)].sum(0)
    for index, (output, gradient) in enumerate(run_parts(4, act)):
        if index in parts:
            assert gradient is not None
            torch.testing.assert_close(output, total)
            torch.testing.assert_close(gradient, total * weights)


def test_gradients_of_pieces_that_are_whole_alone_are_summed() -> None:
    """Of six columns, the first and the last two are the same on both parts."""
    factors, ranges = numbers(2, 3, 6), ((0, 1), (4, 6))

    def act(sums: ThreadSums, index: int) -> torch.Tensor | None:
        x = torch.ones(3, 6, dtype=torch.float64, requires_grad=True)
        (Enter(sums)(x, (0, 1), 1, ranges) * factors[index]).sum().backward()
        return x.grad

    for index, gradient in enumerate(run_parts(2, act)):
        expected = factors[index].clone()
        expected[:, [0, 4, 5]] = factors[:, :, [0, 4, 5]].sum(0)
        torch.testing.assert_close(gradient, expected)


def own(tensor: torch.Tensor, index: int, count: int, period: int | None) -> torch.Tensor:
    """Take a part's indices of the second dimension, one by one."""
    length = tensor.shape[1]
    every = period or length
    kept = [place for place in range(length) if place % every // (every // count) == index]
    return tensor[:, kept]


@pytest.mark.parametrize("period", [None, 4])
@pytest.mark.parametrize("backwards", ["reduce_scatter", "take"])
@pytest.mark.parametrize("count", [2, 4])
def test_slices_are_gathered_and_gradients_scattered(count: int, backwards: str, period: int | None) -> None:
    whole, gradients = numbers(3, 12 if period else 8, 2), numbers(count, 3, 12 if period else 8, 2, seed=1)
    if backwards == "take":
        # Parts compute alike what they have gathered.
        gradients = gradients[:1].expand(gradients.shape)

    def act(sums: ThreadSums, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = own(whole, index, count, period).requires_grad_()
        output = Move(sums, index, count, "gather", backwards)(x, 1, period)
        output.backward(gradients[index])
        return output.detach(), x.grad

    total = gradients.sum(0) if backwards == "reduce_scatter" else gradients[0]
    for index, (output, gradient) in enumerate(run_parts(count, act)):
        assert gradient is not None
        assert torch.equal(output, whole)
        torch.testing.assert_close(gradient, own(total, index, count, period))


@pytest.mark.parametrize("period", [None, 4])
@pytest.mark.parametrize("forwards", ["reduce_scatter", "take"])
@pytest.mark.parametrize("count", [2, 4])
def test_wholes_are_scattered_and_gradients_gathered(count: int, forwards: str, period: int | None) -> None:
    wholes, gradient = numbers(count, 3, 12 if period else 8, 2), numbers(3, 12 if period else 8, 2, seed=1)

    def act(sums: ThreadSums, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = wholes[index].clone().requires_grad_()
        output = Move(sums, index, count, forwards, "gather")(x, 1, period)
        output.backward(own(gradient, index, count, period))
        return output.detach(), x.grad

    for index, (output, found) in enumerate(run_parts(count, act)):
        assert found is not None
        whole = wholes.sum(0) if forwards == "reduce_scatter" else wholes[index]
        torch.testing.assert_close(output, own(whole, index, count, period))
        assert torch.equal(found, gradient)
