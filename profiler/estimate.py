"""Estimate: a profile for a GPU that is not there.

One layer of every kind runs on fake tensors, as a GPU would run it. Its kernels, what it keeps and what it needs at
once become times and bytes by the GPU's data sheet.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture import Layer, LayerGraph
from autopar.capture.graph import TensorSpec
from autopar.capture.model.operations import OperationCount
from autopar.capture.model.source import NamedParameters
from autopar.capture.split.analysis import analyse
from autopar.capture.split.rewrite import LayerPart
from autopar.errors import AutoparError, CaptureError, UsageError, first_line
from autopar.formats import profile as formats
from autopar.formats.profile import PartSum, Precision
from autopar.hardware.gpus import Gpu
from autopar.hardware.rates import rates_of
from autopar.profiler.device import COMMUNICATORS_BYTES, Computing, peak_bytes
from autopar.profiler.flops import flops_of
from autopar.profiler.kernels import Constants, Kernel, KernelLog, KernelTable, Numbers, as_on_cuda, seconds
from autopar.profiler.layer_runs import LayerInputs, LayerPass, SavedStorages, pending_bytes, without_halves
from autopar.profiler.optimizer import (
    OptimizerMemory,
    UpdateCosts,
    memory_of,
    moved_per_number,
    optimizer_memory,
    parameters_at,
)
from autopar.profiler.parts import LonePart, PartKind, exchanges_of, lone_part, part_kinds, part_record, without_part
from autopar.profiler.profile import describe_tensors, layer_records, owned_parameters, sizes_up_to, update_kinds
from autopar.profiler.subject import PartKey, Subject
from autopar.progress import Progress, no_progress
from autopar.signals import unwinding_aborts


@dataclass(frozen=True)
class LayerWork:
    """One layer at one micro-batch size. What it keeps is named by its place: ``input 0``, ``output 1``, ``own#2``."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    backward_input: tuple[Kernel, ...]
    """What makes the gradients of the inputs alone."""
    accumulate: tuple[Kernel, ...]
    """What adding to gradients that are there takes beyond ``backward``."""
    saved_bytes: Mapping[str, int]
    peak_bytes: int
    pending_bytes: int | None
    """What it holds between the halves of its backward; None: it has none."""
    outputs: tuple[tuple[torch.dtype, bool, int], ...]
    """Of every output: type, whether a gradient flows back over it, bytes."""
    flops: int
    """Of forward and backward."""
    sums: tuple[PartSum, ...] = ()
    """What a part would exchange with others."""


@dataclass(frozen=True)
class GraphWork:
    """All layers at one micro-batch size."""

    layers: tuple[LayerWork, ...]
    """In order; layers that compute the same share one."""
    types: Mapping[str, tuple[torch.dtype, bool]]
    """Of every tensor that a layer reads or gives, and whether a gradient flows back over it.

    Autocast decides the types of those between layers, so they can differ from the captured ones.
    """


def graph_work(graph: LayerGraph, rows: int, gpu: Gpu, precision: Precision) -> GraphWork:
    """Run one layer of every kind forward and backward on fake tensors, as a GPU would; nothing is computed.

    Parameters may be real, fake or on meta; they are left alone.

    Raises:
        CaptureError: a layer needs the values of its tensors to run.
    """
    specs = {tensor.name: tensor for tensor in graph.tensors}
    types = {name: (spec.dtype, False) for name, spec in specs.items() if spec.producer is None}
    computing = as_on_cuda(gpu, precision)
    known: dict[tuple[object, ...], LayerWork] = {}
    found = []
    for layer in graph.layers:
        given = tuple(types[name] for name in layer.inputs)
        key = (layer.fingerprint, given)
        if key not in known:
            known[key] = _run(layer, {name: specs[name] for name in layer.inputs}, types, rows, graph, computing)
        work = known[key]
        found.append(work)
        types.update({name: made[:2] for name, made in zip(layer.outputs, work.outputs, strict=True)})
    return GraphWork(tuple(found), types)


