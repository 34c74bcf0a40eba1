"""Stand-ins read and make what a profile's layers do, and have gradients where these have."""

import random

import pytest
import torch

from autopar.formats.program import LayerBytes
from autopar.runtime.clocks import VirtualClock
from autopar.runtime.rehearsal.stand_ins import MemoryLedger, stand_in_graph
from random_problems import gpt_profile, random_profile


@pytest.mark.some(15)
@pytest.mark.parametrize("seed", range(30))
def test_a_graph_has_the_layers_tensors_and_gradients_of_its_profile(seed: int) -> None:
    profile = random_profile(seed, most_layers=9)
    graph = stand_in_graph(profile, MemoryLedger(VirtualClock(0.0), 0), {})
    rows = random.Random(seed).randint(1, 4)
    assert [layer.name for layer in graph.layers] == [layer.name for layer in profile.layers]
    made = {tensor.name: (tensor.producer, tensor.consumers, tensor.gradient) for tensor in profile.tensors}
    assert {each.name: (each.producer, each.consumers, each.gradient) for each in graph.tensors} == made
    tied = {each.parameter: set(each.layers) for each in profile.tied if each.trainable}
    assert {name: set(layers) for name, layers in graph.tied_parameters().items()} == tied
    # Gradients flow over tensors that have them, and end at layers that the loss depends on.
    known = {name: torch.zeros(rows) for name in graph.inputs}
    for layer in graph.layers:
        outputs = layer.module(rows, *(known[name] for name in layer.inputs))
        known.update(zip(layer.outputs, outputs, strict=True))
    known["loss"].backward()
    for tensor in (each for each in graph.tensors if each.producer is not None):
        assert known[tensor.name].shape == (rows,)
        assert tensor.gradient or not known[tensor.name].requires_grad
    for layer in graph.layers:
        for name, parameter in layer.named_parameters():
            own = name.endswith(":weight")
            assert not own or parameter.requires_grad == (parameter.grad is not None), name
    assert graph.layers[-1].parameter("weight").grad is not None


def test_bytes_count_while_their_storage_is_alive_or_a_layers_backward_to_come() -> None:
    clock = VirtualClock(0.0)
    ledger = MemoryLedger(clock, 100)
    tensor = ledger.count(torch.zeros(4), 30)
    clock.spend(1.0)
    view = tensor.detach().view(2, 2)
    # The same storage, whatever is said of it again.
    ledger.count(view, 50)
    del tensor
    assert ledger.alive_bytes == 130
    clock.spend(1.0)
    del view
    assert ledger.alive_bytes == 100
    assert ledger.moments == [(0.0, 100), (0.0, 130), (2.0, 100)]
    assert ledger.peak_bytes == 130
    profile = gpt_profile(blocks=1, batch=4)
    ledger = MemoryLedger(VirtualClock(0.0), 0)
    held = LayerBytes(saved=1000, saved_tensors=(), transient=70, pending=0, gradients=500)
    layer = stand_in_graph(profile, ledger, {profile.layers[1].name: held}).layers[1]
    size = next(tensor.bytes_per_sample for tensor in profile.tensors if tensor.name in layer.outputs)
    (output,) = layer.module(2, torch.zeros(2, requires_grad=True))
    assert ledger.alive_bytes == 1000 + 2 * size
    assert ledger.peak_bytes >= 1000 + 70
    output.sum().backward()
    del output
    assert ledger.alive_bytes == 0


def test_what_is_held_is_noted() -> None:
    ledger = MemoryLedger(VirtualClock(0.0), 100)
    ledger.count(torch.zeros(1), 0)
    ledger.spike(0)
    assert ledger.moments == [(0.0, 100)]
    kept = ledger.count(torch.zeros(1), 10)
    ledger.spike(25)
    assert (ledger.alive_bytes, ledger.peak_bytes) == (110, 135)
    ledger.begin_step()
    # What is still alive is where the next step begins.
    assert (ledger.moments, ledger.peak_bytes) == ([(0.0, 110)], 110)
    del kept
    assert ledger.alive_bytes == 100
