"""Estimate: a profile for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from autopar.capture import Layer
from autopar.formats import profile as formats
from autopar.hardware.gpus import Gpu
from autopar.profiler.costs import describe_tensors, describe_ties
from autopar.profiler.options import ProfileOptions, Progress
from autopar.profiler.roofline import Constants, KernelTable, default_constants, seconds
from autopar.profiler.subject import Subject
from autopar.profiler.update_work import UpdateWork, update_work
from autopar.profiler.work import GraphWork, LayerWork, graph_work

__all__ = ["RESERVED_BYTES", "LayerSeconds", "Workload", "estimate", "layer_seconds", "profile_of", "workload"]

CONTEXT_BYTES = 400_000_000
"""CUDA's context, kernels loaded (0.3 to 0.4 GB: pytorch#20532, #107667)."""
COMMUNICATOR_BYTES = 600_000_000
"""Of one NCCL communicator (544 to 688 MB: nccl#964)."""
COMMUNICATORS = 2
"""Of a rank: one with all ranks, one with its stage's replicas."""
RESERVED_BYTES = CONTEXT_BYTES + COMMUNICATORS * COMMUNICATOR_BYTES

MOST_SIZES = 8
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """All that a model asks of a GPU: independent of the constants, so found once for any number of them."""

    gpu: Gpu
    sizes: tuple[int, ...]
    works: tuple[GraphWork, ...]
    """By micro-batch size."""
    updates: tuple[UpdateWork, ...]
    """By layer."""
    table: KernelTable
    """Three groups for every different work: forward, backward, and the part of it that makes inputs' gradients."""
    places: npt.NDArray[np.int64]
    """Index of a layer's work, by size and layer."""


@dataclass(frozen=True)
class LayerSeconds:
    """Times by (micro-batch size, layer), and of the optimizer's step by layer."""

    forward_s: Numbers
    backward_s: Numbers
    backward_input_s: Numbers
    forward_launch_s: Numbers
    backward_launch_s: Numbers
    update_s: Numbers


def estimate(
    subject: Subject,
    gpu: Gpu,
    options: ProfileOptions,
    constants: Constants | None = None,
    progress: Progress = lambda what, share: None,
) -> formats.Profile:
    """Return the profile that a GPU by its data sheet would give; ``constants`` default to that GPU's.

    Nothing is allocated: parameters may be on meta. The source is recorded as the user gave it.

    Raises:
        UsageError: the GPU does not compute in the precision.
        CaptureError: a layer needs the values of its tensors to run.
    """
    found = workload(subject, gpu, options.batch, progress)
    return profile_of(subject, found, options.batch, constants or default_constants(gpu))


def workload(
    subject: Subject,
    gpu: Gpu,
    batch: int,
    progress: Progress = lambda what, share: None,
    sizes: Sequence[int] | None = None,
) -> Workload:
    """Find what every layer launches, keeps and updates, at micro-batch sizes up to ``batch`` or at those given.

    Raises:
        UsageError: the GPU does not compute in the precision.
        CaptureError: a layer needs the values of its tensors to run.
    """
    gpu.flops_per_s(subject.precision)
    single = any(parameter.dtype == torch.float32 for parameter in subject.module.parameters())
    # Parameters that are in half precision themselves need no autocast.
    precision = subject.precision if single else "fp32"
    chosen = tuple(sizes) if sizes is not None else _sizes(batch)
    works = []
    for index, size in enumerate(chosen):
        progress("recording layers on fake tensors", index / len(chosen))
        works.append(graph_work(subject.graph, size, gpu, precision))
    first = {layer.fingerprint: layer for layer in reversed(subject.graph.layers)}
    updates = {fingerprint: update_work(subject.user, layer) for fingerprint, layer in first.items()}
    distinct: dict[int, LayerWork] = {id(layer): layer for work in works for layer in work.layers}
    index_of = {key: index for index, key in enumerate(distinct)}
    groups = [group for work in distinct.values() for group in (work.forward, work.backward, work.backward_input)]
    return Workload(
        gpu=gpu,
        sizes=chosen,
        works=tuple(works),
        updates=tuple(updates[layer.fingerprint] for layer in subject.graph.layers),
        table=KernelTable.of(groups, gpu),
        places=np.array([[index_of[id(layer)] for layer in work.layers] for work in works], dtype=np.int64),
    )


def _sizes(batch: int) -> tuple[int, ...]:
    """Return at most eight micro-batch sizes: powers of two from 1 up, spread evenly.

    >>> _sizes(16), _sizes(6)
    ((1, 2, 4, 8, 16), (1, 2, 4))
    """
    powers = [2**exponent for exponent in range(batch.bit_length())]
    count = min(MOST_SIZES, len(powers))
    return tuple(dict.fromkeys(powers[round(index * (len(powers) - 1) / max(1, count - 1))] for index in range(count)))


