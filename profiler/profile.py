"""Profile: measure a user's model on this machine."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from autopar.capture import LayerGraph, UserModel, materialize, named_tensors, slice_rows
from autopar.capture.export import unchanged
from autopar.formats import profile as formats
from autopar.profiler import device as devices
from autopar.profiler.costs import Costs, describe_layers, describe_tensors, describe_ties
from autopar.profiler.measure import measure, representatives
from autopar.profiler.options import ProfileOptions, Progress
from autopar.profiler.passes import Inputs, LayerPass, record
from autopar.profiler.peak import peak_bytes
from autopar.profiler.subject import prepare
from autopar.profiler.update import measure_update

__all__ = ["profile"]

MAX_SIZES = 5
# On an idle machine the spread is below a tenth.
BUSY_SPREAD = 0.25


def profile(user: UserModel, options: ProfileOptions, progress: Progress = lambda what, share: None) -> formats.Profile:
    """Capture a model, check it against itself, and measure its layers.

    The source is recorded as the user gave it; who writes the profile makes it relative to the file.

    Raises:
        UsageError: the options do not fit the machine or each other.
        ModelError: the model file is broken, or has nothing to train.
        CaptureError: the model cannot be captured.
    """
    device = devices.choose(options.device)
    with _threads(options.threads), contextlib.redirect_stdout(sys.stderr):
        subject = prepare(user, options, progress)
        graph, module, notes = subject.graph, subject.module, list(subject.notes)
        with unchanged(module):
            costs = _measure(user, _on_device(module, graph, device), module, options, device, progress)
            overhead = _overhead(user, module, options.batch)
    layers = describe_layers(graph, costs)
    spreads = [s for layer in layers for cost in layer.costs for s in (cost.forward_spread, cost.backward_spread)]
    noise = formats.Noise(median_spread=statistics.median(spreads), max_spread=max(spreads))
    if noise.median_spread > BUSY_SPREAD:
        share = f"{noise.median_spread:.0%}"
        notes.append(f"times of the same layer spread by {share} of their median: other work ran on this machine")
    return formats.Profile(
        model=formats.ModelSource(source=user.spec, sha256=user.sha256),
        batch=options.batch,
        device=devices.describe(device, options.threads),
        precision=subject.precision,
        layers=layers,
        tensors=describe_tensors(graph),
        tied=describe_ties(graph),
        noise=noise,
        step_overhead_s=overhead,
        notes=tuple(notes),
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _on_device(module: nn.Module, graph: LayerGraph, device: torch.device) -> LayerGraph:
    if device.type != "cpu":
        module.to(device)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for layer in graph.layers:
            materialize(layer, tensors, device)
    return graph


def _measure(
    model: UserModel,
    graph: LayerGraph,
    module: nn.Module,
    options: ProfileOptions,
    device: torch.device,
    progress: Progress,
) -> Costs:
    """Measure every kind of layer at every size."""
    dataset = model.dataset()
    batch = named_tensors(model.load_batch(dataset, range(options.batch)))
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    costs = Costs(crossing={tensor.name for tensor in graph.tensors})
    chosen = representatives(graph.layers)
    firsts = {layer.fingerprint: layer for layer in reversed(graph.layers)}
    inputs: dict[int, dict[str, Inputs]] = {}
    for size in _sizes(options.batch):
        progress(f"recording micro-batches of {size}", 0.0)
        started = time.perf_counter()
        rows = {name: tensor.clone() for name, tensor in slice_rows(batch, 0, size).items()}
        found, costs.saved[size], costs.outputs[size] = record(graph, rows, costs.crossing)
        for fingerprint, layer in firsts.items():
            work = LayerPass(layer, found[layer.name], graph.outputs)
            _zero_gradients(layer.module)
            costs.peaks[fingerprint, size] = peak_bytes(work.whole, device)
        inputs[size] = {layer.name: found[layer.name] for layer in chosen}
        # Larger sizes are left to extrapolation where one round of them would eat most of the budget.
        if len(inputs) >= 3 and 4 * (time.perf_counter() - started) > options.budget_s:
            break
    for layer in chosen:
        _zero_gradients(layer.module)
    costs.timings = measure(chosen, inputs, graph.outputs, device, options.budget_s, progress)
    for fingerprint, layer in firsts.items():
        progress("measuring the optimizer", 0.0)
        costs.updates[fingerprint] = measure_update(model, layer, device)
    module.zero_grad(set_to_none=True)
    return costs


def _zero_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def _sizes(batch: int) -> list[int]:
    """Return at most five micro-batch sizes: powers of two from 1 up, spread evenly.

    >>> _sizes(64), _sizes(6), _sizes(1)
    ([1, 4, 8, 16, 64], [1, 2, 4], [1])
    """
    powers = [2**exponent for exponent in range(batch.bit_length())]
    if len(powers) <= MAX_SIZES:
        return powers
    return [powers[round(index * (len(powers) - 1) / (MAX_SIZES - 1))] for index in range(MAX_SIZES)]


def _overhead(model: UserModel, module: nn.Module, batch: int) -> float:
    """Return the seconds of a step that belong to no layer: loading the mini-batch, forgetting gradients."""
    dataset = model.dataset()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        named_tensors(model.load_batch(dataset, range(batch)))
        module.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