def part_work(
    kind: PartKind, lone: LonePart, graph: LayerGraph, whole: GraphWork, rows: int, gpu: Gpu, precision: Precision
) -> LayerWork:
    """Run a part of a layer as :func:`graph_work` does whole ones, which have told the types of tensors.

    Raises:
        CaptureError: the part needs the values of its tensors to run.
    """
    specs = {name: graph.tensor(name) for name in lone.layer.inputs}
    specs |= {name: specs[name].slice(dim, kind.count) for name, dim in kind.sequence.items() if name in specs}
    return _run(lone.layer, specs, whole.types, rows, graph, as_on_cuda(gpu, precision), lone)


def _run(
    layer: Layer,
    specs: Mapping[str, TensorSpec],
    types: Mapping[str, tuple[torch.dtype, bool]],
    rows: int,
    graph: LayerGraph,
    computing: Computing,
    lone: LonePart | None = None,
) -> LayerWork:
    # A module that the user lists, or that runs the forward of the whole model, reads tensors that are not its own.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faked = _fake_layer(layer, mode, () if lone is None else (lone.sums,))
    with mode:
        tensors = {name: torch.empty(spec.shape(rows), dtype=types[name][0]) for name, spec in specs.items()}
    inputs = LayerInputs(rows, tensors, {name: types[name][1] for name in specs})
    try:
        with mode:
            return _record(faked, inputs, graph, computing, lone and lone._replace(layer=faked))
    except AutoparError:
        raise
    except Exception as error:
        raise CaptureError(
            f"layer {layer.name}: cannot be estimated without its tensors' values ({first_line(error)[:160]}); "
            "profile it on a device that is there"
        ) from error


def _record(
    layer: Layer, inputs: LayerInputs, graph: LayerGraph, computing: Computing, lone: LonePart | None = None
) -> LayerWork:
    loss, trained = graph.outputs, [parameter for parameter in layer.module.parameters() if parameter.requires_grad]
    work = LayerPass(layer, inputs, loss, computing)
    storages = SavedStorages("own", (*layer.module.parameters(), *layer.module.buffers()))
    with OperationCount() as forth, KernelLog() as forward, storages.recording():
        work.forward()
    tensors = list(work.outputs.values())
    outputs = tuple((tensor.dtype, tensor.requires_grad, tensor.nbytes) for tensor in tensors)
    saved = storages.bytes_by_name(
        {f"input {index}": tensor for index, tensor in enumerate(work.inputs.values())},
        {f"output {index}": tensor for index, tensor in enumerate(tensors) if layer.outputs[index] not in loss},
    )
    with OperationCount() as back:
        backward = _backward_kernels(work)
    del work, tensors, storages
    adding = _adding_kernels(trained)
    peak = peak_bytes(LayerPass(layer, inputs, loss, computing).whole, torch.device("cpu"))
    sums, pending = (
        exchanges_of(lone, inputs, loss, computing) if lone else ((), pending_bytes(layer, inputs, graph, computing))
    )
    for parameter in trained:
        parameter.requires_grad_(False)
    half = LayerPass(layer, inputs, loss, computing)
    half.forward()
    return LayerWork(
        forward=tuple(forward.kernels),
        backward=backward,
        backward_input=_backward_kernels(half),
        accumulate=adding,
        saved_bytes=saved,
        peak_bytes=peak,
        pending_bytes=pending,
        outputs=outputs,
        flops=flops_of(forth, back),
        sums=sums,
    )


def _adding_kernels(trained: Sequence[nn.Parameter]) -> tuple[Kernel, ...]:
    """Return what adding gradients to those that are there launches."""
    gradients = [torch.zeros_like(parameter) for parameter in trained]
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = torch.zeros_like(gradient)
    with KernelLog() as adding:
        torch.autograd.backward(trained, gradients)
    return tuple(adding.kernels)


