"""Layers run one after another, whole, in halves and again: gradients are the plain model's, times are one a layer."""

from __future__ import annotations

import pytest
import torch

from autopar.capture import capture_module, named_tensors
from autopar.capture.batch import StepModule
from autopar.profiler.device import CallClock, Time, as_it_is, computing
from autopar.profiler.layer_runs import LayerChain, LayerInputs
from autopar.profiler.measure import representatives
from capture_zoo import build

CPU = torch.device("cpu")


def given(batch: object) -> LayerInputs:
    tensors = named_tensors(batch)
    return LayerInputs(len(next(iter(tensors.values()))), tensors, dict.fromkeys(tensors, False))


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("name", ["chain", "skips", "recurrent", "language"])
@pytest.mark.parametrize("way", ["step", "split", "recompute"])
def test_every_way_of_running_the_layers_gives_the_plain_models_gradients(name: str, way: str) -> None:
    model, batch, loss = build(name)
    graph = capture_module(model, batch, loss)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    StepModule(model, batch, loss)(*named_tensors(batch).values())[0].backward()
    expected = gradients(model)
    chain = LayerChain(graph.layers, graph.outputs, as_it_is, CPU)
    torch.manual_seed(0)
    times = getattr(chain, way)(given(batch))
    found = gradients(model)
    assert [entry[0] for entry in times] == list(graph.layers)
    random = any(layer.random for layer in graph.layers)
    assert found.keys() == expected.keys()
    for key in expected if not (random and way == "recompute") else ():
        torch.testing.assert_close(found[key], expected[key], rtol=1e-12, atol=1e-12)


def test_halves_are_bitwise_a_whole_backward_and_an_outer_layer_has_a_single_half() -> None:
    model, batch, loss = build("chain")
    graph = capture_module(model, batch, loss)
    chain = LayerChain(graph.layers, graph.outputs, as_it_is, CPU)
    chain.step(given(batch))
    whole = gradients(model)
    times = chain.split(given(batch))
    halves = gradients(model)
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    times += [chain.split(given(batch))[0] for _ in range(20)]
    # The first layer's input is the batch, of which nobody wants a gradient.
    first = [each for each in times if each[0] == times[0][0]]
    assert min(each[1].seconds for each in first) < min(each[2].seconds for each in first)


def test_a_step_leaves_nothing_alive_and_starts_from_new_gradients() -> None:
    model, batch, loss = build("chain")
    graph = capture_module(model, batch, loss)
    chain = LayerChain(graph.layers, graph.outputs, as_it_is, CPU)
    chain.step(given(batch))
    once = gradients(model)
    for _ in range(2):
        chain.step(given(batch))
    twice = gradients(model)
    assert all(torch.equal(once[name], twice[name]) for name in once)


def test_of_many_alike_the_first_sixteen_run_and_what_is_missing_is_given() -> None:
    layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(20)]
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), *layers, torch.nn.Linear(4, 1))
    graph = capture_module(
        model, (torch.ones(2, 4), torch.ones(2, 1)), lambda out, batch: (out - batch[1]).square().mean()
    )
    chosen = representatives(graph.layers)
    counts = [layer.fingerprint for layer in chosen]
    assert max(counts.count(kind) for kind in counts) == 16
    assert [graph.layers.index(layer) for layer in chosen[:10]] == list(range(10))
    chain = LayerChain(chosen, graph.outputs, as_it_is, CPU)
    made = {name for layer in chosen for name in layer.outputs}
    assert chain.missing()
    assert not made & set(chain.missing())


def test_autocast_changes_what_layers_make_and_an_unknown_type_is_refused() -> None:
    made = torch.ones(2, 2)
    with computing("bf16", CPU)():
        assert torch.mm(made, made).dtype == torch.bfloat16
    with computing("fp32", CPU)():
        assert torch.mm(made, made).dtype == torch.float32


def test_a_step_gives_every_layer_its_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(CallClock):
        def times(self) -> list[Time]:
            return [Time(float(at)) for at, _ in enumerate(super().times())]

    monkeypatch.setattr("autopar.profiler.layer_runs.clock_of", lambda device: Counting())
    model, batch, loss = build("chain")
    graph = capture_module(model, batch, loss)
    found = LayerChain(graph.layers, graph.outputs, as_it_is, CPU).step(given(batch))
    # Forwards come first, from the first layer on; backwards from the last one on.
    last = 2 * len(graph.layers) - 1
    assert [each for _, *each in found] == [[Time(at), Time(last - at)] for at in range(len(graph.layers))]
