"""A model captured in evaluation mode computes what the plain one does, in layers that are cut as in training."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture.layers.evaluation import capture_evaluation, capture_prediction
from autopar.capture.layers.export import capture_module
from autopar.capture.layers.segment import LayerNodes, segment_like
from autopar.capture.model.batch import model_arguments, named_tensors
from autopar.errors import CaptureError, ModelError
from capture_zoo import Made, captured
from stage_runs import run

NAMES = ["dropout", "norms", "recurrent", "norm twice", "integers", "flattened", "skips"]


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_and_the_outputs_are_those_of_the_plain_model(name: str) -> None:
    model, batch, loss, graph = captured(name)
    model = copy.deepcopy(model)
    modes = [module.training for module in model.modules()]
    evaluated = capture_evaluation(model, batch, loss, graph)
    predicted = capture_prediction(model, batch, loss, graph)
    assert [module.training for module in model.modules()] == modes
    tensors = named_tensors(batch)
    model.eval()
    with torch.no_grad():
        positional, named = model_arguments(model, batch, has_loss=True)
        output = model(*positional, **named)
        values = loss(output, batch)
    found = run(evaluated.layers, tensors)
    expected = values if isinstance(values, tuple) else (values,)
    for result, value in zip(evaluated.results, expected, strict=True):
        torch.testing.assert_close(found[result], torch.as_tensor(value), rtol=1e-12, atol=0)
    torch.testing.assert_close(run(predicted.layers, tensors)["output"], output, rtol=1e-12, atol=1e-14)
    held = {layer.name: set(layer.parameters.values()) for layer in graph.layers}
    for layer in (*evaluated.layers, *predicted.layers):
        assert set(layer.parameters.values()) <= held[layer.name]


def changing(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """Return tensors of another size, or fewer of them, once it is evaluated."""
    found = model.linear(x)
    return {"first": found, "second": found} if model.training else {"first": found, model.key: found[:, :2]}


@pytest.mark.parametrize("key", ["second", "third"])
def test_listed_layers_whose_outputs_change_in_evaluation_are_named(key: str) -> None:
    model = nn.Sequential(nn.Identity(), Made(changing, linear=nn.Linear(3, 3), key=key))
    batch = (torch.randn(4, 3), torch.randn(4, 1))

    def loss(output: dict[str, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (output["first"] - batch[1]).square().mean()

    graph = capture_module(model, batch, loss, layers=list)
    assert len(run(capture_evaluation(model, batch, loss, graph).layers, named_tensors(batch))) == 4
    predicted = capture_prediction(model, batch, loss, graph)
    assert predicted.layers[-1].inputs == graph.layers[0].outputs
    with pytest.raises(ModelError, match="another second in evaluation mode than in training"):
        run(predicted.layers, named_tensors(batch))


def test_a_boundary_or_output_that_evaluation_does_not_have_is_refused() -> None:
    model, _, _, graph = captured("norm twice")
    exported = graph.segmented_program
    layers = [[name] for layer in graph.layers for name in layer.modules]
    with pytest.raises(CaptureError, match=r"cannot be cut before .* in evaluation as it is in training"):
        segment_like(exported.program.graph, exported.inputs, model, layers)
    same = segment_like(exported.program.graph, exported.inputs, model, [layer.modules for layer in graph.layers])
    assert all(isinstance(part, LayerNodes) for part in same)
    assert [part.nodes for part in same] == [part.nodes for part in exported.segments]
    model, batch = Made(lambda m, x: m.linear(x).square().mean(), linear=nn.Linear(3, 3)), torch.randn(4, 3)
    graph = capture_module(model, batch)
    with pytest.raises(ModelError, match="returns no tensor that has the samples as one dimension"):
        capture_prediction(model, batch, None, graph)
