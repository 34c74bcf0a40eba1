"""Profile: measure a user's model on this machine, and describe what was measured."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from autopar.capture import Layer, LayerGraph, UserModel, materialize, materialize_random, release, slice_rows
from autopar.capture.model.source import NamedParameters
from autopar.capture.model.state import preserve_buffers
from autopar.errors import UsageError
from autopar.formats import profile as formats
from autopar.options.profile import ProfileOptions
from autopar.profiler import device as devices
from autopar.profiler.device import Computing, Conditions, computing, observe, peak_bytes, pin_threads
from autopar.profiler.flops import pass_flops
from autopar.profiler.layer_runs import (
    OF_A_KIND,
    LayerChain,
    LayerInputs,
    LayerPass,
    Recording,
    compile_layers,
    compiling,
    pending_bytes,
    random_inputs,
    record,
    record_layer,
    rename_storages,
    without_halves,
)
from autopar.profiler.measure import ON_GPU, REPRESENTATIVES, Timing, fit_line, measure, representatives
from autopar.profiler.optimizer import (
    OptimizerMemory,
    UpdateCosts,
    measure_step,
    measure_updates,
    optimizer_memory,
    parameters_at,
)
from autopar.profiler.parts import PartKind, PartMeasurement, part_kinds
from autopar.profiler.subject import Subject, prepare
from autopar.progress import Progress, no_progress
from autopar.ranks.allocator import kept_pages
from autopar.signals import unwinding_aborts


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
    flops: dict[str, int] = field(default_factory=dict)
    """Of a sample's forward and backward, by kind."""
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
    return layer_records(graph, costs.optimizer, each, *once, costs.flops)


def layer_records(
    graph: LayerGraph,
    optimizer: OptimizerMemory,
    costs: Iterable[tuple[formats.Cost, ...]],
    update_s: Iterable[float],
    accumulate_s: Iterable[float],
    flops: Mapping[str, int],
) -> tuple[formats.Layer, ...]:
    """Return the layers' records, given what was measured or estimated of each, in order.

    ``optimizer``, and ``flops`` of a sample, are by kind.

    A layer like an earlier one names that as what was measured.
    """
    first: dict[str, str] = {}
    return tuple(
        _layer(layer, optimizer, each, (once_s, added_s), first.setdefault(layer.fingerprint, layer.name), flops)
        for layer, each, once_s, added_s in zip(graph.layers, costs, update_s, accumulate_s, strict=True)
    )


def _layer(
    layer: Layer,
    optimizer: OptimizerMemory,
    costs: tuple[formats.Cost, ...],
    once_s: tuple[float, float],
    original: str,
    flops: Mapping[str, int],
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
        update_s=once_s[0],
        accumulate_s=once_s[1],
        update_bytes=optimizer.workspace[layer.fingerprint],
        costs=costs,
        forward_fit=fit_line(sizes, [cost.forward_s for cost in costs]),
        backward_fit=fit_line(sizes, [cost.backward_s for cost in costs]),
        flops_per_sample=flops[layer.fingerprint],
        measured_as=None if original == layer.name else original,
        writes=layer.writes,
        written_bytes=sum(written_bytes.values()),
        least_samples=layer.least_rows,
        most_samples=layer.most_rows,
    )


def _cost(layer: Layer, size: int, costs: Costs) -> formats.Cost:
    key, found = (layer.fingerprint, size), costs.recordings[size]
    saved, outputs = found.saved_bytes[layer.name], found.output_bytes[layer.name]
    return costs.timings[key].cost(size, saved, costs.peaks[key], outputs, costs.pending.get(key))


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


MAX_SIZES = 5
SLOW = 1.5
"""Times the budget: layers that take longer are so slow that not all sizes of their parts are measured."""
NO_PARTS = "parts of layers were not measured: ranks of a team do not compile"
NO_ROOM = (
    "parts of layers were not measured: the device has no memory for them beside whole layers; give a smaller batch"
)
# On an idle machine the spread is below this.
BUSY_SPREAD = 0.1