def _backward_kernels(work: LayerPass) -> tuple[Kernel, ...]:
    """Run the backward of a pass that has run forward; return what it launches."""
    work.prepare_backward()
    with KernelLog() as log:
        work.backward()
    return tuple(log.kernels)


def _fake_layer(layer: Layer, mode: FakeTensorMode, shared: Iterable[object] = ()) -> Layer:
    """Return a copy of a layer that holds fake tensors for all its parameters, buffers and constants.

    Objects that are ``shared`` it has as they are.
    """
    module = layer.module
    constants = [each for part in module.modules() for each in vars(part).values() if isinstance(each, torch.Tensor)]
    tensors = [*module.parameters(), *module.buffers(), *constants]
    memo: dict[int, object] = {id(each): each for each in shared}
    memo |= {id(tensor): _fake(tensor, mode) for tensor in tensors}
    return replace(layer, module=copy.deepcopy(module, memo))


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


READ = 16
"""How many samples are read to know what one takes."""
CONTEXT_BYTES = 400_000_000
"""CUDA's context, kernels loaded (0.3 to 0.4 GB: pytorch#20532, #107667)."""
WORKSPACE_BYTES = 2 * 32 * 2**20
"""cuBLAS's, of the thread that goes forward and of the one that goes back: 32 MiB each on an H100."""
RESERVED_BYTES = CONTEXT_BYTES + WORKSPACE_BYTES + COMMUNICATORS_BYTES


@dataclass(frozen=True, eq=False)
class PartWorks:
    """The largest part of a kind of layers."""

    kind: PartKind
    part: LayerPart
    works: tuple[LayerWork, ...]
    """By micro-batch size."""
    optimizer: tuple[int, int]
    """Bytes of the optimizer's state, and of what its step holds for a while."""
    updated_bytes: Numbers
    """What the optimizer's step reads and writes, by layer of the kind."""


class TeamShape(NamedTuple):
    """The ranks that run a layer together."""

    ranks: int = 1
    sliced: bool = False
    """Whether tensors between layers are in slices, as far as layers can."""


@dataclass(frozen=True)
class Workload:
    """All that a model asks of a GPU: independent of the constants, so found once for any number of them."""

    gpu: Gpu
    sizes: tuple[int, ...]
    works: tuple[GraphWork, ...]
    """By micro-batch size."""
    optimizer: OptimizerMemory
    """By fingerprint."""
    updated_bytes: Numbers
    """What the optimizer's step reads and writes, by layer."""
    table: KernelTable
    """Four groups for every different work: forward, backward, its half for the inputs, and adding to gradients."""
    places: npt.NDArray[np.int64]
    """Index of a layer's work, by size and layer."""
    parts: tuple[PartWorks, ...]
    """Of layers on ranks of teams, if they were asked for; their groups of kernels follow the layers'."""
    names: tuple[str, ...]
    """Of the layers."""
    notes: tuple[str, ...] = ()
    """Which parts are not among them."""

    @cached_property
    def in_teams(self) -> Mapping[PartKey, tuple[npt.NDArray[np.int64], float]]:
        """Places of parts' works, by size, and what the optimizer's step reads and writes of them."""
        first, found = int(self.places.max()) + 1, {}
        for part in self.parts:
            kind, places = part.kind, np.arange(first, first + len(part.works))
            for layer, updated_bytes in zip(kind.layers, part.updated_bytes.tolist(), strict=True):
                found[PartKey(layer.name, kind.count, bool(kind.sequence))] = places, updated_bytes
            first += len(part.works)
        return found


@dataclass(frozen=True)
class LayerSeconds:
    """Times of kernels and of launches by (micro-batch size, layer); of adding to gradients, in which the longer of
    both counts, and of the optimizer's step, by layer.
    """

    forward_s: Numbers
    backward_s: Numbers
    backward_input_s: Numbers
    accumulate_s: Numbers
    forward_launch_s: Numbers
    backward_launch_s: Numbers
    update_s: Numbers


