"""From measurements to the records of a profile."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
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

    def crossing_tensors(self) -> dict[str, tuple[torch.dtype, int]]:
        """Return type and bytes per sample, as they were made, of the crossing tensors."""
        size = max(self.recordings)
        made = self.recordings[size].crossing_outputs
        return {name: (dtype, -(-count // size)) for name, (dtype, count) in made.items()}


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
    return {
        layer.name: (layer.fingerprint, tuple(map(list(layer.parameters).index, owned[layer.name])))
        for layer in graph.layers
    }


def describe_layers(graph: LayerGraph, costs: Costs) -> tuple[formats.Layer, ...]:
    """Return the layers' records of what was measured."""
    sizes = sorted(costs.recordings)
    each = (tuple(_cost(layer, size, costs) for size in sizes) for layer in graph.layers)
    updates = [costs.updates[costs.update_kinds[layer.name]] for layer in graph.layers]
    once = [update.seconds for update in updates], [update.accumulate_s for update in updates]
    return layer_records(graph, costs.optimizer, each, *once)


def layer_records(
    graph: LayerGraph,
    optimizer: OptimizerMemory,
    costs: Iterable[tuple[formats.Cost, ...]],
    update_s: Iterable[float],
    accumulate_s: Iterable[float],
) -> tuple[formats.Layer, ...]:
    """Return the layers' records, given what was measured or estimated of each, in order; ``optimizer`` is by kind.

    A layer like an earlier one names that as what was measured.
    """
    first: dict[str, str] = {}
    return tuple(
        _layer(layer, optimizer, each, once_s, added_s, first.setdefault(layer.fingerprint, layer.name))
        for layer, each, once_s, added_s in zip(graph.layers, costs, update_s, accumulate_s, strict=True)
    )


def _layer(
    layer: Layer,
    optimizer: OptimizerMemory,
    costs: tuple[formats.Cost, ...],
    update_s: float,
    accumulate_s: float,
    original: str,
) -> formats.Layer:
    parameters = list(layer.module.parameters())
    buffers = [buffer for name, buffer in layer.module.named_buffers() if name in layer.buffers]
    written = () if layer.writes is None else layer.writes.buffers
    written_bytes = {n: layer.module.get_buffer(at).nbytes for at, n in layer.buffers.items() if n in written}
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
        measured_as=None if original == layer.name else original,
        writes=layer.writes,
        written_bytes=sum(written_bytes.values()),
        least_samples=layer.least_rows,
        most_samples=layer.most_rows,
    )


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


def describe_tensors(
    graph: LayerGraph, types: Mapping[str, tuple[torch.dtype, int]] | None = None
) -> tuple[formats.Tensor, ...]:
    """Return the crossing tensors' and model inputs' records; ``types`` gives types and bytes per sample, if any."""
    types = types or {}
    records = []
    for tensor in graph.tensors:
        dtype, bytes_per_sample = types.get(tensor.name, (tensor.dtype, tensor.bytes_per_sample))
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
    parameters = ((name, layers, graph.parameter(name)) for name, layers in graph.tied_parameters().items())
    return tuple(
        formats.TiedParameter(parameter=name, layers=layers, bytes=each.nbytes, trainable=each.requires_grad)
        for name, layers, each in parameters
    )
