"""Layers of models, captured as they are, with dropout: nothing here was written for any of them."""

import functools
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.capture.graph import Layer, LayerGraph
from autopar.capture.layers.check import check_gradients
from autopar.capture.layers.export import capture_module
from autopar.capture.model.batch import named_tensors
from autopar.capture.split.rewrite import split_layer
from autopar.capture.split.sequence import sequence_dims
from autopar.examples import gpt
from families import EAGER, FAMILIES, HEADS, LENGTH, VOCABULARY, WIDTH, example_of, family
from part_threads import SEED, Comparison, compare

CLOSE = 1e-12
SINGLE = {"gemma": 1e-7, "gemma2": 1e-7}
"""How close those are in slices that compute norms, and gradients of their scales, in single precision."""
ENTERING = {"phi": 1, "gptj": 1, "codegen": 1, "falcon": 2}
"""How many tensors enter regions of a block, where attention and matrices read the same one; two in others."""
BLOCKS = {"bart": 2, "t5": 4, "gemma2": 2}
"""How many different ones a model has."""
FEW_KEYS = {"gemma": 1, "bigcode": 1, "llama-2": 2, "phi3-2": 2, "qwen2": 2, "starcoder2": 2, "glm": 2}
"""How many heads of keys models have that have fewer than four."""


def example() -> nn.Module:
    with patch.multiple(gpt, BLOCKS=2, WIDTH=WIDTH, HEADS=HEADS, CONTEXT=LENGTH, BYTES=VOCABULARY):
        return gpt.model()


@functools.cache
def graph_of(name: str, attention: str) -> tuple[LayerGraph, dict[str, tuple[torch.Tensor, ...]]]:
    """Capture a model, and return with it what every layer is given of a batch."""
    torch.manual_seed(0)
    if name == "example":
        ids = torch.randint(VOCABULARY, (3, LENGTH))
        model, batch, loss = example(), {"tokens": ids, "targets": ids.flip(1)}, gpt.loss
    else:
        model, (batch, loss) = family(name, attention), example_of(name)
    graph = capture_module(model.double(), batch, loss)
    check_gradients(model, graph, batch, loss)
    tensors, inputs = dict(named_tensors(batch)), dict[str, tuple[torch.Tensor, ...]]()
    for layer in graph.layers:
        inputs[layer.name] = tuple(tensors[name] for name in layer.inputs)
        torch.manual_seed(SEED)
        with torch.no_grad():
            tensors |= dict(zip(layer.outputs, layer.module(3, *inputs[layer.name]), strict=True))
    return graph, inputs


def layers_of(name: str, attention: str) -> list[tuple[Layer, tuple[torch.Tensor, ...]]]:
    graph, inputs = graph_of(name, attention)
    different = {layer.fingerprint: layer for layer in graph.layers if layer.parameters}
    return [(layer, inputs[layer.name]) for layer in different.values()]


def is_block(layer: Layer) -> bool:
    """Tell whether a layer has several matrices, and none for every token or label."""
    shapes = [layer.parameter(name).shape for name in layer.parameters]
    matrices = [shape for shape in shapes if len(shape) == 2 and shape.numel() >= WIDTH * WIDTH // HEADS]
    return len(matrices) > 3 and all(len(shape) <= 2 and VOCABULARY not in shape for shape in shapes)


KINDS = {name: ("eager",) if name in EAGER else ("sdpa", "eager") for name in FAMILIES}
CASES = [("example", "sdpa"), *((name, kind) for name, kinds in KINDS.items() for kind in kinds)]
LENGTHS = {"vit": 5}
"""Of what goes between blocks, where it is not that of the tokens."""


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "attention", "count"), [(*case, 4 - at % 2 * 2) for at, case in enumerate(CASES)])
def test_layers_in_parts_and_in_slices_are_the_whole(name: str, attention: str, count: int) -> None:
    blocks = 0
    for layer, inputs in layers_of(name, attention):
        if attention == "eager" and name not in EAGER and not is_block(layer):
            # It is tried with fused attention.
            continue
        found, dims = compare(layer, inputs, count), sequence_dims(layer, count)
        assert found.error < CLOSE
        sliced = compare(layer, inputs, count, sequence=dims, deferred=count == 4)
        assert sliced.error < SINGLE.get(name, CLOSE)
        tables = [key for key in layer.parameters if VOCABULARY in layer.parameter(key).shape]
        assert all(found.parameters[key] for key in tables)
        # A token that stands for the image makes their number odd.
        assert name != "vit" or dims == {}
        if is_block(layer):
            blocks += 1
            check_sums(name, found, count)
            if name != "vit":
                assert set(dims.values()) == {1}
                check_moves(name, sliced)
            if attention == "eager" or name == "example":
                check_share(name, layer, inputs, count)
    assert blocks == BLOCKS.get(name, 1)


def check_sums(name: str, found: Comparison, count: int) -> None:
    """Check that there is a sum for a region, and for a tensor that enters one."""
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


def check_moves(name: str, found: Comparison) -> None:
    """Check that what enters a region is gathered, what leaves it scattered, and the other way round backwards."""
    least = 3 * LENGTHS.get(name, LENGTH) * WIDTH
    forward, backward = (
        [kind for kind, shape in zip(kinds, shapes, strict=True) if prod(shape) >= least]
        for kinds, shapes in zip(found.kinds, (found.forward, found.backward), strict=True)
    )
    assert "sum" not in forward + backward
    assert forward.count("reduce_scatter") == backward.count("gather") == len(found.splits)
    assert forward.count("gather") == backward.count("reduce_scatter")


def check_share(name: str, layer: Layer, inputs: tuple[torch.Tensor, ...], count: int) -> None:
    """Check that a part computes its share."""
    whole, keys = operations(layer.module, inputs), min(FEW_KEYS.get(name, count), count)
    # Forward, and for both gradients: keys and values of a head, on several parts.
    head = 3 * 2 * 3 * LENGTH * WIDTH * 2 * 8
    replicated = 0 if keys == count else head * FEW_KEYS[name] * (1 / keys - 1 / count)
    for index in (0, count - 1):
        alone: Any = SimpleNamespace(sum=lambda tensor, parts: tensor.clone())
        part = split_layer(layer, alone, index, count)
        assert 0 < operations(part.module, inputs) <= 1.02 * whole / count + replicated


def operations(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """Count what a forward and a backward compute, as torch does."""
    with FlopCounterMode(display=False) as counter:
        leaves = [each.clone().requires_grad_(each.is_floating_point()) for each in inputs]
        found: torch.Tensor = sum(each.sum() for each in module(3, *leaves) if each.requires_grad)
        found.backward()  # type: ignore[no-untyped-call]
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_layers_whose_heads_do_not_divide_are_the_whole_in_slices_too(name: str) -> None:
    for layer, inputs in layers_of(name, "eager"):
        names = [each for each in (*layer.inputs, *layer.outputs) if each.split(".")[0] != "batch" and each != "loss"]
        assert compare(layer, inputs, 3, sequence=dict.fromkeys(names, 1)).error < CLOSE
