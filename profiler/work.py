"""Work: what every layer launches, keeps and needs at once on a GPU, found on fake tensors and without that GPU."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autopar.capture import Layer, LayerGraph
from autopar.capture.graph import TensorSpec
from autopar.errors import AutoparError, CaptureError
from autopar.formats.profile import Precision
from autopar.hardware.gpus import Gpu
from autopar.profiler.device import Computing, peak_bytes
from autopar.profiler.kernels import Kernel, KernelLog, as_on_cuda
from autopar.profiler.layer_runs import LayerInputs, LayerPass, SavedStorages


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
    outputs: tuple[tuple[torch.dtype, bool, int], ...]
    """Of every output: type, whether a gradient flows back over it, bytes."""


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
            return _record(faked, inputs, graph.outputs, computing)
    except AutoparError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CaptureError(
            f"layer {layer.name}: cannot be estimated without its tensors' values ({reason[:160]}); "
            "profile it on a device that is there"
        ) from error


def _record(layer: Layer, inputs: LayerInputs, loss: tuple[str, ...], computing: Computing) -> LayerWork:
    trained = [parameter for parameter in layer.module.parameters() if parameter.requires_grad]
    work = LayerPass(layer, inputs, loss, computing)
    storages = SavedStorages("own", (*layer.module.parameters(), *layer.module.buffers()))
    with KernelLog() as forward, storages.recording():
        work.forward()
    tensors = list(work.outputs.values())
    outputs = tuple((tensor.dtype, tensor.requires_grad, tensor.nbytes) for tensor in tensors)
    saved = storages.bytes_by_name(
        {f"input {index}": tensor for index, tensor in enumerate(work.inputs.values())},
        {f"output {index}": tensor for index, tensor in enumerate(tensors) if layer.outputs[index] not in loss},
    )
    backward = _backward_kernels(work)
    del work, tensors, storages
    gradients = [torch.zeros_like(parameter) for parameter in trained]
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = torch.zeros_like(gradient)
    with KernelLog() as adding:
        torch.autograd.backward(trained, gradients)
    peak = peak_bytes(LayerPass(layer, inputs, loss, computing).whole, torch.device("cpu"))
    for parameter in trained:
        parameter.requires_grad_(False)
    half = LayerPass(layer, inputs, loss, computing)
    half.forward()
    return LayerWork(
        forward=tuple(forward.kernels),
        backward=backward,
        backward_input=_backward_kernels(half),
        accumulate=tuple(adding.kernels),
        saved_bytes=saved,
        peak_bytes=peak,
        outputs=outputs,
    )


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
    held = [*module.parameters(), *module.buffers(), *constants]
    memo: dict[int, object] = {id(tensor): _fake(tensor, mode) for tensor in held}
    return replace(layer, module=copy.deepcopy(module, memo))


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    assert isinstance(fake, FakeTensor)
    return fake
