"""Layers on given inputs, run forward and backward as the runtime does, for their times and for what they keep.

A chain runs layers as a training step does, with a clock read between them. Every layer computes on what the layer
before it has just made, and its backward starts from what the layer after it has just sent back; all forwards precede
all backwards, what a backward is done with is freed, and gradients are new in every step. So caches, memory and
allocator are in the state in which a plain step finds them, which the times of a layer that is run again and again on
the same tensors are not.

A recording runs each layer once and notes the storages that it keeps from forward to backward. Of a model that is
larger than memory one layer at a time is given weights, measured, and emptied again.

Why: docs/design/decisions.md, "Profiler: Layers are timed in the course of a step".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from autopar.capture import Layer, LayerGraph
from autopar.capture.layers.split_backward import SplitBackward
from autopar.capture.model.batch import row_count
from autopar.capture.model.effects import storage_of
from autopar.capture.model.terms import starts_of
from autopar.errors import AutoparError, CaptureError, UsageError, first_line, text_of
from autopar.profiler.device import CallClock, Computing, Time, as_it_is, time_calls


class SavedStorages:
    """Records the storages that autograd saves, each once, parameters and buffers excluded.

    >>> x = torch.ones(4, requires_grad=True)
    >>> saved = SavedStorages("layer", [])
    >>> with saved.recording():
    ...     y = x.exp()
    >>> saved.bytes_by_name({"x": x}, {"y": y})
    {'y': 16}
    """

    def __init__(self, layer: str, excluded_tensors: Iterable[torch.Tensor]) -> None:
        self._layer = layer
        self._excluded_keys = {storage_of(tensor) for tensor in excluded_tensors}
        # Saved storages are held, or a later one could be taken for an earlier one of the same identity.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def recording(self) -> AbstractContextManager[object]:
        """Return the context in which what is saved is recorded."""
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if storage_of(tensor) not in self._excluded_keys and tensor.untyped_storage().nbytes():
            self._storages.setdefault(storage_of(tensor), tensor.untyped_storage())
        # With its history, a tape that no backward runs over would hold itself for ever.
        return tensor.detach()

    def bytes_by_name(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Return bytes by name: a storage of an input or output has its name, others are ``layer#0``, ``#1`` ..."""
        names: dict[int, str] = {}
        for name, tensor in (*inputs.items(), *outputs.items()):
            names.setdefault(storage_of(tensor), name)
        own = (f"{self._layer}#{index}" for index in range(len(self._storages)))
        return {names.get(key) or next(own): storage.nbytes() for key, storage in self._storages.items()}


@dataclass(frozen=True)
class LayerInputs:
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
        inputs: LayerInputs,
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
        # The backward starts from losses themselves, never from counts and figures beside them.
        self._count_outputs = set(loss) - set(starts_of(loss))
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
            name: tensor
            for name, tensor in self.outputs.items()
            if tensor.requires_grad and name not in self._count_outputs
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
        self._halves = SplitBackward()
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

    def discard(self) -> None:
        """Let go of what the second half would read."""
        self._halves.discard()

    def pending_bytes(self) -> int:
        """Run as far as the first half; return the bytes that are held for the second, parameters excluded."""
        self.forward()
        self.prepare_backward()
        self.outputs = {}
        self.backward_input()
        module = self.layer.module
        excluded = {storage_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
        found = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in self._halves.pending()}
        return sum(size for key, size in found.items() if key not in excluded)


def pending_bytes(layer: Layer, inputs: LayerInputs, graph: LayerGraph, computing: Computing) -> int | None:
    """Return what a layer holds between the halves of its backward; None where a listed module has none.

    Some keep what they save to themselves, as torch.utils.checkpoint does.
    """
    halved = SplitPass(layer, inputs, graph.outputs, computing)
    try:
        found = halved.pending_bytes()
        if not graph.portable:
            halved.backward_weight()
    except Exception:
        if graph.portable:
            raise
        return None
    finally:
        halved.discard()
    return found


def without_halves(layer: str) -> str:
    """Return the note that a layer's backward has no halves."""
    return f"backwards are not split in halves, which layer {layer} does not have"


@dataclass
class Recording:
    """What one forward of all layers at one micro-batch size showed, by layer."""

    inputs: dict[str, LayerInputs] = field(default_factory=dict)
    saved_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    output_bytes: dict[str, int] = field(default_factory=dict)
    crossing_outputs: dict[str, tuple[torch.dtype, int]] = field(default_factory=dict)
    """By crossing tensor."""


