"""From measurements to the records of a profile, against counting by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.capture import LayerGraph, capture_module
from autopar.formats.profile import Writes
from autopar.profiler.device import Time
from autopar.profiler.layer_runs import Recording
from autopar.profiler.measure import Timing
from autopar.profiler.optimizer import OptimizerMemory, UpdateCosts
from autopar.profiler.profile import Costs, describe_layers, describe_tensors, owned_parameters, update_kinds
from autopar.profiler.subject import describe_ties
from capture_zoo import Made


def _graph() -> LayerGraph:
    """Four linear layers: the third shares the first one's weight, the second's bias is not trained."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    model[2].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    batch = (torch.ones(2, 6), torch.ones(2, 6))
    return capture_module(model, batch, lambda output, batch: (output - batch[1]).square().mean())


def _costs(graph: LayerGraph) -> Costs:
    costs = Costs(crossing={tensor.name for tensor in graph.tensors if tensor.producer is not None})
    kinds = {layer.fingerprint for layer in graph.layers}
    costs.update_kinds = update_kinds(graph)
    costs.flops = dict.fromkeys(kinds, 60)
    costs.updates = {kind: UpdateCosts(0.25, 0.125) for kind in costs.update_kinds.values()}
    costs.optimizer = OptimizerMemory(dict.fromkeys(kinds, 40), dict.fromkeys(kinds, 8), at_once=False)
    for size in (1, 4):
        names = [layer.name for layer in graph.layers]
        made = dict.fromkeys(costs.crossing, (torch.bfloat16, 11 * size + 2))
        costs.recordings[size] = Recording({}, {name: {"x": size} for name in names}, dict.fromkeys(names, size), made)
        for kind in kinds:
            backward = [Time(2.0 * size, 0.5)] * 3
            costs.timings[kind, size] = Timing([Time(9.0), Time(size + 1.0), Time(0.5)], backward, recompute=[Time(1)])
            costs.peaks[kind, size] = 100 * size
    return costs


def test_shared_parameters_are_updated_once_and_crossing_tensors_have_their_bytes() -> None:
    graph = _graph()
    owned = list(owned_parameters(graph).values())
    assert [len(each) for each in owned] == [2, 1, 1, 2]
    names = [layer.parameters[at] for layer, each in zip(graph.layers, owned, strict=True) for at in each]
    assert len(names) == len(set(names))
    assert sorted(names) == ["0.bias", "0.weight", "1.weight", "2.bias", "3.bias", "3.weight"]
    places = [tuple(place for place in each[1]) for each in update_kinds(graph).values()]
    assert [len(each) for each in places] == [2, 1, 1, 2]
    for layer, each in zip(graph.layers, places, strict=True):
        held = list(layer.parameters)
        assert tuple(held[place] for place in each) == owned_parameters(graph)[layer.name]
    (tie,) = describe_ties(graph)
    assert (tie.parameter, tie.layers, tie.bytes, tie.trainable) == ("0.weight", ("0", "2"), 4 * 36, True)
    graph = _graph()
    for tensor, spec in zip(describe_tensors(graph, _costs(graph).crossing_tensors()), graph.tensors, strict=True):
        expected = ("float32", 4 * 6) if spec.producer is None else ("bfloat16", 12)
        assert (tensor.name, tensor.dtype, tensor.bytes_per_sample) == (spec.name, *expected)
    assert {tensor.dtype for tensor in describe_tensors(graph)} == {"float32"}


def test_layers_get_the_medians_of_their_kind_and_the_bytes_of_their_own() -> None:
    graph = _graph()
    graph = replace(graph, layers=tuple(replace(each, most_rows=7) for each in graph.layers))
    records = describe_layers(graph, _costs(graph))
    assert [record.parameters_bytes for record in records] == [4 * 42] * 4
    assert [record.trainable_bytes for record in records] == [4 * 42, 4 * 36, 4 * 42, 4 * 42]
    seen: dict[str, str] = {}
    for layer, record in zip(graph.layers, records, strict=True):
        original = seen.setdefault(layer.fingerprint, layer.name)
        assert record.measured_as == (None if original == layer.name else original)
        found = [(cost.micro_batch, cost.forward_s, cost.backward_s, cost.repeats) for cost in record.costs]
        assert found == [(1, 2.0, 2.0, 3), (4, 5.0, 8.0, 3)]
        assert [(cost.forward_launch_s, cost.backward_launch_s) for cost in record.costs] == [(None, 0.5)] * 2
        assert [(cost.recompute_s, cost.backward_spread) for cost in record.costs] == [(1.0, 0.0)] * 2
        assert all(cost.forward_spread > 1 for cost in record.costs)
        assert (record.least_samples, record.most_samples, record.flops_per_sample) == (1, layer.most_rows, 60)
        assert record.forward_fit is not None
        assert (record.forward_fit.fixed_s, record.forward_fit.per_sample_s) == pytest.approx((1.0, 1.0))
        assert (record.update_s, record.accumulate_s, record.optimizer_bytes) == (0.25, 0.125, 40)
    # Constants of a layer are no buffers of the model; of those, some are written.
    made = Made(
        lambda m, x: m.lin(x) * torch.tensor([1.0, 2.0, 3.0]) + m.shift, lin=nn.Linear(3, 3), shift=torch.ones(3)
    )
    model = nn.Sequential(nn.Linear(3, 3), made, nn.BatchNorm1d(3), nn.Linear(3, 1))
    graph = capture_module(model, (torch.ones(2, 3), torch.ones(2, 1)), lambda output, batch: output.mean())
    layers = [replace(each, writes=Writes(buffers=("2.running_mean",))) for each in graph.layers]
    records = describe_layers(changed := replace(graph, layers=tuple(layers)), _costs(changed))
    assert [each.buffers_bytes for each in records] == [0, 12, 12 + 12 + 8, 0]
    assert [each.written_bytes for each in records] == [0, 0, 12, 0]
