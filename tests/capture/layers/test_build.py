"""How many samples a layer takes at once: what torch names, what a model does with one, batch normalisation."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.cache.store import load_graph, save_graph
from autopar.capture.graph import LayerGraph
from autopar.capture.layers.evaluation import capture_evaluation, capture_prediction
from autopar.capture.layers.export import capture_module
from autopar.errors import CaptureError
from capture_zoo import Made, mean_square, regression

Forward = Callable[[torch.Tensor], torch.Tensor]


def made(middle: Forward | nn.Module) -> nn.Module:
    held = {"first": nn.Linear(8, 8), "middle": middle, "last": nn.Linear(8, 8)}
    return Made(lambda m, x: m.last(m.middle(m.first(x))), **held).double()


def captured(middle: Forward | nn.Module) -> LayerGraph:
    return capture_module(made(middle), regression(4), mean_square)


def limits(graph: LayerGraph) -> set[tuple[int, int | None]]:
    return {(layer.least_rows, layer.most_rows) for layer in graph.layers}


def below_64(x: torch.Tensor) -> torch.Tensor:
    """As the U-Nets of diffusers."""
    return x.contiguous() * 2 if x.shape[0] >= 64 else x


def alone(x: torch.Tensor) -> torch.Tensor:
    return x * 100 if x.shape[0] == 1 else x


def only_several(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] < 2:
        raise ValueError("too few")
    return x


@pytest.mark.parametrize(
    ("middle", "expected"),
    [
        (below_64, {(1, 63)}),
        (alone, {(2, None)}),
        (lambda x: x * (1.0 if x.shape[0] > 1 else 2.0), {(2, None)}),
        (only_several, {(2, None)}),
        (lambda x: below_64(alone(x)), {(2, 63)}),
        (lambda x: x.reshape(x.shape[0], 8), {(1, None)}),
        (lambda x: F.dropout(x, 0.5), {(1, None)}),
        (lambda x: x - x.mean(0, keepdim=True), {(1, None)}),
        (lambda x: x.squeeze() + x.squeeze().mean(-1, keepdim=True), {(1, None)}),
        (nn.BatchNorm1d(8), {(1, None), (2, None)}),
        (nn.utils.spectral_norm(nn.Linear(8, 8)), {(1, None)}),
        (lambda x: x * 2 if x.shape[0] % 2 else x, None),
        (lambda x: x * 2 if x.shape[0] == 6 else x, None),
    ],
)
def test_layers_take_what_the_model_is_captured_for_if_a_range_tells_it(
    middle: Forward, expected: set[tuple[int, int | None]] | None, tmp_path: Path
) -> None:
    if expected is None:
        with pytest.raises(CaptureError, match="number of samples"):
            captured(middle)
        return
    graph = captured(middle)
    assert limits(graph) == expected
    save_graph(graph, tmp_path)
    assert limits(load_graph(tmp_path)) == expected


def test_listed_modules_that_raise_for_one_sample_take_two_and_evaluation_has_limits_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = capture_module(model, regression(4), mean_square, list)
    assert [layer.least_rows for layer in graph.layers] == [1, 2, 1]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model, batch = made(Made(lambda m, x: x if m.training else alone(x))), regression(4)
    graph = capture_module(model, batch, mean_square)
    assert limits(graph) == {(1, None)}
    evaluated = (
        capture_evaluation(model, batch, mean_square, graph),
        capture_prediction(model, batch, mean_square, graph),
    )
    assert [{layer.least_rows for layer in each.layers} for each in evaluated] == [{2}, {2}]