@unwinding_aborts()
def workload(
    subject: Subject,
    gpu: Gpu,
    batch: int,
    progress: Progress = no_progress,
    sizes: Sequence[int] | None = None,
    tensor: int = 1,
) -> Workload:
    """Find, without parameters' values, what every layer launches, keeps and updates at sizes up to a batch.

    So for what ranks have of layers in teams of up to ``tensor``.

    Raises:
        UsageError: the GPU does not compute in the precision.
        CaptureError: a layer needs the values of its tensors to run.
    """
    _check_precision(subject, gpu)
    asked = sizes_up_to(batch) if sizes is None else sizes
    works = _works(subject, gpu, asked, progress, skip_one=sizes is None and len(asked) > 1)
    notes = list[str]()
    parts = _parts(subject, gpu, works, tensor, notes, progress)
    first = {layer.fingerprint: layer for layer in reversed(subject.graph.layers)}
    kinds = {fingerprint: layer.named_parameters() for fingerprint, layer in first.items()}
    distinct: dict[int, LayerWork] = {id(layer): layer for work in works.values() for layer in work.layers}
    index_of = {key: index for index, key in enumerate(distinct)}
    every = [*distinct.values(), *(work for part in parts for work in part.works)]
    groups = [group for work in every for group in (work.forward, work.backward, work.backward_input, work.accumulate)]
    return Workload(
        gpu=gpu,
        sizes=tuple(works),
        works=tuple(works.values()),
        optimizer=optimizer_memory(subject.user, kinds, torch.device("cuda")),
        updated_bytes=_updated_bytes(subject, kinds),
        table=KernelTable.of(groups, gpu),
        places=np.array([[index_of[id(layer)] for layer in work.layers] for work in works.values()], dtype=np.int64),
        parts=parts,
        names=tuple(layer.name for layer in subject.graph.layers),
        notes=tuple(notes),
    )


def _works(
    subject: Subject, gpu: Gpu, sizes: Sequence[int], progress: Progress, *, skip_one: bool
) -> dict[int, GraphWork]:
    """Return what the layers do by micro-batch size; with ``skip_one`` a single sample may be more than they take."""
    works: dict[int, GraphWork] = {}
    for index, size in enumerate(sizes):
        progress(f"recording layers on fake tensors: micro-batches of {size}", index / len(sizes))
        try:
            works[size] = graph_work(subject.graph, size, gpu, _precision(subject))
        except CaptureError:
            # A normalisation over the batch may have no variance of a single sample; larger sizes tell the rest.
            if size > 1 or not skip_one:
                raise
    return works


def _precision(subject: Subject) -> Precision:
    """Return what layers compute in: parameters that are in half precision themselves need no autocast."""
    single = any(parameter.dtype == torch.float32 for parameter in subject.module.parameters())
    return subject.precision if single else "fp32"


def _parts(
    subject: Subject, gpu: Gpu, works: Mapping[int, GraphWork], most: int, notes: list[str], progress: Progress
) -> tuple[PartWorks, ...]:
    """Return what the largest part of every kind of layer does, by micro-batch size; ``notes`` gets what is not."""
    graph, precision, found = subject.graph, _precision(subject), list[PartWorks]()
    places = {name: kind[1] for name, kind in update_kinds(graph).items()}
    kinds = part_kinds(graph, subject.survey, most)
    optimizers: dict[str, tuple[int, int]] = {}
    moved: dict[str, float] = {}
    for number, kind in enumerate(kinds):
        progress(f"recording parts of layers on fake tensors: {kind.count} ranks", number / len(kinds))
        try:
            lone = lone_part(kind, partial(kind.make, analyse(kind.layer), True), kind.largest())
            each = tuple(part_work(kind, lone, graph, work, size, gpu, precision) for size, work in works.items())
        except CaptureError as error:
            notes.append(without_part(kind, error))
            continue
        named = lone.layer.named_parameters()
        if kind.held not in optimizers:
            optimizers[kind.held] = memory_of(subject.user, named, torch.device("cuda"))
            moved[kind.held] = moved_per_number(subject.user, named)
        updated = (parameters_at(lone.layer, places[layer.name]) for layer in kind.layers)
        numbers = np.array([sum(parameter.numel() for _, parameter in each) for each in updated])
        found.append(PartWorks(kind, lone.part, each, optimizers[kind.held], moved[kind.held] * numbers))
    return tuple(found)