def layer_seconds(load: Workload, constants: Constants) -> LayerSeconds:
    """Price a workload."""
    launch_s = [constants.forward_launch_s, constants.backward_launch_s, constants.backward_launch_s]
    per_group = np.tile(launch_s, load.table.groups // 3)
    every = seconds(load.table, load.gpu, constants, per_group).reshape(-1, 3)
    launches = (load.table.launches * per_group).reshape(-1, 3)
    moved = np.array([float(update.moved_bytes) for update in load.updates])
    return LayerSeconds(
        forward_s=every[load.places, 0],
        backward_s=every[load.places, 1],
        backward_input_s=every[load.places, 2],
        forward_launch_s=launches[load.places, 0],
        backward_launch_s=launches[load.places, 1],
        update_s=moved / (load.gpu.memory_bytes_per_s * constants.update_share),
    )


def profile_of(
    subject: Subject, load: Workload, batch: int, constants: Constants, notes: Iterable[str] = ()
) -> formats.Profile:
    """Return the profile of a priced workload."""
    times = layer_seconds(load, constants)
    gpu = load.gpu
    first: dict[str, str] = {}
    layers = []
    for index, layer in enumerate(subject.graph.layers):
        original = first.setdefault(layer.fingerprint, layer.name)
        layers.append(_layer(subject, load, times, index, None if original == layer.name else original))
    return formats.Profile(
        model=formats.ModelSource(source=subject.user.spec, sha256=subject.user.sha256),
        batch=batch,
        device=formats.DeviceKind(
            type="cuda", name=gpu.name, memory_bytes=gpu.memory_bytes, reserved_bytes=RESERVED_BYTES
        ),
        precision=subject.precision,
        layers=tuple(layers),
        tensors=_tensors(subject, load.works[0]),
        tied=describe_ties(subject.graph),
        noise=formats.Noise(median_spread=0.0, max_spread=0.0, caches="cold"),
        step_overhead_s=constants.step_s,
        notes=(
            *subject.notes,
            f"times are estimated for {gpu.name} by its data sheet, not measured (docs/estimating.md)",
            *notes,
        ),
    )


def _layer(
    subject: Subject, load: Workload, times: LayerSeconds, index: int, estimated_as: str | None
) -> formats.Layer:
    layer = subject.graph.layers[index]
    parameters = list(layer.module.parameters())
    buffers = [buffer for name, buffer in layer.module.named_buffers() if name in layer.buffers]
    trainable = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    return formats.Layer(
        name=layer.name,
        modules=layer.modules,
        parameters_bytes=sum(parameter.nbytes for parameter in parameters),
        trainable_bytes=trainable,
        gradient_bytes=trainable,
        optimizer_bytes=load.updates[index].state_bytes,
        buffers_bytes=sum(buffer.nbytes for buffer in buffers),
        update_s=float(times.update_s[index]),
        costs=tuple(_cost(layer, load, times, at, index) for at in range(len(load.sizes))),
        forward_fit=_line(load.sizes, times.forward_s[:, index]),
        backward_fit=_line(load.sizes, times.backward_s[:, index]),
        measured_as=estimated_as,
    )


def _cost(layer: Layer, load: Workload, times: LayerSeconds, at: int, index: int) -> formats.Cost:
    work = load.works[at].layers[index]
    names = _storage_names(layer)
    forward_s, backward_s = float(times.forward_s[at, index]), float(times.backward_s[at, index])
    input_s = float(times.backward_input_s[at, index])
    return formats.Cost(
        micro_batch=load.sizes[at],
        forward_s=forward_s,
        backward_s=backward_s,
        backward_input_s=input_s,
        backward_weight_s=max(0.0, backward_s - input_s),
        recompute_s=forward_s,
        forward_launch_s=float(times.forward_launch_s[at, index]),
        backward_launch_s=float(times.backward_launch_s[at, index]),
        saved=tuple(
            formats.Saved(storage=names.get(name) or name.replace("own", layer.name, 1), bytes=size)
            for name, size in work.saved.items()
        ),
        peak_bytes=work.peak_bytes,
        output_bytes=sum(size for _, _, size in work.outputs),
        provenance="estimated",
    )


def _storage_names(layer: Layer) -> Mapping[str, str]:
    """Return the names of crossing tensors by their places in the layer."""
    return {
        **{f"input {index}": name for index, name in enumerate(layer.inputs)},
        **{f"output {index}": name for index, name in enumerate(layer.outputs)},
    }


def _tensors(subject: Subject, work: GraphWork) -> tuple[formats.Tensor, ...]:
    """Return the tensors' records, with the types that autocast gives them."""
    captured = {tensor.name: tensor.dtype for tensor in subject.graph.tensors}
    return tuple(
        tensor.model_copy(
            update={
                "dtype": str(work.dtypes[tensor.name]).removeprefix("torch."),
                "bytes_per_sample": tensor.bytes_per_sample
                // captured[tensor.name].itemsize
                * work.dtypes[tensor.name].itemsize,
            }
        )
        for tensor in describe_tensors(subject.graph)
    )


def _line(sizes: Sequence[int], values: Numbers) -> formats.Line | None:
    """Fit an affine function with relative errors least, neither part negative; none to a single size."""
    if len(sizes) < 2:
        return None
    rows = np.array(sizes, dtype=np.float64)
    per_sample, fixed = np.polyfit(rows, values, 1, w=1 / values)
    if fixed < 0:
        per_sample, fixed = float(np.sum(rows / values) / np.sum((rows / values) ** 2)), 0.0
    if per_sample < 0:
        per_sample, fixed = 0.0, float(np.sum(1 / values) / np.sum(1 / values**2))
    residual = float(np.max(np.abs((fixed + per_sample * rows) / values - 1)))
    return formats.Line(fixed_s=float(fixed), per_sample_s=float(per_sample), residual=residual)
