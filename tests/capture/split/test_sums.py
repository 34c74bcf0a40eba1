"""What is summed among parts and moved between them, against plain tensors; and in a backward of two halves."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from autopar.capture.graph import Layer
from autopar.capture.layers.split_backward import SplitBackward
from autopar.capture.split.analysis import analyse
from autopar.capture.split.choice import choose
from autopar.capture.split.rewrite import rewrite
from autopar.capture.split.sequence import find_edges, sequence_dims
from autopar.capture.split.sums import Enter, Leave, Move
from drawn_split import drawn_layer
from part_threads import ThreadSums, run_parts
from single_layers import AttentionBlock, FewKeys, layer_of, numbers

Gradients = dict[str, torch.Tensor | None]


def run(
    layer: Layer, x: torch.Tensor, count: int, halves: bool, dims: Mapping[str, int]
) -> list[tuple[Gradients, list[Sequence[int]], int]]:
    """Return, for every part, gradients, the shapes that were summed, and how many of them in the second half."""
    analysis = analyse(layer)
    splits, edges = choose(analysis, count), find_edges(analysis.module, layer, dims, count)

    def act(sums: ThreadSums, index: int) -> tuple[Gradients, list[Sequence[int]], int]:
        module = rewrite(analysis, splits, sums, index, count, edges).module
        leaf, backward = (x.chunk(count, 1)[index] if dims else x).clone().requires_grad_(), SplitBackward()
        with backward.recording() if halves else nullcontext():
            (output,) = module(len(x), leaf)
        if halves:
            (found,) = backward.input([get_gradient_edge(output)], [torch.cos(output.detach())], [leaf])
            late = len(sums.shapes)
            backward.weight()
        else:
            output.backward(torch.cos(output.detach()))
            found, late = leaf.grad, len(sums.shapes)
        gradients: Gradients = {name: each.grad for name, each in module.named_parameters()}
        return {**gradients, "input": found}, [*sums.shapes], len(sums.shapes) - late

    return run_parts(count, act)


def check(layer: Layer, count: int, x: torch.Tensor, dims: Mapping[str, int] = MappingProxyType({})) -> int:
    whole, halves = (run(layer, x, count, kind, dims) for kind in (False, True))
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


@pytest.mark.parametrize(("count", "scaled", "late"), [(2, False, 0), (4, False, 2), (2, True, 1)])
def test_the_second_half_sums_gradients_of_what_several_parts_read(count: int, scaled: bool, late: int) -> None:
    """Of rows that several parts have, and their bias, or of a scale; all that others wait for comes before."""
    assert check(layer_of(FewKeys(2, 2, scaled).double(), numbers(2, 3, 8)), count, numbers(2, 3, 8)) == late


@pytest.mark.some(4)
@pytest.mark.parametrize("seed", range(12))
def test_halves_of_drawn_layers_make_the_gradients_of_a_whole_backward(seed: int) -> None:
    check(drawn_layer(seed), 2 if seed % 2 else 4, numbers(2, 3, 8))


def test_halves_in_slices_and_sums_of_whole_pieces_make_the_whole_gradients() -> None:
    """Of six columns, the first two and the last are the same on both parts."""
    layer = layer_of(AttentionBlock().double(), numbers(2, 8, 16))
    check(layer, 2, numbers(2, 8, 16), sequence_dims(layer, 2))
    factors, ranges = numbers(2, 3, 6), ((0, 2), (5, 6))

    def act(sums: ThreadSums, index: int) -> torch.Tensor | None:
        x = torch.ones(3, 6, dtype=torch.float64, requires_grad=True)
        (Enter(sums)(x, (0, 1), 1, ranges) * factors[index]).sum().backward()
        return x.grad

    for index, gradient in enumerate(run_parts(2, act)):
        expected = factors[index].clone()
        expected[:, [0, 1, 5]] = factors[:, :, [0, 1, 5]].sum(0)
        torch.testing.assert_close(gradient, expected)


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


def own(tensor: torch.Tensor, index: int, count: int, period: int | None) -> torch.Tensor:
    """Take a part's indices of the second dimension, one by one."""
    length = tensor.shape[1]
    every = period or length
    return tensor[:, [place for place in range(length) if place % every // (every // count) == index]]


@pytest.mark.parametrize("period", [None, 4])
@pytest.mark.parametrize("scattering", ["reduce_scatter", "take"])
@pytest.mark.parametrize("count", [2, 4])
def test_slices_are_gathered_and_wholes_scattered(count: int, scattering: str, period: int | None) -> None:
    sizes = (3, 12 if period else 8, 2)
    whole, others = numbers(*sizes), numbers(count, *sizes, seed=1)
    if scattering == "take":
        # Parts compute alike what they have gathered.
        others = others[:1].expand(others.shape)

    def act(sums: ThreadSums, index: int) -> list[torch.Tensor | None]:
        part, other = own(whole, index, count, period).requires_grad_(), others[index].clone().requires_grad_()
        gathered = Move(sums, index, count, "gather", scattering)(part, 1, period)
        gathered.backward(others[index])
        scattered = Move(sums, index, count, scattering, "gather")(other, 1, period)
        scattered.backward(own(whole, index, count, period))
        return [gathered.detach(), other.grad, scattered.detach(), part.grad]

    total = others.sum(0) if scattering == "reduce_scatter" else others[0]
    for index, found in enumerate(run_parts(count, act)):
        for each, expected in zip(found, (whole, whole, *[own(total, index, count, period)] * 2), strict=True):
            torch.testing.assert_close(each, expected)