def record_layer(
    layer: Layer,
    inputs: LayerInputs,
    loss: tuple[str, ...],
    crossing: set[str],
    computing: Computing,
    recording: Recording,
) -> dict[str, torch.Tensor]:
    """Run one layer forward, and note what it showed; return its outputs.

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
            f"{text_of(error)[:200]}; it must run on any number; with `precision`, types that a forward "
            "reads (torch.finfo(x.dtype)) are those without autocast: mask with -inf, give no dtypes"
        ) from error
    outputs = {name: tensor for name, tensor in work.outputs.items() if name in crossing}
    recording.saved_bytes[layer.name] = storages.bytes_by_name(work.inputs, outputs)
    recording.output_bytes[layer.name] = sum(tensor.nbytes for tensor in work.outputs.values())
    recording.crossing_outputs |= {name: (tensor.dtype, tensor.nbytes) for name, tensor in outputs.items()}
    return work.outputs


def record(
    graph: LayerGraph, batch: Mapping[str, torch.Tensor], crossing: set[str], computing: Computing = as_it_is
) -> Recording:
    """Run all layers forward once, each as :func:`record_layer` does."""
    known, gradient, found = dict(batch), dict.fromkeys(batch, False), Recording()
    for layer in graph.layers:
        read = {name: known[name] for name in layer.inputs}
        inputs = LayerInputs(row_count(batch), read, {name: gradient[name] for name in read})
        found.inputs[layer.name] = inputs
        for name, tensor in record_layer(layer, inputs, graph.outputs, crossing, computing, found).items():
            known[name], gradient[name] = tensor.detach(), tensor.requires_grad
    return found


_P = TypeVar("_P", bound=LayerPass)
Times = Sequence[tuple[Layer, Time, Time]]
"""A layer with two times; those of one step, in the order of the layers."""


class LayerChain:
    """Some layers of a graph, in order; not every one needs the one before it to be there."""

    def __init__(
        self, layers: Sequence[Layer], loss: tuple[str, ...], computing: Computing, device: torch.device
    ) -> None:
        self.layers = tuple(layers)
        self._loss, self._computing, self._device = loss, computing, device

    @property
    def on_gpu(self) -> bool:
        """Whether they compute on a GPU."""
        return self._device.type == "cuda"

    def missing(self) -> tuple[str, ...]:
        """Return the names of the tensors that the layers read and none of them makes."""
        made = {name for layer in self.layers for name in layer.outputs}
        return tuple(dict.fromkeys(name for layer in self.layers for name in layer.inputs if name not in made))

    def step(self, chain_inputs: LayerInputs) -> Times:
        """Run a step on the missing tensors; return the times of forwards and backwards."""
        times = time_calls(self._device, partial(self._step, chain_inputs))
        return list(zip(self.layers, times, reversed(times), strict=False))

    def _step(self, chain_inputs: LayerInputs, clock: CallClock) -> None:
        tape = self._new_tape(chain_inputs)
        passes = []
        for layer in self.layers:
            passes.append(self._pass(layer, tape, LayerPass))
            clock.time(passes[-1].forward)
            tape.add(passes[-1].outputs)
        while passes:
            work = passes.pop()
            tape.end(work)
            clock.time(work.backward)

    def recompute(self, chain_inputs: LayerInputs) -> list[tuple[Layer, Time]]:
        """Run a step that keeps no activations; return the times of the forwards that its backwards run again."""
        times = time_calls(self._device, partial(self._recompute, chain_inputs))
        return list(zip(self.layers, reversed(times), strict=True))

    def _recompute(self, chain_inputs: LayerInputs, clock: CallClock) -> None:
        tape = self._new_tape(chain_inputs)
        for layer in self.layers:
            work = self._pass(layer, tape, LayerPass)
            self._forward_with_seed(work)
            tape.add(work.outputs)
        for layer in reversed(self.layers):
            work = self._pass(layer, tape, LayerPass)
            clock.time(partial(self._forward_with_seed, work))
            tape.end(work)
            work.backward()

    def split(self, chain_inputs: LayerInputs) -> Times:
        """Run a step with backwards split in halves; return the times of the halves.

        All halves that make inputs' gradients precede all that make parameters'.
        """
        times = time_calls(self._device, partial(self._split, chain_inputs))
        inputs, weights = times[: len(self.layers)], times[len(self.layers) :]
        return list(zip(self.layers, reversed(inputs), reversed(weights), strict=True))

    def _split(self, chain_inputs: LayerInputs, clock: CallClock) -> None:
        tape = self._new_tape(chain_inputs)
        passes, halves = [], []
        for layer in self.layers:
            passes.append(self._pass(layer, tape, SplitPass))
            passes[-1].forward()
            tape.add(passes[-1].outputs)
        while passes:
            halves.append(passes.pop())
            tape.end(halves[-1])
            clock.time(halves[-1].backward_input)
        for half in halves:
            clock.time(half.backward_weight)

    def _pass(self, layer: Layer, tape: _Tape, kind: type[_P]) -> _P:
        return kind(layer, tape.chain_inputs, self._loss, self._computing, tape.read(layer))

    def _forward_with_seed(self, work: LayerPass) -> None:
        """Run a forward that draws what it drew the last time."""
        if work.layer.random:
            generator = torch.cuda.default_generators[0] if self._device.type == "cuda" else torch.default_generator
            generator.manual_seed(0)
        work.forward()

    def _new_tape(self, chain_inputs: LayerInputs) -> _Tape:
        """Begin a step, whose gradients are new."""
        for layer in self.layers:
            for parameter in layer.module.parameters():
                parameter.grad = None
        return _Tape(chain_inputs)


class _Tape:
    """The tensors between layers, as leaves to which all their readers' backwards add."""

    def __init__(self, chain_inputs: LayerInputs) -> None:
        self.chain_inputs = chain_inputs
        self._leaves = chain_inputs.leaves()

    def read(self, layer: Layer) -> dict[str, torch.Tensor]:
        return {name: self._leaves[name] for name in layer.inputs}

    def add(self, outputs: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in outputs.items():
            self._leaves[name] = tensor.detach().requires_grad_(tensor.requires_grad)

    def end(self, work: LayerPass) -> None:
        """Hand a pass what came back for its outputs, and let go of them."""
        leaves = {name: self._leaves.pop(name) for name in work.outputs}
        work.prepare_backward({name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})
        work.outputs = {}


class SeparateChain(LayerChain):
    """Layers each of which computes on tensors of its own, and begins its backward with ones."""

    def __init__(
        self,
        layers: Sequence[Layer],
        loss: tuple[str, ...],
        computing: Computing,
        device: torch.device,
        given: Mapping[tuple[str, int], LayerInputs],
    ) -> None:
        """Take what layers read, by fingerprint and rows."""
        super().__init__(layers, loss, computing, device)
        self._given = given

    def _new_tape(self, chain_inputs: LayerInputs) -> _Tape:
        super()._new_tape(chain_inputs)
        return _SeparateTape(chain_inputs, self._given)


class _SeparateTape(_Tape):
    """Copies of what layers are given: in the caches, as what the layer before has just made would be."""

    def __init__(self, chain_inputs: LayerInputs, given: Mapping[tuple[str, int], LayerInputs]) -> None:
        super().__init__(chain_inputs)
        self._given = given

    def read(self, layer: Layer) -> dict[str, torch.Tensor]:
        own = self._given[layer.fingerprint, self.chain_inputs.rows]
        return {name: tensor.clone().requires_grad_(own.gradient[name]) for name, tensor in own.tensors.items()}

    def add(self, outputs: Mapping[str, torch.Tensor]) -> None:
        pass

    def end(self, work: LayerPass) -> None:
        work.prepare_backward()
        work.outputs = {}


def random_inputs(
    graph: LayerGraph, layer: Layer, batch: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype], rows: int
) -> LayerInputs:
    """Return what a layer reads: rows of the batch; else random numbers of the type that was ``dtypes``, or zeros."""
    tensors, gradient = {}, {}
    device = next(iter(batch.values())).device
    for name in layer.inputs:
        spec = graph.tensor(name)
        gradient[name] = spec.gradient
        if name in batch:
            tensors[name] = batch[name][:rows].clone()
            continue
        tensors[name] = torch.zeros(spec.shape(rows), dtype=dtypes.get(name, spec.dtype), device=device)
        if tensors[name].is_floating_point():
            tensors[name].normal_()
    return LayerInputs(rows, tensors, gradient)