def profile(user: UserModel, options: ProfileOptions, progress: Progress = no_progress) -> formats.Profile:
    """Capture a model, check it against itself, and measure its layers.

    The source is recorded as the user gave it; who writes the profile makes it relative to the file.

    Raises:
        UsageError: the options do not fit the machine or each other.
        ModelError: the model file is broken, or has nothing to train.
        CaptureError: the model cannot be captured.
    """
    devices.choose(options.device)
    return measure_layers(prepare(user, options, progress), options, progress)


@unwinding_aborts()
def measure_layers(subject: Subject, options: ProfileOptions, progress: Progress = no_progress) -> formats.Profile:
    """Measure the layers of a model that is captured.

    Raises:
        UsageError: the device is not there, does not compute in the precision, or has no memory for the batch; or
            layers are to be compiled of a model that is larger than memory.
    """
    device = devices.choose(options.device)
    if options.compile and subject.graph.on_meta:
        raise UsageError(
            f"`compile`: {subject.user.path} is larger than memory, its layers are measured one at a time as they are; "
            "leave the option out"
        )
    context = computing(subject.precision, device)
    # As ranks do, which are timed to the same end.
    pages = kept_pages() if device.type == "cpu" else contextlib.nullcontext()
    with (
        pages,
        pin_threads(options.threads),
        contextlib.redirect_stdout(sys.stderr),
        preserve_buffers(subject.module),
    ):
        _move(subject.module, subject.graph, device)
        before = observe(device)
        with compiling(device) if options.compile else contextlib.nullcontext(), _report_out_of_memory(options.batch):
            survey = _ModelMeasurement(subject, options, device, context, progress)
            costs = survey.costs()
        after = observe(device)
        sample_times = subject.sample_times(options.batch)
        overhead_s = options.batch * sum(sample_times.values()) + _zeroing_s(subject)
    progress("analysing how teams divide layers", 0.0)
    layers = describe_layers(subject.graph, costs)
    if device.type == "cuda":
        overhead_s = max(0.0, overhead_s - _waiting_s(layers))
    noise, notes = _noise(layers, before, after, "warm" if subject.graph.on_meta else "cold")
    return subject.record(
        options.batch,
        device=devices.describe(device, options.threads),
        compiled=options.compile,
        layers=layers,
        parts=survey.parts.found,
        tensors=describe_tensors(subject.graph, costs.crossing_tensors()),
        updates_at_once=costs.optimizer.at_once,
        noise=noise,
        step_overhead_s=overhead_s,
        **sample_times,
        notes=(*subject.notes, *survey.notes, *survey.parts.notes, *notes),
    )


@contextlib.contextmanager
def _report_out_of_memory(batch: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"`batch={batch}`: a forward and backward of so many samples needs more memory than the device has; "
            "give less, the planner extends the times that are measured to larger micro-batches"
        ) from error


def _move(module: nn.Module, graph: LayerGraph, device: torch.device) -> None:
    if device.type != "cpu" and graph.on_meta:
        for part in module.modules():
            # What is read of modules that belong to no layer; layers take theirs along.
            part._buffers.update({name: value.to(device) for name, value in part._buffers.items() if value is not None})
    elif device.type != "cpu":
        module.to(device)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for layer in graph.layers:
            materialize(layer, tensors, device)


