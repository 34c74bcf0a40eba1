"""Estimate: a profile for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from autopar.capture import Layer
from autopar.capture.source import NamedParameters
from autopar.ending import unwinding_aborts
from autopar.errors import CaptureError, UsageError
from autopar.formats import profile as formats
from autopar.hardware.gpus import Gpu
from autopar.profiler.costs import describe_tensors, layer_records, owned_parameters
from autopar.profiler.device import COMMUNICATORS_BYTES
from autopar.profiler.optimizer import OptimizerMemory, moved_per_number, optimizer_memory
from autopar.profiler.profile import sizes_up_to
from autopar.profiler.roofline import Constants, KernelTable, Numbers, default_constants, seconds
from autopar.profiler.subject import ProfileOptions, Subject
from autopar.profiler.work import GraphWork, LayerWork, graph_work
from autopar.progress import Progress, no_progress

CONTEXT_BYTES = 400_000_000
"""CUDA's context, kernels loaded (0.3 to 0.4 GB: pytorch#20532, #107667)."""
RESERVED_BYTES = CONTEXT_BYTES + COMMUNICATORS_BYTES


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
    """Times by (micro-batch size, layer); of adding to gradients and of the optimizer's step, by layer."""

    forward_s: Numbers
    backward_s: Numbers
    backward_input_s: Numbers
    accumulate_s: Numbers
    forward_launch_s: Numbers
    backward_launch_s: Numbers
    update_s: Numbers


def estimate(
    subject: Subject,
    gpu: Gpu,
    options: ProfileOptions,
    constants: Constants | None = None,
    progress: Progress = no_progress,
) -> formats.Profile:
    """Return the profile that a GPU by its data sheet would give; ``constants`` default to that GPU's.

    Nothing is allocated: parameters may be on meta. The source is recorded as the user gave it.

    Raises:
        UsageError: the GPU does not compute in the precision.
        CaptureError: a layer needs the values of its tensors to run.
    """
    found = workload(subject, gpu, options.batch, progress)
    return profile_of(subject, found, options.batch, constants or default_constants(gpu))


@unwinding_aborts()
def workload(
    subject: Subject,
    gpu: Gpu,
    batch: int,
    progress: Progress = no_progress,
    sizes: Sequence[int] | None = None,
) -> Workload:
    """Find what every layer launches, keeps and updates, at micro-batch sizes up to ``batch`` or at those given.

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
        progress("recording layers on fake tensors", index / len(sizes))
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
    every = seconds(load.table, load.gpu, constants, per_group).reshape(-1, 4)
    launches = (load.table.launches * per_group).reshape(-1, 4)
    return LayerSeconds(
        forward_s=every[load.places, 0],
        backward_s=every[load.places, 1],
        backward_input_s=every[load.places, 2],
        accumulate_s=every[load.places[0], 3],
        forward_launch_s=launches[load.places, 0],
        backward_launch_s=launches[load.places, 1],
        update_s=load.updated_bytes / (load.gpu.memory_bytes_per_s * constants.update_share),
    )


def profile_of(
    subject: Subject, load: Workload, batch: int, constants: Constants, notes: Iterable[str] = ()
) -> formats.Profile:
    """Return the profile of a priced workload."""
    times, gpu, dtypes = layer_seconds(load, constants), load.gpu, load.works[0].dtypes
    costs = (
        tuple(_cost(layer, load, times, at, index) for at in range(len(load.sizes)))
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
        layers=layer_records(subject.graph, load.optimizer, costs, *once),
        tensors=describe_tensors(subject.graph, made),
        updates_at_once=load.optimizer.at_once,
        noise=formats.Noise(median_spread=0.0, max_spread=0.0, caches="cold"),
        step_overhead_s=constants.step_s,
        notes=(
            *subject.notes,
            f"times are estimated for {gpu.name} by its data sheet, not measured (docs/estimating.md)",
            *notes,
        ),
    )


def _cost(layer: Layer, load: Workload, times: LayerSeconds, at: int, index: int) -> formats.Cost:
    work = load.works[at].layers[index]
    names = {f"input {index}": name for index, name in enumerate(layer.inputs)}
    names |= {f"output {index}": name for index, name in enumerate(layer.outputs)}
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
            formats.SavedStorage(storage=names.get(name) or name.replace("own", layer.name, 1), bytes=size)
            for name, size in work.saved_bytes.items()
        ),
        peak_bytes=work.peak_bytes,
        output_bytes=sum(size for _, _, size in work.outputs),
        provenance="estimated",
    )
