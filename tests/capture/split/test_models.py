"""Layers of models, captured as they are, with dropout: nothing here was written for any of them."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.capture.graph import Layer
from autopar.capture.split.rewrite import split_layer
from families import EAGER, FAMILIES, HEADS, LENGTH, VOCABULARY, WIDTH
from model_layers import CASES, LENGTHS, is_block, layers_of
from part_threads import Comparison, compare

CLOSE = 1e-12

ENTERING = {"phi": 1, "gptj": 1, "codegen": 1, "falcon": 2}
"""How many tensors enter regions of a block, where attention and matrices read the same one; two in others."""
BLOCKS = {"bart": 2, "t5": 4, "gemma2": 2}
"""How many different ones a model has."""
FEW_KEYS = {"gemma": 1, "bigcode": 1, "llama-2": 2, "phi3-2": 2, "qwen2": 2, "starcoder2": 2, "glm": 2}
"""How many heads of keys models have that have fewer than four."""


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_layers_in_parts_are_the_whole_with_a_sum_for_a_region_and_for_a_tensor_that_enters(
    name: str, attention: str, count: int
) -> None:
    blocks = 0
    for layer, inputs in layers_of(name, attention):
        if attention == "eager" and name not in EAGER and not is_block(layer):
            # It was tried with fused attention.
            continue
        found = compare(layer, inputs, count)
        assert found.error < CLOSE
        tables = [key for key in layer.parameters if VOCABULARY in layer.parameter(key).shape]
        assert all(found.parameters[key] for key in tables)
        if is_block(layer):
            blocks += 1
            check_block(name, layer, found, count)
    assert blocks == BLOCKS.get(name, 1)


def check_block(name: str, layer: Layer, found: Comparison, count: int) -> None:
    # Keys and values of the one head are whole on every part, if they have matrices of their own.
    assert found.split_share > (0.96 if name == "gemma" else 0.98)
    decodes = len(found.splits) == 3
    # Some models put samples and tokens into one dimension.
    hidden = 3 * LENGTHS.get(name, LENGTH) * WIDTH
    assert [prod(shape) for shape in found.forward] == [hidden] * len(found.splits)
    entering = [shape for shape in found.backward if prod(shape) == hidden]
    # What was encoded enters a block that decodes, too.
    assert len(entering) == (4 if decodes else ENTERING.get(name, 2))
    # Scales of a head, which every part reads, and whole rows of projections of few keys.
    few = FEW_KEYS.get(name, HEADS) < count
    assert few or len(found.backward) - len(entering) == (2 if name == "qwen3" else 0)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", ["example", *FAMILIES])
def test_a_part_of_a_block_computes_its_share(name: str, count: int) -> None:
    for layer, inputs in filter(
        lambda each: is_block(each[0]), layers_of(name, "sdpa" if name == "example" else "eager")
    ):
        whole = operations(layer.module, inputs)
        keys = min(FEW_KEYS.get(name, count), count)
        # Forward, and for both gradients: keys and values of a head, on several parts.
        head = 3 * 2 * 3 * LENGTH * WIDTH * 2 * 8
        replicated = 0 if keys == count else head * FEW_KEYS[name] * (1 / keys - 1 / count)
        for index in {0, count - 1}:
            part = split_layer(layer, Alone(), index, count)
            assert 0 < operations(part.module, inputs) <= 1.02 * whole / count + replicated


class Alone:
    """Sums of a part that nobody else is there for."""

    def sum(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
        """See :class:`autopar.capture.split.sums.Sums`."""
        return tensor.clone()


def operations(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """Count what a forward and a backward compute, as torch does."""
    with FlopCounterMode(display=False) as counter:
        leaves = [each.clone().requires_grad_(each.is_floating_point()) for each in inputs]
        found: torch.Tensor = sum(each.sum() for each in module(3, *leaves) if each.requires_grad)
        found.backward()  # type: ignore[no-untyped-call]
    return counter.get_total_flops()


def test_eight_parts_share_two_key_heads_in_fours() -> None:
    layer, inputs = next(each for each in layers_of("llama-2", "sdpa") if is_block(each[0]))
    found = compare(layer, inputs, 8)
    assert found.error < CLOSE
    assert (2, 4) in {split.counts for split in found.splits}
