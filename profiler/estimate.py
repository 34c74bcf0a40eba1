"""Estimate: a profile for a GPU that is not there.

One layer of every kind runs on fake tensors, as a GPU would run it. Its kernels, what it keeps and what it needs at
once become times and bytes by the GPU's data sheet.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture import Layer, LayerGraph
from autopar.capture.graph import TensorSpec
from autopar.capture.model.source import NamedParameters
from autopar.errors import AutoparError, CaptureError, UsageError, first_line
from autopar.formats import profile as formats
from autopar.formats.profile import Precision
from autopar.hardware.gpus import Gpu
from autopar.hardware.rates import rates_of
from autopar.profiler.device import COMMUNICATORS_BYTES, Computing, peak_bytes
from autopar.profiler.flops import OperationCount, flops_of
from autopar.profiler.kernels import Constants, Kernel, KernelLog, KernelTable, Numbers, as_on_cuda, seconds
from autopar.profiler.layer_runs import LayerInputs, LayerPass, SavedStorages, pending_bytes, without_halves
from autopar.profiler.optimizer import OptimizerMemory, moved_per_number, optimizer_memory
from autopar.profiler.profile import describe_tensors, layer_records, owned_parameters, sizes_up_to
from autopar.profiler.subject import Subject
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


@dataclass(frozen=True)
class GraphWork:
    """All layers at one micro-batch size."""

    layers: tuple[LayerWork, ...]
    """In order; layers that compute the same share one."""
    dtypes: Mapping[str, torch.dtype]
    """Of every tensor between layers: autocast decides them, so they can differ from the captured ones."""


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
    return GraphWork(tuple(found), {name: dtype for name, (dtype, _) in types.items()})


def _run(
    layer: Layer,
    specs: Mapping[str, TensorSpec],
    types: Mapping[str, tuple[torch.dtype, bool]],
    rows: int,
    graph: LayerGraph,
    computing: Computing,
) -> LayerWork:
    # A module that the user lists, or that runs the forward of the whole model, reads tensors that are not its own.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faked = _fake_layer(layer, mode)
    with mode:
        tensors = {name: torch.empty(spec.shape(rows), dtype=types[name][0]) for name, spec in specs.items()}
    inputs = LayerInputs(rows, tensors, {name: types[name][1] for name in specs})
    try:
        with mode:
            return _record(faked, inputs, graph, computing)
    except AutoparError:
        raise
    except Exception as error:
        raise CaptureError(
            f"layer {layer.name}: cannot be estimated without its tensors' values ({first_line(error)[:160]}); "
            "profile it on a device that is there"
        ) from error


def _record(layer: Layer, inputs: LayerInputs, graph: LayerGraph, computing: Computing) -> LayerWork:
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
    pending = pending_bytes(layer, inputs, graph, computing)
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


def _fake_layer(layer: Layer, mode: FakeTensorMode) -> Layer:
    """Return a copy of a layer that holds fake tensors for all its parameters, buffers and constants."""
    module = layer.module
    constants = [each for part in module.modules() for each in vars(part).values() if isinstance(each, torch.Tensor)]
    tensors = [*module.parameters(), *module.buffers(), *constants]
    memo: dict[int, object] = {id(tensor): _fake(tensor, mode) for tensor in tensors}
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
) -> Workload:
    """Find, without parameters' values, what every layer launches, keeps and updates at sizes up to a batch.

    Raises:
        UsageError: the GPU does not compute in the precision.
        CaptureError: a layer needs the values of its tensors to run.
    """
    _check_precision(subject, gpu)
    asked = sizes_up_to(batch) if sizes is None else sizes
    works = _works(subject, gpu, asked, progress, skip_one=sizes is None and len(asked) > 1)
    first = {layer.fingerprint: layer for layer in reversed(subject.graph.layers)}
    kinds = {fingerprint: layer.named_parameters() for fingerprint, layer in first.items()}
    distinct: dict[int, LayerWork] = {id(layer): layer for work in works.values() for layer in work.layers}
    index_of = {key: index for index, key in enumerate(distinct)}
    groups = [
        group
        for work in distinct.values()
        for group in (work.forward, work.backward, work.backward_input, work.accumulate)
    ]
    return Workload(
        gpu=gpu,
        sizes=tuple(works),
        works=tuple(works.values()),
        optimizer=optimizer_memory(subject.user, kinds, torch.device("cuda")),
        updated_bytes=_updated_bytes(subject, kinds),
        table=KernelTable.of(groups, gpu),
        places=np.array([[index_of[id(layer)] for layer in work.layers] for work in works.values()], dtype=np.int64),
    )


def _works(
    subject: Subject, gpu: Gpu, sizes: Sequence[int], progress: Progress, *, skip_one: bool
) -> dict[int, GraphWork]:
    """Return what the layers do by micro-batch size; with ``skip_one`` a single sample may be more than they take."""
    single = any(parameter.dtype == torch.float32 for parameter in subject.module.parameters())
    # Parameters that are in half precision themselves need no autocast.
    precision = subject.precision if single else "fp32"
    works: dict[int, GraphWork] = {}
    for index, size in enumerate(sizes):
        progress(f"recording layers on fake tensors: micro-batches of {size}", index / len(sizes))
        try:
            works[size] = graph_work(subject.graph, size, gpu, precision)
        except CaptureError:
            # A normalisation over the batch may have no variance of a single sample; larger sizes tell the rest.
            if size > 1 or not skip_one:
                raise
    return works


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


def layer_seconds(load: Workload, constants: Constants) -> LayerSeconds:
    """Price a workload."""
    launch_s = [constants.forward_launch_s] + 3 * [constants.backward_launch_s]
    per_group = np.tile(launch_s, load.table.groups // 4)
    every = seconds(load.table, load.gpu, constants).reshape(-1, 4)
    launches = (load.table.launches * per_group).reshape(-1, 4)
    return LayerSeconds(
        forward_s=every[load.places, 0],
        backward_s=every[load.places, 1],
        backward_input_s=every[load.places, 2],
        accumulate_s=np.maximum(every, launches)[load.places[0], 3],
        forward_launch_s=launches[load.places, 0],
        backward_launch_s=launches[load.places, 1],
        update_s=load.updated_bytes / (load.gpu.memory_bytes_per_s * constants.update_share),
    )


def profile_of(
    subject: Subject, load: Workload, batch: int, constants: Constants, notes: Iterable[str] = ()
) -> formats.Profile:
    """Return the profile of a priced workload."""
    times, gpu, dtypes = layer_seconds(load, constants), load.gpu, load.works[0].dtypes
    works = zip(subject.graph.layers, load.works[0].layers, strict=True)
    whole = next((layer.name for layer, work in works if work.pending_bytes is None), None)
    costs = (
        tuple(_cost(layer, load, times, at, index, splits=whole is None) for at in range(len(load.sizes)))
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
        updates_at_once=load.optimizer.at_once,
        noise=formats.Noise(median_spread=0.0, max_spread=0.0, caches="cold"),
        step_overhead_s=constants.step_s,
        **subject.sample_times(min(batch, READ)),
        notes=(
            *subject.notes,
            f"times are estimated for {gpu.name} by its data sheet, not measured (docs/howto/other_gpus.md)",
            _products_note(gpu, constants),
            *([] if whole is None else [without_halves(whole)]),
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


def _cost(layer: Layer, load: Workload, times: LayerSeconds, at: int, index: int, *, splits: bool) -> formats.Cost:
    work = load.works[at].layers[index]
    names = {f"input {index}": name for index, name in enumerate(layer.inputs)}
    names |= {f"output {index}": name for index, name in enumerate(layer.outputs)}
    forward_s, backward_s = float(times.forward_s[at, index]), float(times.backward_s[at, index])
    input_s = float(times.backward_input_s[at, index])
    return formats.Cost(
        micro_batch=load.sizes[at],
        forward_s=forward_s,
        backward_s=backward_s,
        backward_input_s=input_s if splits else None,
        backward_weight_s=max(0.0, backward_s - input_s) if splits else None,
        weight_saved_bytes=work.pending_bytes,
        recompute_s=forward_s,
        forward_launch_s=float(times.forward_launch_s[at, index]),
        backward_launch_s=float(times.backward_launch_s[at, index]),
        saved=tuple(
            formats.SavedStorage(storage=names.get(name) or name.replace("own", layer.name, 1), bytes=size)
            for name, size in work.saved_bytes.items()
        ),
        peak_bytes=work.peak_bytes,
        output_bytes=sum(size for _, _, size in work.outputs),
        provenance="estimated",
    )