def _check_precision(subject: Subject, gpu: Gpu) -> None:
    if subject.precision == "fp64":
        # Autocast takes no float64, so that no option helps.
        raise UsageError(
            f"`device={gpu.name!r}`: the parameters of {subject.user.path} are float64, and no rate of {gpu.name} in "
            "float64 is known; build them in float32, or profile on a device that is there"
        )
    gpu.flops_per_s(subject.precision)


def _updated_bytes(subject: Subject, kinds: Mapping[str, NamedParameters]) -> Numbers:
    """Return what the optimizer moves, by layer; a parameter of several layers is updated with the first."""
    moved = {kind: moved_per_number(subject.user, parameters) for kind, parameters in kinds.items()}
    owned = owned_parameters(subject.graph)
    numbers = [sum(layer.parameter(at).numel() for at in owned[layer.name]) for layer in subject.graph.layers]
    each = zip(subject.graph.layers, numbers, strict=True)
    return np.array([moved[layer.fingerprint] * count for layer, count in each])


def layer_seconds(load: Workload, constants: Constants, teams: Sequence[TeamShape] = ()) -> LayerSeconds:
    """Price the layers of a workload, as one rank has them: of ``teams``, by layer, or alone."""
    places, updated_bytes = load.places.copy(), load.updated_bytes.astype(np.float64)
    for at, (name, team) in enumerate(zip(load.names, teams, strict=bool(teams))):
        found = load.in_teams.get(PartKey(name, *team)) or load.in_teams.get(PartKey(name, team.ranks, sliced=False))
        if found is not None:
            places[:, at], updated_bytes[at] = found
    return _seconds_at(load, places, updated_bytes, constants)


