"""Layers one after another, whole, in halves, again and compiled: gradients and saved bytes are the plain model's."""

import shutil

import pytest
import torch
from torch import nn

from autopar.capture import capture_module, named_tensors
from autopar.capture.model.batch import StepModule
from autopar.profiler import layer_runs as runs
from autopar.profiler.device import CallClock, Time, as_it_is, peak_bytes
from autopar.profiler.measure import representatives
from capture_zoo import Made, build, mean_square

CPU = torch.device("cpu")


def given(batch: object) -> runs.LayerInputs:
    tensors = named_tensors(batch)
    return runs.LayerInputs(len(next(iter(tensors.values()))), tensors, dict.fromkeys(tensors, False))


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("name", ["chain", "skips", "recurrent", "language"])
def test_every_way_of_running_the_layers_gives_the_plain_models_gradients(name: str) -> None:
    model, batch, loss = build(name)
    graph = capture_module(model, batch, loss)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    StepModule(model, batch, loss)(*named_tensors(batch).values())[0].backward()
    expected = gradients(model)
    chain = runs.LayerChain(graph.layers, graph.outputs, as_it_is, CPU)
    found = {}
    for way in ("step", "split", "recompute"):
        # A second step starts from new gradients.
        for _ in range(2):
            torch.manual_seed(0)
            times = getattr(chain, way)(given(batch))
        assert [entry[0] for entry in times] == list(graph.layers)
        found[way] = gradients(model)
        assert found[way].keys() == expected.keys()
        for key in expected if way != "recompute" or not any(layer.random for layer in graph.layers) else ():
            torch.testing.assert_close(found[way][key], expected[key], rtol=1e-12, atol=1e-12)
    assert all(torch.equal(found["step"][key], found["split"][key]) for key in expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
# What torch's compiler warns of is none of ours.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_compiled_layers_draw_and_compute_what_plain_ones_do() -> None:
    torch.manual_seed(1)
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)) for _ in range(runs.OF_A_KIND + 3)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(8, 1))
    batch = (torch.randn(4, 8), torch.randn(4, 1))
    graph = capture_module(model, batch, lambda output, batch: (output - batch[1]).square().mean())
    kinds = [layer.fingerprint for layer in graph.layers]
    with runs.compiling(CPU):
        faster = runs.compile_layers(graph)
        codes = {id(layer.module) for layer in faster.layers}
        assert len(codes) == sum(min(runs.OF_A_KIND, kinds.count(kind)) for kind in set(kinds))
        found = []
        # The last of a kind run another one's weights: the layers up to there are compared.
        for layers in (graph.layers[: runs.OF_A_KIND + 1], faster.layers[: runs.OF_A_KIND + 1]):
            torch.manual_seed(0)
            runs.LayerChain(layers, graph.outputs, as_it_is, CPU).step(given(batch))
            found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["chain", "language", "norms", "skips", "recurrent"])
def test_the_layers_saved_storages_are_those_of_the_whole_model(name: str) -> None:
    model, batch, loss = build(name)
    graph = capture_module(model, batch, loss)
    tensors = named_tensors(batch)
    saved = runs.record(graph, tensors, {tensor.name for tensor in graph.tensors}).saved_bytes
    union = {storage: size for storages in saved.values() for storage, size in storages.items()}
    whole = runs.SavedStorages("model", (*model.parameters(), *model.buffers()))
    with whole.recording():
        outputs = StepModule(model, batch, loss)(*tensors.values())
    expected = whole.bytes_by_name({}, {})
    free = {size for storage, size in union.items() if "#" in storage}
    if name == "language":
        # Masks and positions are made again in every layer that reads them, so each layer may keep its own.
        assert sum(union.values()) >= sum(expected.values())
        assert free
    else:
        assert sorted(union.values()) == sorted(expected.values())
    assert outputs[0].requires_grad


def test_a_linear_layers_peak_is_what_one_counts_and_of_many_alike_sixteen_run() -> None:
    model, batch, loss = build("chain")
    graph = capture_module(model, batch, loss)
    inputs = runs.record(graph, named_tensors(batch), {tensor.name for tensor in graph.tensors}).inputs
    layer = graph.layers[1]
    for parameter in layer.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    work = runs.LayerPass(layer, inputs[layer.name], graph.outputs)
    activation, weight, bias = 6 * 8 * 8, 8 * 8 * 8, 8 * 8
    # Forward: linear, tanh (saved). Backward: gradient of the output; of tanh; then at once the gradients of the
    # input, of the weight and of the bias, before they are added to those that are there.
    assert 3 * activation + weight <= peak_bytes(work.whole, CPU) <= 4 * activation + weight + bias
    layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(20)]
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), *layers, torch.nn.Linear(4, 1))
    graph = capture_module(model, (torch.ones(2, 4), torch.ones(2, 1)), lambda out, to: (out - to[1]).square().mean())
    chosen = representatives(graph.layers)
    counts = [layer.fingerprint for layer in chosen]
    assert max(counts.count(kind) for kind in counts) == 16
    assert [graph.layers.index(layer) for layer in chosen[:10]] == list(range(10))
    chain = runs.LayerChain(chosen, graph.outputs, as_it_is, CPU)
    made = {name for layer in chosen for name in layer.outputs}
    assert chain.missing()
    assert not made & set(chain.missing())
    # Between its halves a layer holds its input, three products and what was summed, twice, but no parameters.
    held = {name: nn.Parameter(torch.ones(10)) for name in ("one", "two")}
    scaled = Made(lambda m, x: m.lin(x).sum(1, keepdim=True) * m.one * m.two, lin=nn.Linear(4, 4), **held)
    model = nn.Sequential(nn.Linear(4, 4), scaled, nn.Linear(10, 1))
    graph = capture_module(model, (torch.ones(3, 4), torch.ones(3, 1)), mean_square, list)
    layer = graph.layers[1]
    inputs = runs.LayerInputs(3, {name: torch.ones(3, 4) for name in layer.inputs}, dict.fromkeys(layer.inputs, True))
    assert runs.pending_bytes(layer, inputs, graph, as_it_is) == 48 + 12 + 3 * 120 + 12


def test_a_step_gives_every_layer_its_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(CallClock):
        def times(self) -> list[Time]:
            return [Time(float(at)) for at, _ in enumerate(super().times())]

    monkeypatch.setattr("autopar.profiler.device.CallClock", Counting)
    model, batch, loss = build("chain")
    graph = capture_module(model, batch, loss)
    chain = runs.LayerChain(graph.layers, graph.outputs, as_it_is, CPU)
    found = chain.step(given(batch))
    # Forwards come first, from the first layer on; backwards from the last one on.
    last = 2 * len(graph.layers) - 1
    assert [each for _, *each in found] == [[Time(at), Time(last - at)] for at in range(len(graph.layers))]
    # What is run again, and either half, comes from the last layer on.
    backwards = [Time(len(graph.layers) - 1 - at) for at in range(len(graph.layers))]
    weights = [Time(last - at) for at in range(len(graph.layers))]
    assert chain.recompute(given(batch)) == list(zip(graph.layers, backwards, strict=True))
    assert chain.split(given(batch)) == list(zip(graph.layers, backwards, weights, strict=True))
