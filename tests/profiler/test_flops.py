"""Operations of forwards and backwards, against closed forms, on fake tensors and on real ones."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture import LayerGraph, capture_module, named_tensors
from autopar.formats.profile import Precision
from autopar.hardware.gpus import find
from autopar.profiler.estimate import graph_work
from autopar.profiler.flops import pass_flops
from autopar.profiler.layer_runs import LayerPass, record

ROWS, HEADS, LENGTH, SIZE = 4, 2, 64, 16


class _Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE, bias=False), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*heads, is_causal=self.causal).transpose(1, 2).flatten(-2)


@cache
def _graph(kind: str) -> tuple[LayerGraph, dict[str, torch.Tensor], list[int]]:
    """A captured model, a batch, and the operations of every layer of a sample."""
    target = torch.ones(ROWS, 1)
    if kind == "linear":
        # No gradient goes back to the model's input; of frozen parameters there is none.
        frozen = nn.Linear(16, 8).requires_grad_(False)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), frozen, nn.ReLU(), nn.Linear(8, 4, bias=False))
        batch = torch.ones(ROWS, 8), target
        flops = [4 * 8 * 16, 0, 4 * 16 * 8, 0, 6 * 8 * 4]
    elif kind == "convolution":
        model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 2, 1, bias=False))
        batch = torch.ones(ROWS, 3, 6, 6), target
        flops = [2 * 2 * (4 * 4) * 4 * 3 * 9, 3 * 2 * (4 * 4) * 2 * 4]
    else:
        model = nn.Sequential(nn.Linear(SIZE, HEADS * SIZE, bias=False), _Attention(kind == "causal"))
        batch = torch.ones(ROWS, LENGTH, SIZE), target
        # Whole, whatever a mask leaves out: 4 LENGTH^2 SIZE a head forth, and twice as much back.
        of_heads = HEADS * 12 * LENGTH**2 * SIZE
        flops = [4 * LENGTH * SIZE * HEADS * SIZE, 6 * LENGTH * (HEADS * SIZE) * 3 * HEADS * SIZE + of_heads]
    graph = capture_module(model, batch, lambda output, _: output.square().mean())
    return graph, named_tensors(batch), flops


@pytest.mark.parametrize("kind", ["linear", "convolution", "whole", "causal"])
def test_operations_are_those_of_closed_forms_on_any_device(kind: str) -> None:
    graph, batch, flops = _graph(kind)
    real = record(graph, batch, {tensor.name for tensor in graph.tensors})
    ran = [pass_flops(LayerPass(layer, real.inputs[layer.name], graph.outputs)) for layer in graph.layers]
    assert sum(ran) == ROWS * sum(flops)
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    for precision in precisions:
        works = graph_work(graph, ROWS, find("A100"), precision).layers
        assert [work.flops for work in works] == ran
