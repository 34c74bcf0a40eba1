"""The layers of small models, each kind once, with what they are given of a batch."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from autopar.capture.batch import named_tensors
from autopar.capture.export import capture_module
from autopar.capture.graph import Layer, LayerGraph
from autopar.examples import gpt
from families import EAGER, FAMILIES, HEADS, LENGTH, VOCABULARY, WIDTH, example_of, family
from part_threads import SEED

Inputs = dict[str, tuple[torch.Tensor, ...]]


def example() -> nn.Module:
    patch = pytest.MonkeyPatch()
    sizes = {"BLOCKS": 2, "WIDTH": WIDTH, "HEADS": HEADS, "CONTEXT": LENGTH, "BYTES": VOCABULARY}
    with patch.context() as changed:
        for name, value in sizes.items():
            changed.setattr(gpt, name, value)
        return gpt.model()


@functools.cache
def graph_of(name: str, attention: str) -> tuple[LayerGraph, Inputs]:
    """Capture a model, and return with it what every layer is given of a batch."""
    torch.manual_seed(0)
    if name == "example":
        ids = torch.randint(VOCABULARY, (3, LENGTH))
        model, batch, loss = example(), {"tokens": ids, "targets": ids.flip(1)}, gpt.loss
    else:
        model, (batch, loss) = family(name, attention), example_of(name)
    graph = capture_module(model.double(), batch, loss)
    tensors, inputs = dict(named_tensors(batch)), Inputs()
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


def shapes(layer: Layer) -> list[torch.Size]:
    return [layer.parameter(name).shape for name in layer.parameters]


def is_block(layer: Layer) -> bool:
    """Tell whether a layer has several matrices, and none for every token or label."""
    matrices = [shape for shape in shapes(layer) if len(shape) == 2 and shape.numel() >= WIDTH * WIDTH // HEADS]
    return len(matrices) > 3 and all(len(shape) <= 2 and VOCABULARY not in shape for shape in shapes(layer))


CASES = [("example", "sdpa"), *((name, kind) for name in FAMILIES for kind in ("sdpa", "eager"))]
CASES = [case for case in CASES if case[0] not in EAGER or case[1] == "eager"]
LENGTHS = {"vit": 5}
"""Of what goes between blocks, where it is not that of the tokens."""
