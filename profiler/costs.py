"""From measurements to the records of a profile."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from autopar.capture import Layer, LayerGraph
from autopar.formats import profile as formats
from autopar.profiler.measure import Timing, spread

__all__ = ["Costs", "describe_layers", "describe_tensors", "describe_ties"]


@dataclass
class Costs:
    """Everything measured. Times, peaks and updates are by fingerprint, for identical layers share them."""

    crossing: set[str]
    timings: dict[tuple[str, int], Timing] = field(default_factory=dict)
    """By fingerprint and micro-batch size."""
    peaks: dict[tuple[str, int], int] = field(default_factory=dict)
    saved: dict[int, dict[str, dict[str, int]]] = field(default_factory=dict)
    """By micro-batch size, layer and storage."""
    outputs: dict[int, dict[str, int]] = field(default_factory=dict)
    updates: dict[str, tuple[int, float]] = field(default_factory=dict)
    """State bytes and seconds by fingerprint."""


def describe_layers(graph: LayerGraph, costs: Costs) -> tuple[formats.Layer, ...]:
    """Return the layers' records; a layer like an earlier one names that as what was measured."""
    first: dict[str, str] = {}
    records = []
    for layer in graph.layers:
        original = first.setdefault(layer.fingerprint, layer.name)
        records.append(_layer(layer, costs, None if original == layer.name else original))
    return tuple(records)


def _layer(layer: Layer, costs: Costs, measured_as: str | None) -> formats.Layer:
    parameters = list(layer.module.parameters())
    names = set(layer.buffers)
    buffers = [buffer for name, buffer in layer.module.named_buffers() if name in names]
    trainable = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    optimizer_bytes, update_s = costs.updates[layer.fingerprint]
    return formats.Layer(
        name=layer.name,
        modules=layer.modules,
        parameters_bytes=sum(parameter.nbytes for parameter in parameters),
        trainable_bytes=trainable,
        gradient_bytes=trainable,
        optimizer_bytes=optimizer_bytes,
        buffers_bytes=sum(buffer.nbytes for buffer in buffers),
        update_s=update_s,
        costs=tuple(_cost(layer, size, costs) for size in sorted(costs.saved)),
        measured_as=measured_as,
    )


def _cost(layer: Layer, size: int, costs: Costs) -> formats.Cost:
    timing = costs.timings[layer.fingerprint, size]
    saved = costs.saved[size][layer.name]
    return formats.Cost(
        micro_batch=size,
        forward_s=statistics.median(timing.forward),
        backward_s=statistics.median(timing.backward),
        saved=tuple(formats.Saved(storage=name, bytes=count) for name, count in saved.items()),
        peak_bytes=costs.peaks[layer.fingerprint, size],
        output_bytes=costs.outputs[size][layer.name],
        forward_spread=spread(timing.forward),
        backward_spread=spread(timing.backward),
        repeats=len(timing.forward),
    )


def describe_tensors(graph: LayerGraph) -> tuple[formats.Tensor, ...]:
    """Return the crossing tensors' and model inputs' records."""
    return tuple(
        formats.Tensor(
            name=tensor.name,
            producer=tensor.producer,
            consumers=tensor.consumers,
            bytes_per_sample=tensor.bytes_per_sample,
            dtype=str(tensor.dtype).removeprefix("torch."),
            gradient=tensor.gradient,
        )
        for tensor in graph.tensors
    )


def describe_ties(graph: LayerGraph) -> tuple[formats.Tied, ...]:
    """Return the records of parameters that several layers use."""
    ties = []
    for name, layers in graph.tied().items():
        parameter = graph.parameter(name)
        ties.append(
            formats.Tied(parameter=name, layers=layers, bytes=parameter.nbytes, trainable=parameter.requires_grad)
        )
    return tuple(ties)
