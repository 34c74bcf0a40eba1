"""Regions in which a model turns autocast off are off in its layers, too, though none is on while it is captured."""
# ruff: noqa: ANN001, ANN201

import contextlib

import pytest
import torch
from torch import nn
from transformers.utils.generic import maybe_autocast

from autopar.capture import capture_module, materialize
from autopar.capture.cache.store import load_graph, save_graph
from autopar.capture.model.meta import retarget
from stage_runs import assert_equal_to_plain, plain

BF16 = torch.bfloat16


def square(output, batch):
    return output.float().square().mean()


class RegionBlock(nn.Module):
    """Products inside and outside of a region, with gradients or without, nested or not."""

    def __init__(self, region, gradients, nested) -> None:
        super().__init__()
        self.first, self.exact, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.region, self.gradients, self.nested = region, gradients, nested

    def forward(self, x):
        value = self.first(x)
        with contextlib.nullcontext() if self.gradients else torch.no_grad(), self.region(x.device.type):
            scale = self.exact(value.float())
            if self.nested:
                with torch.autocast(x.device.type, dtype=BF16):
                    scale = self.exact(scale)
        return x + self.last(value * scale)


def written(device_type):
    return torch.autocast(device_type, enabled=False)


def of_transformers(device_type):
    return maybe_autocast(device_type, enabled=False)


@pytest.mark.pairs
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("region", [written, of_transformers])
@pytest.mark.parametrize("precision", [None, BF16])
def test_layers_with_regions_compute_as_the_model_does(precision, region, gradients, nested, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(RegionBlock(region, gradients, nested) for _ in range(3)), nn.Linear(8, 2))
    batch = (torch.randn(6, 8), torch.randn(6, 2))
    save_graph(capture_module(model, batch, square), tmp_path / "kept")
    graph = load_graph(tmp_path / "kept")
    with torch.autocast("cpu", dtype=precision or BF16, enabled=precision is not None):
        assert_equal_to_plain(model, graph, batch, square, [2], tolerance=0.0 if precision is None else 1e-2)
        # Without regions, losses differ.
        if precision is not None:
            other = nn.Sequential(
                *(RegionBlock(lambda _: contextlib.nullcontext(), gradients, nested) for _ in range(3))
            )
            other.append(nn.Linear(8, 2)).load_state_dict(model.state_dict())
            assert plain(model, batch, square)[0][0] != plain(other, batch, square)[0][0]


class Written(nn.Module):
    """Writes into what a conversion gives, which is its input itself where that has the type, and reads both."""

    def __init__(self, convert) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.convert = convert

    def forward(self, x):
        value = self.first(x)
        converted = self.convert(value)
        converted.mul_(2)
        return self.last(value) + converted


@pytest.mark.parametrize(
    "convert",
    [
        torch.Tensor.float,
        lambda x: x.to(torch.float32),
        lambda x: x.type_as(torch.ones(1)),
        lambda x: x.float().view(-1, 8),
    ],
)
@pytest.mark.parametrize("precision", [None, BF16])
def test_what_is_written_into_a_conversion_is_written_as_in_the_model(precision, convert):
    torch.manual_seed(0)
    model = nn.Sequential(Written(convert), Written(convert), nn.Linear(8, 2))
    batch = (torch.randn(6, 8), torch.randn(6, 2))
    graph = capture_module(model, batch, square)
    with torch.autocast("cpu", dtype=precision or BF16, enabled=precision is not None):
        assert_equal_to_plain(model, graph, batch, square, [1], tolerance=0.0 if precision is None else 1e-2)


def test_regions_move_to_the_device_that_layers_move_to():
    graph = capture_module(
        nn.Sequential(RegionBlock(written, True, True)), (torch.randn(4, 8), torch.randn(4, 8)), square
    )
    materialize(graph.layers[0], dict(graph.layers[0].named_parameters()))
    retarget(graph.layers[0], torch.device("cuda"))
    regions = [
        node.args[:3]
        for module in graph.layers[0].module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.wrap_with_autocast)
    ]
    assert sorted(regions, key=str) == [("cuda", BF16, False), ("cuda", BF16, True)]
