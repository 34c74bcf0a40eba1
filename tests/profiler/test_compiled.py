"""Compiled layers: the same gradients, and a profile that says so."""

from __future__ import annotations

import shutil

import pytest
import torch

from autopar.capture import capture_module, named_tensors
from autopar.profiler.device import as_it_is
from autopar.profiler.layer_runs import OF_A_KIND, LayerChain, LayerInputs, compile_layers, compiling

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU"),
    # What torch's compiler warns of is none of ours.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.slow
def test_compiled_layers_draw_and_compute_what_plain_ones_do() -> None:
    torch.manual_seed(1)
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)) for _ in range(OF_A_KIND + 3)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(8, 1))
    batch = (torch.randn(4, 8), torch.randn(4, 1))
    graph = capture_module(model, batch, lambda output, batch: (output - batch[1]).square().mean())
    tensors = named_tensors(batch)
    given = LayerInputs(4, tensors, dict.fromkeys(tensors, False))
    kinds = [layer.fingerprint for layer in graph.layers]
    with compiling(torch.device("cpu")):
        faster = compile_layers(graph)
        codes = {id(layer.module) for layer in faster.layers}
        assert len(codes) == sum(min(OF_A_KIND, kinds.count(kind)) for kind in set(kinds))
        found = []
        # The last of a kind run another one's weights: the layers up to there are compared.
        for layers in (graph.layers[: OF_A_KIND + 1], faster.layers[: OF_A_KIND + 1]):
            torch.manual_seed(0)
            LayerChain(layers, graph.outputs, as_it_is, torch.device("cpu")).step(given)
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6)
