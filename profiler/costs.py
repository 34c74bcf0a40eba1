"""From measurements to the records of a profile."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from autopar.capture import Layer, LayerGraph
from autopar.formats import profile as formats
from autopar.profiler.device import Time
from autopar.profiler.layer_runs import Recording
from autopar.profiler.measure import Timing, fit_line, spread
from autopar.profiler.optimizer import OptimizerMemory, UpdateCosts


@dataclass
class Costs:
    """Everything measured. Times, peaks and updates are by kind (fingerprint), for identical layers share them."""

    crossing: set[str]
    recordings: dict[int, Recording] = field(default_factory=dict)
    """By micro-batch size."""
    timings: dict[tuple[str, int], Timing] = field(default_factory=dict)
    """By kind and micro-batch size."""
    peaks: dict[tuple[str, int], int] = field(default_factory=dict)
    pending: dict[tuple[str, int], int] = field(default_factory=dict)
    """What is held between the halves of a backward."""
    optimizer: OptimizerMemory = field(default_factory=lambda: OptimizerMemory({}, {}, at_once=False))
    """By kind."""
    updates: dict[tuple[str, tuple[int, ...]], UpdateCosts] = field(default_factory=dict)
    """By what :func:`update_kinds` gives."""
    update_kinds: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)


def owned_parameters(graph: LayerGraph) -> dict[str, tuple[str, ...]]:
    """Return, by layer, the attributes of its trained parameters that no earlier layer holds: it updates them."""
    seen: set[str] = set()
    owned = {}
    for layer in graph.layers:
        fresh = {name: at for at, name in layer.parameters.items() if name not in seen}
        owned[layer.name] = tuple(at for at in fresh.values() if layer.parameter(at).requires_grad)
        seen |= set(fresh)
    return owned


def update_kinds(graph: LayerGraph) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return, by layer, its kind and the places in ``layer.parameters`` of those it updates.

    Of identical layers, one may own what another shares.
    """
    owned = owned_parameters(graph)
    places = {layer.name: {at: place for place, at in enumerate(layer.parameters)} for layer in graph.layers}
    return {
        layer.name: (layer.fingerprint, tuple(places[layer.name][at] for at in owned[layer.name]))
        for layer in graph.layers
    }


def describe_layers(graph: LayerGraph, costs: Costs) -> tuple[formats.Layer, ...]:
    """Return the layers' records; a layer like an earlier one names that as what was measured."""
    first: dict[str, str] = {}
    records = []
    for layer in graph.layers:
        original = first.setdefault(layer.fingerprint, layer.name)
        records.append(_layer(layer, costs, None if original == layer.name else original))
    return tuple(records)


def _layer(layer: Layer, costs: Costs, measured_as: str | None) -> formats.Layer:
    update = costs.updates[costs.update_kinds[layer.name]]
    each = tuple(_cost(layer, size, costs) for size in sorted(costs.recordings))
    return layer_record(layer, costs.optimizer, each, update.seconds, update.accumulate_s, measured_as)


def layer_record(
    layer: Layer,
    optimizer: OptimizerMemory,
    costs: tuple[formats.Cost, ...],
    update_s: float,
    accumulate_s: float,
    measured_as: str | None,
) -> formats.Layer:
    """Return the record of a layer from what was measured or estimated of it; ``optimizer`` is by kind."""
    parameters = list(layer.module.parameters())
    buffers = [buffer for name, buffer in layer.module.named_buffers() if name in layer.buffers]
    written = {} if layer.writes is None else {n: b for n, b in _named_buffers(layer) if n in layer.writes.buffers}
    trainable = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    sizes = [cost.micro_batch for cost in costs]
    return formats.Layer(
        name=layer.name,
        modules=layer.modules,
        parameters_bytes=sum(parameter.nbytes for parameter in parameters),
        trainable_bytes=trainable,
        gradient_bytes=trainable,
        optimizer_bytes=optimizer.state[layer.fingerprint],
        buffers_bytes=sum(buffer.nbytes for buffer in buffers),
        update_s=update_s,
        accumulate_s=accumulate_s,
        update_bytes=optimizer.workspace[layer.fingerprint],
        costs=costs,
        forward_fit=fit_line(sizes, [cost.forward_s for cost in costs]),
        backward_fit=fit_line(sizes, [cost.backward_s for cost in costs]),
        measured_as=measured_as,
        writes=layer.writes,
        written_bytes=sum(buffer.nbytes for buffer in written.values()),
        least_samples=layer.least_rows,
        most_samples=layer.most_rows,
    )


def _named_buffers(layer: Layer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a layer by the model's names."""
    return ((name, layer.module.get_buffer(attribute)) for attribute, name in layer.buffers.items())


def _cost(layer: Layer, size: int, costs: Costs) -> formats.Cost:
    timing, found = costs.timings[layer.fingerprint, size], costs.recordings[size]
    return formats.Cost(
        micro_batch=size,
        forward_s=_seconds(timing.forward),
        backward_s=_seconds(timing.backward),
        saved=tuple(
            formats.SavedStorage(storage=name, bytes=count) for name, count in found.saved_bytes[layer.name].items()
        ),
        peak_bytes=costs.peaks[layer.fingerprint, size],
        output_bytes=found.output_bytes[layer.name],
        backward_input_s=_seconds(timing.backward_input) if timing.backward_input else None,
        backward_weight_s=_seconds(timing.backward_weight) if timing.backward_weight else None,
        weight_saved_bytes=costs.pending.get((layer.fingerprint, size)),
        recompute_s=_seconds(timing.recompute),
        forward_launch_s=_launch_s(timing.forward),
        backward_launch_s=_launch_s(timing.backward),
        forward_spread=spread([time.seconds for time in timing.forward]),
        backward_spread=spread([time.seconds for time in timing.backward]),
        repeats=len(timing.forward),
    )


def _seconds(times: Sequence[Time]) -> float:
    return statistics.median(time.seconds for time in times)


def _launch_s(times: Sequence[Time]) -> float | None:
    known = [time.launch_s for time in times if time.launch_s is not None]
    return statistics.median(known) if known else None


def describe_tensors(graph: LayerGraph, costs: Costs | None = None) -> tuple[formats.Tensor, ...]:
    """Return the crossing tensors' and model inputs' records; types and bytes as they were made, where they were."""
    made = {}
    if costs is not None:
        size, found = max(costs.recordings.items(), key=lambda item: item[0])
        made = {name: (dtype, -(-count // size)) for name, (dtype, count) in found.crossing_outputs.items()}
    records = []
    for tensor in graph.tensors:
        dtype, bytes_per_sample = made.get(tensor.name, (tensor.dtype, tensor.bytes_per_sample))
        records.append(
            formats.Tensor(
                name=tensor.name,
                producer=tensor.producer,
                consumers=tensor.consumers,
                bytes_per_sample=bytes_per_sample,
                dtype=str(dtype).removeprefix("torch."),
                gradient=tensor.gradient,
            )
        )
    return tuple(records)


def describe_ties(graph: LayerGraph) -> tuple[formats.TiedParameter, ...]:
    """Return the records of parameters that several layers use."""
    ties = []
    for name, layers in graph.tied_parameters().items():
        parameter = graph.parameter(name)
        ties.append(
            formats.TiedParameter(
                parameter=name, layers=layers, bytes=parameter.nbytes, trainable=parameter.requires_grad
            )
        )
    return tuple(ties)
