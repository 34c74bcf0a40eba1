"""How many samples a layer takes at once: what torch names, what a model does with one, batch normalisation."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.evaluation import capture_evaluation, capture_prediction
from autopar.capture.export import capture_module
from autopar.capture.graph import LayerGraph
from autopar.capture.store import load_graph, save_graph
from autopar.errors import CaptureError

WIDTH = 6
Forward = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self, middle: Forward | nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def loss(output: torch.Tensor, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output, batch[-1])


def batch() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, WIDTH), torch.randint(0, 3, (4,))]


def captured(middle: Forward | nn.Module) -> LayerGraph:
    return capture_module(Net(middle), batch(), loss)


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
        (lambda x: x.reshape(x.shape[0], WIDTH), {(1, None)}),
        (lambda x: F.dropout(x, 0.5), {(1, None)}),
        (lambda x: x - x.mean(0, keepdim=True), {(1, None)}),
        (lambda x: x.squeeze() + x.squeeze().mean(-1, keepdim=True), {(1, None)}),
        (nn.BatchNorm1d(WIDTH), {(1, None), (2, None)}),
        (nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), {(1, None)}),
    ],
)
def test_layers_take_what_the_model_is_captured_for(
    middle: Forward, expected: set[tuple[int, int | None]], tmp_path: Path
) -> None:
    graph = captured(middle)
    assert limits(graph) == expected
    save_graph(graph, tmp_path)
    assert limits(load_graph(tmp_path)) == expected


@pytest.mark.parametrize(
    "middle", [lambda x: x * 2 if x.shape[0] % 2 else x, lambda x: x * 2 if x.shape[0] == 6 else x], ids=["odd", "six"]
)
def test_a_number_of_samples_that_no_range_tells_is_refused(middle: Forward) -> None:
    with pytest.raises(CaptureError, match="number of samples"):
        captured(middle)


def test_listed_modules_that_raise_for_one_sample_take_two() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = capture_module(model, batch(), loss, list)
    assert [layer.least_rows for layer in graph.layers] == [1, 2, 1]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_evaluation_has_limits_of_its_own() -> None:
    class Alone(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return alone(x) if not self.training else x

    model = Net(Alone())
    graph = capture_module(model, batch(), loss)
    assert limits(graph) == {(1, None)}
    evaluated = (capture_evaluation(model, batch(), loss, graph), capture_prediction(model, batch(), loss, graph))
    assert [{layer.least_rows for layer in each.layers} for each in evaluated] == [{2}, {2}]
