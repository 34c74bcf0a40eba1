"""The chain of layers: what one says of its tensors and parameters, against the model that it was captured from."""

import random

import torch

from autopar.capture import LayerGraph, named_tensors
from autopar.capture.batch import StepModule
from autopar.capture.graph import TensorSpec
from capture_zoo import captured


def test_a_tensors_rows_are_where_its_batch_dimension_is() -> None:
    draw = random.Random(1)
    for _ in range(30):
        sizes = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 3)))
        place, rows = draw.randint(0, len(sizes)), draw.randint(1, 7)
        spec = TensorSpec("t", None, (), sizes, place, torch.bfloat16, gradient=False)
        whole = torch.empty(rows, *sizes, dtype=torch.bfloat16).movedim(0, place)
        assert spec.shape(rows) == tuple(whole.shape)
        assert spec.bytes_per_sample * rows == whole.nbytes


def _run(graph: LayerGraph, batch: object) -> dict[str, torch.Tensor]:
    tensors = named_tensors(batch)
    rows = len(next(iter(tensors.values())))
    for layer in graph.layers:
        made = layer.module(rows, *(tensors[name] for name in layer.inputs))
        tensors.update(zip(layer.outputs, made, strict=True))
    return tensors


def test_layers_in_order_compute_the_model_and_read_what_the_graph_says() -> None:
    for name in ("chain", "skips"):
        model, batch, loss, graph = captured(name)
        tensors = _run(graph, batch)
        expected = StepModule(model, batch, loss)(*named_tensors(batch).values())
        for output, value in zip(graph.outputs, expected, strict=True):
            torch.testing.assert_close(tensors[output], value)
        rows = len(next(iter(named_tensors(batch).values())))
        for spec in graph.tensors:
            assert graph.tensor(spec.name) is spec
            assert (tuple(tensors[spec.name].shape), tensors[spec.name].dtype) == (spec.shape(rows), spec.dtype)
            assert spec.consumers == tuple(layer.name for layer in graph.layers if spec.name in layer.inputs)
            assert spec.producer is None or spec.name in graph.layer(spec.producer).outputs
