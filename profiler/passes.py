"""One layer on given inputs: its forward and backward as the runtime performs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import get_gradient_edge

from autopar.capture import Layer, LayerGraph
from autopar.capture.halves import Halves
from autopar.errors import AutoparError, CaptureError
from autopar.profiler.activations import SavedStorages, storage_key
from autopar.profiler.precision import Computing, as_it_is


@dataclass(frozen=True)
class Inputs:
    """The tensors that one layer reads at one micro-batch size, detached; and which of them carry a gradient."""

    rows: int
    tensors: Mapping[str, torch.Tensor]
    gradient: Mapping[str, bool]

    def leaves(self) -> dict[str, torch.Tensor]:
        """Return the tensors as leaves of a tape, on the same storages."""
        return {name: tensor.detach().requires_grad_(self.gradient[name]) for name, tensor in self.tensors.items()}


class LayerPass:
    """One forward and then one backward of a layer."""

    def __init__(
        self,
        layer: Layer,
        inputs: Inputs,
        loss: tuple[str, ...],
        computing: Computing = as_it_is,
        leaves: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Prepare a pass.

        Args:
            layer: what runs.
            inputs: what it runs on.
            loss: the names of the graph's loss outputs.
            computing: makes the context that the forward runs in.
            leaves: what it runs on instead, where other layers add to the same inputs' gradients.
        """
        self.layer, self._rows, self._computing = layer, inputs.rows, computing
        # The backward starts from the loss itself, never from the count beside it.
        self._ignored = set(loss[1:])
        self.inputs = inputs.leaves() if leaves is None else dict(leaves)
        self.outputs: dict[str, torch.Tensor] = {}
        self.roots: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}

    def forward(self) -> None:
        with self._computing():
            values = self.layer.module(self._rows, *self.inputs.values())
        self.outputs = dict(zip(self.layer.outputs, values, strict=True))

    def prepare_backward(self, gradients: Mapping[str, torch.Tensor] | None = None) -> None:
        """Take the gradients of the outputs, which the runtime is sent; make ones where none are given."""
        known = gradients or {}
        self.roots = {
            name: tensor for name, tensor in self.outputs.items() if tensor.requires_grad and name not in self._ignored
        }
        self.gradients = {
            name: known[name] if name in known else torch.ones_like(tensor) for name, tensor in self.roots.items()
        }

    def backward(self) -> None:
        """Run the backward, which fills the parameters' gradients or adds to them."""
        if self.roots:
            torch.autograd.backward(list(self.roots.values()), list(self.gradients.values()))

    def whole(self) -> None:
        """Run forward and backward, keeping no more alive than the runtime does."""
        self.forward()
        self.prepare_backward()
        self.outputs = {}
        self.backward()


class SplitPass(LayerPass):
    """One forward of a layer, and its backward in two halves.

    A layer none of whose inputs carries a gradient has no first half, one without trained parameters no second: the
    other is the whole backward.
    """

    def forward(self) -> None:
        self._halves = Halves()
        with self._halves.recording():
            super().forward()

    def backward_input(self) -> None:
        """Compute the gradients of the inputs, and add them to those that are there."""
        leaves = [tensor for tensor in self.inputs.values() if tensor.requires_grad]
        edges = [get_gradient_edge(root) for root in self.roots.values()]
        found = self._halves.input(edges, list(self.gradients.values()), leaves)
        for leaf, gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        self.roots, self.gradients = {}, {}

    def backward_weight(self) -> None:
        """Compute the gradients of the parameters, or add to them."""
        self._halves.weight()

    def pending_bytes(self) -> int:
        """Run as far as the first half; return the bytes that are held for the second, parameters excluded."""
        self.forward()
        self.prepare_backward()
        self.outputs = {}
        self.backward_input()
        module = self.layer.module
        excluded = {storage_key(tensor) for tensor in (*module.parameters(), *module.buffers())}
        found = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in self._halves.pending()}
        return sum(size for key, size in found.items() if key not in excluded)


@dataclass(frozen=True)
class LayerRecording:
    """What one forward of one layer showed."""

    saved: dict[str, int]
    """Bytes kept for the backward, by storage."""
    output_bytes: int
    made: dict[str, tuple[torch.dtype, int]]
    """Type and bytes of the crossing tensors among its outputs, as they were made."""
    outputs: dict[str, torch.Tensor]


@dataclass
class Recording:
    """What one forward of all layers at one micro-batch size showed, by layer."""

    inputs: dict[str, Inputs] = field(default_factory=dict)
    saved: dict[str, dict[str, int]] = field(default_factory=dict)
    output_bytes: dict[str, int] = field(default_factory=dict)
    made: dict[str, tuple[torch.dtype, int]] = field(default_factory=dict)
    """By crossing tensor."""


def record_layer(
    layer: Layer, inputs: Inputs, loss: tuple[str, ...], crossing: set[str], computing: Computing = as_it_is
) -> LayerRecording:
    """Run one layer forward.

    ``crossing`` names the tensors whose storages are named after them; other outputs (the loss) are not.

    Raises:
        CaptureError: the layer, captured without autocast, does not run as ``computing`` wants it.
    """
    work = LayerPass(layer, inputs, loss, computing)
    storages = SavedStorages(layer.name, (*layer.module.parameters(), *layer.module.buffers()))
    try:
        with storages.recording():
            work.forward()
    except (AutoparError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CaptureError(
            f"layer {layer.name} does not run on {inputs.rows} sample{'s' if inputs.rows > 1 else ''}: "
            f"{' '.join(str(error).split())[:200]}; it must run on any number; with `precision`, types that a forward "
            "reads (torch.finfo(x.dtype)) are those without autocast: mask with -inf, give no dtypes"
        ) from error
    outputs = {name: tensor for name, tensor in work.outputs.items() if name in crossing}
    return LayerRecording(
        saved=storages.named(work.inputs, outputs),
        output_bytes=sum(tensor.nbytes for tensor in work.outputs.values()),
        made={name: (tensor.dtype, tensor.nbytes) for name, tensor in outputs.items()},
        outputs=work.outputs,
    )


def record(
    graph: LayerGraph, batch: Mapping[str, torch.Tensor], crossing: set[str], computing: Computing = as_it_is
) -> Recording:
    """Run all layers forward once, each as :func:`record_layer` does."""
    rows = int(next(iter(batch.values())).shape[0])
    known = dict(batch)
    gradient = dict.fromkeys(batch, False)
    found = Recording()
    for layer in graph.layers:
        read = {name: known[name] for name in layer.inputs}
        inputs = Inputs(rows, read, {name: gradient[name] for name in read})
        one = record_layer(layer, inputs, graph.outputs, crossing, computing)
        found.inputs[layer.name], found.saved[layer.name] = inputs, one.saved
        found.output_bytes[layer.name] = one.output_bytes
        found.made |= one.made
        for name, tensor in one.outputs.items():
            known[name], gradient[name] = tensor.detach(), tensor.requires_grad
    return found