class _ModelMeasurement:
    """Everything that is measured of one model."""

    def __init__(
        self, subject: Subject, options: ProfileOptions, device: torch.device, context: Computing, progress: Progress
    ) -> None:
        self._subject, self._graph, self._options = subject, subject.graph, options
        self._device, self._context, self._progress = device, context, progress
        self._running = compile_layers(subject.graph) if options.compile else subject.graph
        self._most = OF_A_KIND if options.compile else ON_GPU if device.type == "cuda" else REPRESENTATIVES
        # The backward of a compiled layer is one operator, which nothing splits.
        self._splits = not options.compile
        self.notes: list[str] = []
        self._firsts: dict[str, Layer] = {}
        for layer in subject.graph.layers:
            self._firsts.setdefault(layer.fingerprint, layer)
        self._costs = Costs(crossing={tensor.name for tensor in subject.graph.tensors})
        self._costs.update_kinds = update_kinds(subject.graph)
        places = {name: kind[1] for name, kind in self._costs.update_kinds.items()}
        self._kinds = part_kinds(subject.graph, subject.survey, 1 if options.compile else options.tensor)
        self.parts = PartMeasurement(subject.user, subject.graph.outputs, self._costs.crossing, places, device, context)
        self._inputs: dict[tuple[str, int], LayerInputs] = {}
        """What layers of which parts are measured read, by kind and micro-batch size."""
        if options.compile and options.tensor > 1:
            self.notes.append(NO_PARTS)

    def costs(self) -> Costs:
        """Measure every kind of layer at every size."""
        began_s = time.perf_counter()
        batch = {name: tensor.to(self._device) for name, tensor in self._subject.batch(self._options.batch).items()}
        if self._graph.on_meta:
            self._one_at_a_time(batch)
        else:
            chain = self._chain(representatives(self._running.layers, self._most))
            given = self._record_sizes(chain, batch)
            timings = measure(chain, given, self._options.budget_s, self._progress, self._splits)
            self._costs.timings |= timings
            self._subject.module.zero_grad(set_to_none=True)
            self._measure_updates(self._graph.layers)
            self._measure_parts(self._kinds, self._options.budget_s, began_s, self._progress)
        kinds = {kind: layer.named_parameters() for kind, layer in self._firsts.items()}
        self._costs.optimizer = optimizer_memory(self._subject.user, kinds, self._device)
        return self._costs

    def _chain(self, layers: Sequence[Layer]) -> LayerChain:
        return LayerChain(layers, self._graph.outputs, self._context, self._device)

    def _record_sizes(self, chain: LayerChain, batch: Mapping[str, torch.Tensor]) -> dict[int, LayerInputs]:
        """Run every size once for what it keeps; return what the chain is given at every size."""
        given: dict[int, LayerInputs] = {}
        sizes = self._sizes()
        for number, size in enumerate(sizes):
            what, share = f"recording layers: micro-batches of {size}", number / len(sizes)
            self._progress(what, share)
            rows = {name: tensor.clone() for name, tensor in slice_rows(batch, 0, size).items()}
            started = time.perf_counter()
            found = record(self._running, rows, self._costs.crossing, self._context)
            forward_s = time.perf_counter() - started
            self._costs.recordings[size] = found
            given[size] = _missing(chain, found, size)
            for at, layer in enumerate(self._firsts.values()):
                self._progress(f"{what}, {layer.name}", share + at / len(self._firsts) / len(sizes))
                self._measure_bytes(layer, found.inputs[layer.name])
            self._keep_inputs({kind: found.inputs[layer.name] for kind, layer in self._firsts.items()}, size)
            found.inputs.clear()
            if self._enough(len(given), forward_s):
                break
        return given

    def _sizes(self) -> list[int]:
        """Return the micro-batch sizes to measure, of those that all layers take."""
        layers = self._graph.layers
        most = min((layer.most_rows for layer in layers if layer.most_rows is not None), default=self._options.batch)
        least = max(layers, key=lambda layer: layer.least_rows)
        if self._options.batch < least.least_rows:
            raise UsageError(
                f"`batch={self._options.batch}`: layer {least.name} takes at least {least.least_rows} samples at once"
            )
        return sizes_up_to(min(self._options.batch, most), least.least_rows)

    def _enough(self, sizes: int, forward_s: float) -> bool:
        """Tell whether larger sizes are left to the line that three make: a few steps would outlast all patience."""
        return sizes >= 3 and 3 * forward_s > self._options.budget_s

    def _measure_bytes(self, layer: Layer, inputs: LayerInputs) -> None:
        """Measure the peak of a layer that is not compiled, for what counts storages sees only operators; and what it
        holds between the halves of its backward.
        """
        for parameter in layer.module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        work = LayerPass(layer, inputs, self._graph.outputs, self._context)
        if layer.fingerprint not in self._costs.flops:
            self._costs.flops[layer.fingerprint] = pass_flops(work) // inputs.rows
            work = LayerPass(layer, inputs, self._graph.outputs, self._context)
        self._costs.peaks[layer.fingerprint, inputs.rows] = peak_bytes(work.whole, self._device)
        layer.module.zero_grad(set_to_none=True)
        if not self._splits:
            return
        pending = pending_bytes(layer, inputs, self._graph, self._context)
        if pending is None:
            self._splits = False
            self.notes.append(without_halves(layer.name))
            layer.module.zero_grad(set_to_none=True)
        else:
            self._costs.pending[layer.fingerprint, inputs.rows] = pending

    def _measure_updates(self, layers: Sequence[Layer]) -> None:
        self._progress("measuring the optimizer", 0.0)
        turns: dict[tuple[str, tuple[int, ...]], list[NamedParameters]] = {}
        for layer in layers:
            kind = self._costs.update_kinds[layer.name]
            same = turns.setdefault(kind, [])
            if len(same) < REPRESENTATIVES:
                same.append(parameters_at(layer, kind[1]))
        groups = [(kind, parameters) for kind, same in turns.items() for parameters in same]
        self._costs.updates |= measure_updates(self._subject.user, groups, self._device)
        if self._device.type == "cuda":
            self._measure_wait(layers)

    def _measure_wait(self, layers: Sequence[Layer]) -> None:
        """Measure how long a GPU waits for the host to launch the optimizer's step: so much more for every tensor."""
        costs = self._costs
        kinds = [costs.update_kinds[layer.name] for layer in layers]
        parameters = [
            each for layer, (_, places) in zip(layers, kinds, strict=True) for each in parameters_at(layer, places)
        ]
        step_s = measure_step(self._subject.user, parameters, self._device) if parameters else None
        if step_s is not None:
            late_s = step_s - sum(costs.updates[kind].seconds for kind in kinds)
            self.parts.update_wait_s = wait_s = max(0.0, late_s) / len(parameters)
            costs.updates = {kind: each.later(wait_s * len(kind[1])) for kind, each in costs.updates.items()}

    def _keep_inputs(self, inputs: Mapping[str, LayerInputs], size: int) -> None:
        """Keep what layers read of which parts are measured."""
        divided = {kind.layer.fingerprint for kind in self._kinds}
        self._inputs |= {(name, size): each for name, each in inputs.items() if name in divided}

    def _measure_parts(self, kinds: Sequence[PartKind], budget_s: float, began_s: float, progress: Progress) -> None:
        """Measure parts of layers, which began at a moment, in half their time; of slow ones, at two sizes.

        These are the least and a middle one: whoever trains in teams has several micro-batches of a mini-batch.
        """
        if self._inputs and time.perf_counter() - began_s > SLOW * budget_s:
            sizes = sorted({size for _, size in self._inputs})
            some = {sizes[0], sizes[-2:][0]}
            self._inputs = {key: each for key, each in self._inputs.items() if key[1] in some}
        try:
            self.parts.measure(kinds, self._inputs, budget_s / 2, progress, self._splits)
        except torch.OutOfMemoryError:
            self.notes += [] if NO_ROOM in self.notes else [NO_ROOM]
        finally:
            self._inputs.clear()

    def _one_at_a_time(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Measure a model that is larger than memory: no two of its layers have weights at the same time."""
        budget_s = self._options.budget_s / len(self._firsts)
        for number, (kind, layer) in enumerate(self._firsts.items()):
            what = f"measuring layers one at a time: {layer.name}"

            def progress(_: str, share: float, what: str = what, number: int = number) -> None:
                self._progress(what, (number + share) / len(self._firsts))

            progress("", 0.0)
            began_s = time.perf_counter()
            same = [other for other in self._graph.layers if other.fingerprint == kind]
            # Times and bytes depend on shapes; values only have to stay finite.
            materialize_random(layer, device=self._device)
            try:
                given = self._record_kind(layer, same, batch)
                self._costs.timings |= measure(self._chain([layer]), given, budget_s, progress, self._splits)
                for places in {self._costs.update_kinds[other.name][1] for other in same}:
                    groups = [((kind, places), parameters_at(layer, places))]
                    self._costs.updates |= measure_updates(self._subject.user, groups, self._device)
                for size, each in given.items():
                    self._keep_inputs({kind: each}, size)
                parts = [part.on(layer) for part in self._kinds if part.layer.fingerprint == kind]
                self._measure_parts(parts, budget_s, began_s, progress)
            finally:
                release(layer)

    def _record_kind(
        self, layer: Layer, same: Sequence[Layer], batch: Mapping[str, torch.Tensor]
    ) -> dict[int, LayerInputs]:
        given: dict[int, LayerInputs] = {}
        known = self._costs.recordings
        for size in sorted(known) or self._sizes():
            found = known.setdefault(size, Recording())
            made = {name: dtype for name, (dtype, _) in found.crossing_outputs.items()}
            given[size] = random_inputs(self._graph, layer, batch, made, size)
            started = time.perf_counter()
            record_layer(layer, given[size], self._graph.outputs, self._costs.crossing, self._context, found)
            forward_s = time.perf_counter() - started
            for other in same:
                names = zip(layer.outputs, other.outputs, strict=True)
                found.saved_bytes[other.name] = rename_storages(found.saved_bytes[layer.name], layer, other)
                found.output_bytes[other.name] = found.output_bytes[layer.name]
                outputs = found.crossing_outputs
                outputs |= {name: outputs[first] for first, name in names if first in outputs}
            self._measure_bytes(layer, given[size])
            if self._enough(len(given), forward_s):
                break
        # All layers have the same sizes: those that no kind was too slow for.
        for size in known.keys() - given.keys():
            del known[size]
        return given


def _missing(chain: LayerChain, recording: Recording, size: int) -> LayerInputs:
    names = set(chain.missing())
    inputs = {name: recording.inputs[layer.name] for layer in chain.layers for name in layer.inputs if name in names}
    return LayerInputs(
        size,
        {name: each.tensors[name] for name, each in inputs.items()},
        {name: each.gradient[name] for name, each in inputs.items()},
    )


def _noise(
    layers: tuple[formats.Layer, ...], before: Conditions, after: Conditions, caches: Literal["warm", "cold"]
) -> tuple[formats.Noise, list[str]]:
    """Return how steady the measurements were, and what to say where they were not."""
    spreads = {
        (layer.name, cost.micro_batch): max(cost.forward_spread, cost.backward_spread)
        for layer in layers
        if layer.measured_as is None
        for cost in layer.costs
    }
    every = [s for layer in layers for cost in layer.costs for s in (cost.forward_spread, cost.backward_spread)]
    noise = formats.Noise(
        median_spread=statistics.median(every),
        max_spread=max(every),
        caches=caches,
        clock_hz=tuple(each.clock_hz for each in (before, after) if each.clock_hz is not None),
        throttled=after.throttled_since(before),
    )
    notes = []
    if noise.median_spread > BUSY_SPREAD:
        (worst, size), most = max(spreads.items(), key=lambda item: item[1])
        notes.append(
            f"times of the same layer spread by {noise.median_spread:.0%} of their median, those of {worst} at "
            f"micro-batch {size} by {most:.0%}: other work ran on this machine, or its clock changed"
        )
    if noise.throttled is not None:
        notes.append(f"the device slowed its clock while it was measured: {noise.throttled}")
    return noise, notes


def sizes_up_to(batch: int, least: int = 1) -> list[int]:
    """Return at most five micro-batch sizes, spread evenly: powers of two from the least up, and the batch.

    >>> sizes_up_to(64), sizes_up_to(6), sizes_up_to(1), sizes_up_to(8, least=2)
    ([1, 4, 8, 16, 64], [1, 2, 4, 6], [1], [2, 4, 8])
    """
    powers = (2**exponent for exponent in range((batch - 1).bit_length()))
    sizes = sorted({least, *(size for size in powers if size > least), batch})
    if len(sizes) <= MAX_SIZES:
        return sizes
    return [sizes[round(index * (len(sizes) - 1) / (MAX_SIZES - 1))] for index in range(MAX_SIZES)]


def _waiting_s(layers: Sequence[formats.Layer]) -> float:
    """Return how long the host has nothing to launch while a GPU computes a mini-batch; it loads the next then.

    Where several devices share the work, each has less of it; what the loading takes beyond that is not known here.
    """
    largest = [layer.costs[-1] for layer in layers]
    kernels_s = sum(each.forward_s + each.backward_s for each in largest)
    return max(
        0.0, kernels_s - sum((each.forward_launch_s or 0.0) + (each.backward_launch_s or 0.0) for each in largest)
    )


def _zeroing_s(subject: Subject) -> float:
    """Return the seconds of forgetting gradients."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        subject.module.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
