"""The chain of layers: what one says of its tensors and parameters, against the model that it was captured from."""

import random

import torch

from autopar.capture import named_tensors
from autopar.capture.graph import TensorSpec
from capture_zoo import captured
from stage_runs import run


def test_tensors_are_what_the_graph_says_read_by_whom_it_says_with_rows_where_the_batch_dimension_is() -> None:
    for name in ("chain", "skips"):
        _, batch, _, graph = captured(name)
        tensors = run(graph.layers, named_tensors(batch))
        for spec in graph.tensors:
            assert graph.tensor(spec.name) is spec
            assert (tuple(tensors[spec.name].shape), tensors[spec.name].dtype) == (spec.shape(6), spec.dtype)
            assert spec.consumers == tuple(layer.name for layer in graph.layers if spec.name in layer.inputs)
            assert spec.producer is None or spec.name in graph.layer(spec.producer).outputs
    draw = random.Random(1)
    for _ in range(30):
        sizes = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 3)))
        place, rows = draw.randint(0, len(sizes)), draw.randint(1, 7)
        spec = TensorSpec("t", None, (), sizes, place, torch.bfloat16, gradient=False)
        whole = torch.empty(rows, *sizes, dtype=torch.bfloat16).movedim(0, place)
        assert spec.shape(rows) == tuple(whole.shape)
        assert spec.bytes_per_sample * rows == whole.nbytes
