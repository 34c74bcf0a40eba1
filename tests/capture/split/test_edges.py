"""Which tensors cross a layer's edge in slices, and what is refused, or not worth it."""

import pytest
import torch
from torch import nn

from autopar.capture.split.edges import sequence_dims
from autopar.capture.split.names import MismatchError
from autopar.capture.split.rewrite import split_layer
from drawn_streams import drawn_stream
from single_layers import AttentionBlock, layer_of


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