def rename_storages(saved_bytes: Mapping[str, int], measured_layer: Layer, other: Layer) -> dict[str, int]:
    """Return what an identical layer keeps: the same storages under that layer's names."""
    names = dict(zip((*measured_layer.inputs, *measured_layer.outputs), (*other.inputs, *other.outputs), strict=True))
    own = f"{measured_layer.name}#"
    return {
        f"{other.name}#{name.removeprefix(own)}" if name.startswith(own) else names.get(name, name): size
        for name, size in saved_bytes.items()
    }


# Each takes seconds to compile, at every size; of the times of so many, a median is still good.
OF_A_KIND = 4


def compile_layers(graph: LayerGraph) -> LayerGraph:
    """Return a graph to measure: of every kind, some layers are compiled, and the others run the first one's code.

    What runs another layer's code does so with that one's weights: sizes and times are its own, values are not.
    """
    made: dict[str, list[Any]] = {}
    layers = []
    for layer in graph.layers:
        same = made.setdefault(layer.fingerprint, [])
        same.append(torch.compile(layer.module, dynamic=False) if len(same) < OF_A_KIND else same[0])
        layers.append(replace(layer, module=same[-1]))
    return replace(graph, layers=tuple(layers))


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Compile in the block, with random numbers as uncompiled layers draw them (``docs/howto/verify.md``).

    Raises:
        UsageError: there is no working compiler, or it does not take a layer.
    """
    # Here and not above: they take a second to import.
    import torch._dynamo
    import torch._inductor.config
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError

    with torch._inductor.config.patch(fallback_random=True):
        try:
            torch.compile(torch.exp, dynamic=False)(torch.ones(2, device=device))
        except Exception as error:
            raise UsageError(
                f"`compile`: torch.compile does not work here ({first_line(error)[:200]}); "
                + ("install a C++ compiler (g++)" if device.type == "cpu" else "install Triton and a C compiler")
            ) from error
        try:
            yield
        except (TorchDynamoException, CppCompileError) as error:
            raise UsageError(
                f"`compile`: a layer does not compile ({first_line(error)[:200]}); leave it out"
            ) from error
        finally:
            torch._dynamo.reset()
