"""Constants of graphs, of any type and as they lie in memory, come back from JSON and a file of weights."""

import random
from pathlib import Path

import pytest
import torch
from torch import fx

from autopar.capture.cache.store import load_graph, save_graph
from autopar.capture.graph import Layer, LayerGraph


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.some(4)
def test_constants_of_any_kind_are_read_back_as_they_lie_and_shared_ones_are_one(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.uint8]
    whole = (torch.randn(6, 5) * 3).to(draw.choice(kinds))
    views = [whole, whole.T, whole[1:4], whole[:, ::2], whole[2, 3], whole[:1].expand(4, 5), whole[:0], whole.clone()]
    chosen = [draw.choice(views) for _ in range(4)]
    layers, graphs = [], [fx.Graph() for _ in range(2)]
    for number, graph in enumerate(graphs):
        graph.placeholder("rows")
        graph.output(tuple(graph.get_attr(f"constant_{at}") for at in range(4)))
        module = fx.GraphModule({f"constant_{at}": value for at, value in enumerate(chosen)}, graph)
        layers.append(Layer(f"layer{number}", (), (), ("loss",), {}, {}, False, "", module))
    save_graph(LayerGraph(tuple(layers), (), (), ("loss",)), tmp_path)
    found = [layer.module(1) for layer in load_graph(tmp_path).layers]
    for one, other, value in zip(*found, chosen, strict=True):
        assert (one.dtype, one.shape) == (value.dtype, value.shape)
        assert torch.equal(one, value)
        assert torch.equal(other, value)
        assert not value.numel() or (one.stride() == value.stride() and one.data_ptr() == other.data_ptr())
