"""Which tensors cross a layer's edge in slices, and what is refused, or not worth it."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autopar.capture.split.analysis import analyse
from autopar.capture.split.edges import NO_EDGES, find_edges, has_even_slices, numbers, sequence_dims
from autopar.capture.split.names import MismatchError
from autopar.capture.split.rewrite import split_layer
from drawn_streams import drawn_stream
from single_layers import AttentionBlock, layer_of


def test_without_names_nothing_changes() -> None:
    layer = layer_of(AttentionBlock(), torch.ones(2, 8, 16))
    plain, empty = (split_layer(layer, None, 1, 2, sequence=each) for each in (None, {}))  # type: ignore[arg-type]
    assert plain.module.code == empty.module.code
    assert "gather" not in plain.module.code


def test_what_is_no_tensor_of_the_layer_or_has_no_even_slices_is_refused() -> None:
    layer = layer_of(AttentionBlock(), torch.ones(2, 6, 16))
    for names, count in (({"other": 1}, 2), ({layer.inputs[0]: 1}, 4), ({layer.inputs[0]: 0}, 2)):
        with pytest.raises(MismatchError, match=next(iter(names))):
            split_layer(layer, None, 0, count, sequence=names)  # type: ignore[arg-type]
    assert sequence_dims(layer, 4) == {}


@pytest.mark.slow
def test_most_drawn_streams_are_worth_slices() -> None:
    layers = [drawn_stream(seed)[0] for seed in range(60)]
    worth = [layer for layer in layers if sequence_dims(layer, 2)]
    assert 30 <= len(worth) < 60


def test_edges_are_found_by_the_names_of_tensors() -> None:
    layer = layer_of(AttentionBlock(), torch.ones(2, 8, 16))
    module = analyse(layer).module
    (name,), (output,) = layer.inputs, layer.outputs
    assert find_edges(module, layer, {}, 2) == NO_EDGES
    edges = find_edges(module, layer, {name: 1, output: 2}, 2)
    assert [(str(node.target), dim) for node, dim in edges.inputs.items()] == [(name, 1)]
    assert edges.outputs == {0: 2}
    ((node, dim),) = edges.output_nodes(module)
    assert (node, dim) == (module.graph.find_nodes(op="output")[0].args[0][0], 2)


def test_a_dimension_has_even_slices_that_parts_divide() -> None:
    layer = layer_of(AttentionBlock(), torch.ones(2, 8, 16))
    node = layer.module.graph.find_nodes(op="placeholder")[1]  # type: ignore[union-attr, operator]
    assert isinstance(node, fx.Node)
    found = {(dim, count) for dim in range(-1, 4) for count in range(2, 20) if has_even_slices(node, dim, count)}
    assert found == {(dim, count) for dim, size in ((1, 8), (2, 16)) for count in range(2, 20) if size % count == 0}
    assert not has_even_slices(None, 0, 2)
    assert numbers(node) == 8 * 16


def test_what_regions_alone_read_without_parameters_is_whole() -> None:
    """Both inputs of a product have rows that parts divide; no parameter is there to read either."""

    class Product(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x @ y

    layer = layer_of(Product(), torch.ones(2, 8, 8), torch.ones(2, 8, 8))
    assert sequence_dims(layer, 2) == {}