def _seconds_at(
    load: Workload, places: npt.NDArray[np.int64], updated_bytes: Numbers, constants: Constants
) -> LayerSeconds:
    launch_s = [constants.forward_launch_s] + 3 * [constants.backward_launch_s]
    per_group = np.tile(launch_s, load.table.groups // 4)
    every = seconds(load.table, load.gpu, constants).reshape(-1, 4)
    launches = (load.table.launches * per_group).reshape(-1, 4)
    return LayerSeconds(
        forward_s=every[places, 0],
        backward_s=every[places, 1],
        backward_input_s=every[places, 2],
        accumulate_s=np.maximum(every, launches)[places[0], 3],
        forward_launch_s=launches[places, 0],
        backward_launch_s=launches[places, 1],
        update_s=updated_bytes / (load.gpu.memory_bytes_per_s * constants.update_share),
    )


def profile_of(
    subject: Subject, load: Workload, batch: int, constants: Constants, notes: Iterable[str] = ()
) -> formats.Profile:
    """Return the profile of a priced workload."""
    times, gpu = layer_seconds(load, constants), load.gpu
    dtypes = {name: dtype for name, (dtype, _) in load.works[0].types.items()}
    works = zip(subject.graph.layers, load.works[0].layers, strict=True)
    whole = next((layer.name for layer, work in works if work.pending_bytes is None), None)
    costs = (
        tuple(
            _cost(layer, work.layers[index], size, _at(times, at, index), splits=whole is None)
            for at, (size, work) in enumerate(zip(load.sizes, load.works, strict=True))
        )
        for index, layer in enumerate(subject.graph.layers)
    )
    once = times.update_s.tolist(), times.accumulate_s.tolist()
    # Autocast decides the types of tensors.
    made = {
        each.name: (dtypes[each.name], each.bytes_per_sample // each.dtype.itemsize * dtypes[each.name].itemsize)
        for each in subject.graph.tensors
    }
    return subject.record(
        batch,
        device=formats.DeviceKind(
            type="cuda", name=gpu.name, memory_bytes=gpu.memory_bytes, reserved_bytes=RESERVED_BYTES
        ),
        layers=layer_records(subject.graph, load.optimizer, costs, *once, _flops(subject, load)),
        tensors=describe_tensors(subject.graph, made),
        parts=_part_records(load, constants, splits=whole is None),
        updates_at_once=load.optimizer.at_once,
        noise=formats.Noise(median_spread=0.0, max_spread=0.0, caches="cold"),
        step_overhead_s=constants.step_s,
        **subject.sample_times(min(batch, READ)),
        notes=(
            *subject.notes,
            f"times are estimated for {gpu.name} by its data sheet, not measured (docs/howto/other_gpus.md)",
            _products_note(gpu, constants),
            *([] if whole is None else [without_halves(whole)]),
            *load.notes,
            *notes,
        ),
    )


def _products_note(gpu: Gpu, constants: Constants) -> str:
    """Return where the rates of products are from."""
    rates = rates_of(gpu)
    if rates is not None:
        return f"products and attention by shape: {rates.source}"
    return f"products reach one rate, {constants.matmul_share:.0%} of the data sheet's, under its power cap"


def _flops(subject: Subject, load: Workload) -> dict[str, int]:
    """Return the operations of a sample's forward and backward, by kind."""
    each = zip(subject.graph.layers, load.works[0].layers, strict=True)
    return {layer.fingerprint: work.flops // load.sizes[0] for layer, work in each}


def _part_records(load: Workload, constants: Constants, *, splits: bool) -> dict[PartKey, formats.PartCosts]:
    if not load.parts:
        return {}
    places, updated_bytes = zip(*load.in_teams.values(), strict=True)
    times = _seconds_at(load, np.stack(places, axis=1), np.array(updated_bytes), constants)
    found = {}
    each = ((part, layer) for part in load.parts for layer in part.kind.layers)
    for index, (key, (part, layer)) in enumerate(zip(load.in_teams, each, strict=True)):
        costs = [
            _cost(layer, work, size, _at(times, at, index), splits=splits)
            for at, (size, work) in enumerate(zip(load.sizes, part.works, strict=True))
        ]
        updates = UpdateCosts(float(times.update_s[index]), float(times.accumulate_s[index]))
        found[key] = part_record(part.part, part.optimizer, costs, updates)
    return found


class _PassSeconds(NamedTuple):
    """Times of one layer at one size."""

    forward_s: float
    backward_s: float
    backward_input_s: float
    forward_launch_s: float
    backward_launch_s: float


def _at(times: LayerSeconds, at: int, index: int) -> _PassSeconds:
    return _PassSeconds(*(float(getattr(times, name)[at, index]) for name in _PassSeconds._fields))


def _cost(layer: Layer, work: LayerWork, size: int, times: _PassSeconds, *, splits: bool) -> formats.Cost:
    names = {f"input {index}": name for index, name in enumerate(layer.inputs)}
    names |= {f"output {index}": name for index, name in enumerate(layer.outputs)}
    return formats.Cost(
        micro_batch=size,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        backward_input_s=times.backward_input_s if splits else None,
        backward_weight_s=max(0.0, times.backward_s - times.backward_input_s) if splits else None,
        weight_saved_bytes=work.pending_bytes,
        recompute_s=times.forward_s,
        forward_launch_s=times.forward_launch_s,
        backward_launch_s=times.backward_launch_s,
        saved=tuple(
            formats.SavedStorage(storage=names.get(name) or name.replace("own", layer.name, 1), bytes=size)
            for name, size in work.saved_bytes.items()
        ),
        peak_bytes=work.peak_bytes,
        output_bytes=sum(size for _, _, size in work.outputs),
        provenance="estimated",
        sums=work.sums,
    )
