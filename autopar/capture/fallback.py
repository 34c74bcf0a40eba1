"""The ``layers(model)`` fallback: the user's own list of modules, called one after another."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.capture.batch import (
    loss_outputs,
    model_arguments,
    named_outputs,
    named_tensors,
    rebuild,
    row_count,
)
from autopar.capture.build import merge_writes, read_statistics, record_writes, running_statistics
from autopar.capture.graph import Layer, LayerGraph, TensorSpec
from autopar.capture.meta import hollow_runner, is_hollow
from autopar.capture.model_state import preserve_buffers, preserve_parameters
from autopar.capture.python_state import Path, preserve_state, roots_of, snapshot
from autopar.capture.unsupported import refuse_lasting, stateful_modules
from autopar.errors import ModelError
from autopar.formats.profile import Writes

Running = Callable[["ListedLayer", tuple[torch.Tensor, ...]], tuple[object, bool]]
"""Runs a layer on inputs; returns what it gives, and whether it draws random numbers."""

NOTHING_TO_TRAIN = "the loss depends on no parameter that requires a gradient; there is nothing to train"


class ListedLayer(nn.Module):
    """One module of the list. The first reads the batch, the last computes the loss."""

    def __init__(self, element: nn.Module, template: object, model: nn.Module) -> None:
        super().__init__()
        self.element = element
        self.first = self.last = False
        self.single = True
        """Whether the module before gave one tensor, not a tuple of them."""
        self.loss: list[Callable[..., Any] | None] = []
        self.context: list[Any] = [template, model]
        self.batch_names: tuple[str, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        """Of the model: those of the last layer that have the samples as one dimension."""
        self.predicts = False
        """Whether the last layer gives these outputs, and no loss."""
        self.model_outputs: dict[str, torch.Tensor] | None = None
        """Where it is a dict, the last layer puts the model's outputs there."""

    @property
    def model(self) -> nn.Module:
        """The model that the list is of."""
        found: nn.Module = self.context[1]
        return found

    def forward(self, rows: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors_of(self.compute(inputs), self.element)

    def compute(self, inputs: tuple[torch.Tensor, ...]) -> object:
        template, model = self.context
        count = len(self.batch_names)
        batch = rebuild(template, dict(zip(self.batch_names, inputs[:count], strict=True))) if count else None
        if self.first:
            positional, named = model_arguments(model, batch, self.loss[0] is not None)
            output = self.element(*positional, **named)
        else:
            output = self.element(inputs[count] if self.single else tuple(inputs[count:]))
        return self.end(output, batch) if self.last else output

    def end(self, output: object, batch: object) -> tuple[torch.Tensor, ...]:
        """Return what the last layer gives, from the model's output.

        Raises:
            ModelError: it is not like the output in training.
        """
        if self.model_outputs is not None:
            self.model_outputs.update(named_outputs(output))
        if self.predicts:
            return self._predicted_outputs(named_outputs(output))
        loss = self.loss[0]
        return loss_outputs(loss(output, batch) if loss else output, loss is not None)

    def predict(self) -> None:
        """Have this layer, the last one, give the model's outputs in place of the loss."""
        self.predicts = True
        if not self.first:
            self.batch_names = ()

    def _predicted_outputs(self, model_outputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        for spec in self.outputs:
            shape = tuple(model_outputs[spec.name].shape) if spec.name in model_outputs else ()
            if shape != spec.shape(shape[spec.batch_dim] if len(shape) > spec.batch_dim else 0):
                raise ModelError(f"the model returns another {spec.name} in evaluation mode than in training")
        return tuple(model_outputs[spec.name] for spec in self.outputs)


def tensors_of(output: object, element: nn.Module) -> tuple[torch.Tensor, ...]:
    """Return a module's output as a tuple of tensors.

    Raises:
        ModelError: it is neither a tensor nor a tuple of tensors.
    """
    found = output if isinstance(output, (tuple, list)) else (output,)
    if not found or not all(isinstance(item, torch.Tensor) for item in found):
        raise ModelError(
            f"layers(): {type(element).__name__} returned a {type(output).__name__}; "
            "each module must return a tensor or a tuple of tensors"
        )
    return tuple(found)


def listed_layers(
    model: nn.Module,
    batch: object,
    loss: Callable[..., Any] | None,
    layers: Callable[..., Any],
    others: Sequence[Mapping[str, torch.Tensor]] = (),
    ignored_state: tuple[str, ...] = (),
) -> LayerGraph:
    """Make a layer graph of the modules that ``layers(model)`` lists.

    Each is called with the output of the one before (the first with the model's inputs), the loss with the last one's
    output and the whole batch. Such a graph is not portable: every rank makes it for itself. On the batches of
    ``others`` the modules show which Python state they change, that of ``ignored_state`` apart.

    Raises:
        ModelError: the list, or what a module of it returns, is not as described.
        CaptureError: Python state changes that is not one module's alone.
    """
    elements = layers(model)
    if not isinstance(elements, (list, tuple)) or not elements or not all(isinstance(e, nn.Module) for e in elements):
        raise ModelError("layers(model) must return a list of modules, at least one")
    tensors = named_tensors(batch)
    doubled = {name: torch.cat((tensor, tensor)) for name, tensor in tensors.items()}
    wrapped = _wrap(model, batch, loss, list(elements), tuple(tensors))
    names = _names(model, list(elements))
    return Listing(model, wrapped, names, tuple(tensors)).run(tensors, doubled, others, ignored_state)


def _wrap(
    model: nn.Module, batch: object, loss: Callable[..., Any] | None, elements: list[nn.Module], names: tuple[str, ...]
) -> list[ListedLayer]:
    wrapped = [ListedLayer(element, batch, model) for element in elements]
    for layer in wrapped:
        layer.loss = [loss]
    wrapped[0].first = wrapped[-1].last = True
    wrapped[0].batch_names = names
    if loss is not None:
        wrapped[-1].batch_names = names
    return wrapped


def _names(model: nn.Module, elements: list[nn.Module]) -> list[str]:
    known = {id(module): name for name, module in model.named_modules() if name}
    names: list[str] = []
    for index, element in enumerate(elements):
        name = known.get(id(element), f"layers.{index}")
        calls = sum(1 for other in elements[:index] if other is element)
        names.append(f"{name}@{calls + 1}" if calls else name)
    return names


@dataclass(frozen=True)
class _Runs:
    """What the layers of a list gave and did, run on batches of two sizes."""

    outputs: Sequence[tuple[torch.Tensor, ...]]
    """By layer, of the smaller batch."""
    more_outputs: Sequence[tuple[torch.Tensor, ...]]
    """Of the larger one."""
    predictions: Mapping[str, torch.Tensor]
    """The model's own outputs of the smaller batch."""
    more_predictions: Mapping[str, torch.Tensor]
    """Of the larger one."""
    randoms: Sequence[bool]
    """By layer, whether it draws random numbers."""
    stateful: Sequence[tuple[str, ...]]
    """By layer, the Python state of its own that it changes."""
    least_rows: Sequence[int]
    """By layer, how many samples it takes at least."""


class Listing:
    """Runs the list once for each of two batch sizes, and notes what crosses."""

    def __init__(
        self, model: nn.Module, layers: Sequence[ListedLayer], names: list[str], batch_names: tuple[str, ...]
    ) -> None:
        self.model, self.layers, self.names, self.batch_names = model, layers, names, batch_names
        parameters = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
        buffers = {id(buffer): name for name, buffer in reversed(list(model.named_buffers()))}
        # Found before anything runs: a forward may replace a buffer.
        self.parameters = [_model_names(layer.named_parameters(remove_duplicate=False), parameters) for layer in layers]
        self.buffers = [_model_names(layer.named_buffers(remove_duplicate=False), buffers) for layer in layers]
        self.writes: list[list[Writes]] = [[] for _ in layers]
        """Of every layer, what its runs changed."""

    def run(
        self,
        small: Mapping[str, torch.Tensor],
        large: Mapping[str, torch.Tensor],
        others: Sequence[Mapping[str, torch.Tensor]] = (),
        ignored_state: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> LayerGraph:
        """Return the graph of the list, given a batch of each size and others; ``notes`` are what it says of itself."""
        runs = self._run_sizes(small, large, others, ignored_state)
        sizes = (row_count(small), row_count(large))
        self.layers[-1].outputs = _predictions(runs.predictions, runs.more_predictions, sizes)
        layers, specs = [], self._batch_specs(small)
        previous: tuple[str, ...] = ()
        for index, name in enumerate(self.names):
            count = len(runs.outputs[index])
            last = index == len(self.layers) - 1
            outputs = self._loss_names(count) if last else tuple(f"{name}:{place}" for place in range(count))
            writes = self._writes(index, runs.stateful[index])
            own = self._layer(index, previous, outputs, runs.randoms[index], writes)
            layers.append(replace(own, least_rows=runs.least_rows[index]))
            if not last:
                pairs = zip(outputs, runs.outputs[index], runs.more_outputs[index], strict=True)
                specs += [_spec(output, name, (self.names[index + 1],), a, b, sizes) for output, a, b in pairs]
            previous = outputs
        return LayerGraph(
            layers=tuple(layers),
            tensors=tuple(specs),
            inputs=self.batch_names,
            outputs=previous,
            loss="mean" if len(previous) == 1 else "sum_count",
            portable=False,
            hollow=is_hollow(self.model),
            notes=notes,
        )

    def _run_sizes(
        self,
        small: Mapping[str, torch.Tensor],
        large: Mapping[str, torch.Tensor],
        others: Sequence[Mapping[str, torch.Tensor]],
        ignored_state: tuple[str, ...],
    ) -> _Runs:
        """Run the list on batches of two sizes, and, where it has values, see what else its modules do."""
        stateful: Sequence[tuple[str, ...]] = [()] * len(self.layers)
        least = [1] * len(self.layers)
        roots = {path: value for each in self._roots() for path, value in each.items()}
        with preserve_state(roots, ignored_state) as start, self._running() as running:
            first, randoms, given = self._forward(small, running)
            if not first[-1][0].requires_grad:
                raise ModelError(NOTHING_TO_TRAIN)
            second, _, also_given = self._forward(large, running)
            if not is_hollow(self.model):
                stateful = self._stateful(others, ignored_state, running)
                least = self._least_rows(running, small, first, second)
        if any(stateful):
            refuse_lasting(start, snapshot(roots), stateful)
        return _Runs(first, second, given, also_given, randoms, stateful, least)

    @contextlib.contextmanager
    def _running(self) -> Iterator[Running]:
        if not is_hollow(self.model):
            yield _run
            return
        with hollow_runner(self.model, self.layers) as stand_ins:
            yield lambda layer, inputs: stand_ins.run(layer, layer.compute, inputs)

    def _forward(
        self, tensors: Mapping[str, torch.Tensor], running: Running
    ) -> tuple[list[tuple[torch.Tensor, ...]], list[bool], Mapping[str, torch.Tensor]]:
        """Return what the layers give, whether they draw random numbers, and the model's outputs."""
        outputs: list[tuple[torch.Tensor, ...]] = []
        randoms = []
        noted: dict[str, torch.Tensor] = {}
        self.layers[-1].model_outputs = noted
        for position, layer in enumerate(self.layers):
            inputs = tuple(tensors[name].clone() for name in layer.batch_names)
            if not layer.first:
                inputs += tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs[-1])
            with record_writes(layer, dict(zip(layer.batch_names, inputs, strict=False))) as changes:
                output, random = running(layer, inputs)
            self.writes[position] += changes
            if not is_hollow(self.model):
                self._look_at_statistics(position, inputs)
            randoms.append(random)
            if position + 1 < len(self.layers):
                self.layers[position + 1].single = isinstance(output, torch.Tensor)
            outputs.append(tensors_of(output, layer.element))
        self.layers[-1].model_outputs = None
        return outputs, randoms, noted

    def _least_rows(
        self,
        running: Running,
        tensors: Mapping[str, torch.Tensor],
        small: Sequence[tuple[torch.Tensor, ...]],
        large: Sequence[tuple[torch.Tensor, ...]],
    ) -> list[int]:
        """Return how many samples every layer takes at least: two, where it raises for the first of two."""
        if running is not _run:
            # Stand-ins tell nothing of samples.
            return [1] * len(self.layers)
        found = []
        given: tuple[torch.Tensor, ...] = ()
        for layer, own, more in zip(self.layers, small, large, strict=True):
            inputs = tuple(tensors[name][:1].clone() for name in layer.batch_names)
            try:
                with preserve_buffers(layer), preserve_parameters(layer):
                    layer.compute(inputs + given)
                found.append(1)
            except Exception:
                found.append(2)
            given = tuple(_first_of(one.detach(), other) for one, other in zip(own, more, strict=True))
        return found

    def _look_at_statistics(self, position: int, inputs: Sequence[torch.Tensor]) -> None:
        """Take running statistics of batch normalisation for written buffers, where something else reads them."""
        layer = self.layers[position]

        def run() -> tuple[torch.Tensor, ...]:
            return tensors_of(layer.compute(tuple(tensor.detach().clone() for tensor in inputs)), layer.element)

        read = read_statistics(layer, run)
        if read:
            self.writes[position].append(Writes(buffers=read))

    def _roots(self) -> list[dict[Path, object]]:
        """Return where the walk through the state of each module begins; the loss is the last one's."""
        kind, own = type(self.model).__name__, set(self.model.modules())
        found: list[dict[Path, object]] = []
        for index, (layer, name) in enumerate(zip(self.layers, self.names, strict=True)):
            path = f"{kind}.{name.partition('@')[0]}" if layer.element in own else f"layers()[{index}]"
            found.append({Path(path): layer.element})
        found[-1] |= {
            path: value
            for path, value in roots_of(self.model, self.layers[-1].loss[0]).items()
            if value is not self.model
        }
        return found

    def _stateful(
        self, others: Sequence[Mapping[str, torch.Tensor]], ignored_state: tuple[str, ...], running: Running
    ) -> list[tuple[str, ...]]:
        """Return for every module the Python state of its own that it changes."""
        calls = [functools.partial(self._forward, tensors, running) for tensors in others]
        return stateful_modules(self._roots(), roots_of(self.model, None), calls, ignored_state)

    def _loss_names(self, count: int) -> tuple[str, ...]:
        return ("loss",) if count == 1 else ("loss_sum", "loss_count")

    def _layer(
        self, index: int, previous: tuple[str, ...], outputs: tuple[str, ...], random: bool, writes: Writes | None
    ) -> Layer:
        name, module = self.names[index], self.layers[index]
        parameters, buffers = self.parameters[index], self.buffers[index]
        for attribute, _ in module.named_parameters(remove_duplicate=False):
            if attribute not in parameters:
                raise ModelError(f"layers(): {name} holds the parameter {attribute}, which is none of the model's")
        # Nothing is known of what it computes: no two such layers are taken for equal.
        fingerprint = hashlib.sha256(f"listed {name}".encode()).hexdigest()[:16]
        inputs = module.batch_names + previous
        return Layer(name, (name,), inputs, outputs, parameters, buffers, random, fingerprint, module, writes)

    def _writes(self, index: int, stateful: tuple[str, ...]) -> Writes | None:
        """Return what a layer changes, by the model's names; ``stateful`` are the paths of its Python state.

        Raises:
            ModelError: another layer holds it, too.
        """
        found = merge_writes(self.writes[index]) or Writes()
        parameters, buffers, module = self.parameters[index], self.buffers[index], self.layers[index]
        writes = Writes(
            buffers=_unique(buffers[each] for each in found.buffers if each in buffers),
            parameters=_unique(parameters[each] for each in found.parameters),
            inputs=found.inputs,
            state=(*stateful, *(f"{self.names[index]}: {each}" for each in found.buffers if each not in buffers)),
        )
        changed = {*writes.buffers, *writes.parameters, *writes.inputs}
        changed |= {buffers[each] for each in running_statistics(module) if each in buffers}
        for other, layer in enumerate(self.layers):
            held = {*self.parameters[other].values(), *self.buffers[other].values(), *layer.batch_names}
            if layer is not module and (both := sorted(changed & held)):
                raise ModelError(
                    f"layers(): {self.names[index]} writes {both[0]}, which {self.names[other]} is given too; list "
                    "them as one module, or write a copy"
                )
        return writes if writes != Writes() else None

    def _batch_specs(self, tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
        specs = []
        for name, tensor in tensors.items():
            readers = (self.names[i] for i, layer in enumerate(self.layers) if name in layer.batch_names)
            specs.append(TensorSpec(name, None, tuple(readers), tuple(tensor.shape[1:]), 0, tensor.dtype, False))
        return specs


def _differing(small: torch.Tensor, large: torch.Tensor) -> list[int]:
    """Return the dimensions in which two tensors differ."""
    return [index for index, pair in enumerate(zip(small.shape, large.shape, strict=False)) if pair[0] != pair[1]]


def _first_of(small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    """Return the first sample of a tensor, along the dimension in which that of more samples is larger."""
    differ = _differing(small, large)
    return small.narrow(differ[0], 0, 1).clone() if differ else small


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _model_names(tensors: Iterable[tuple[str, torch.Tensor]], names: Mapping[int, str]) -> dict[str, str]:
    return {attribute: names[id(tensor)] for attribute, tensor in tensors if id(tensor) in names}


def _run(layer: ListedLayer, inputs: tuple[torch.Tensor, ...]) -> tuple[object, bool]:
    state = torch.get_rng_state()
    output = layer.compute(inputs)
    return output, not torch.equal(state, torch.get_rng_state())


def _predictions(
    small: Mapping[str, torch.Tensor], large: Mapping[str, torch.Tensor], rows: tuple[int, int]
) -> tuple[TensorSpec, ...]:
    """Return the model's outputs that have the samples as one dimension."""
    found = []
    for name in small:
        if name in large:
            with contextlib.suppress(ModelError):
                found.append(_spec(name, None, (), small[name], large[name], rows))
    return tuple(found)


def _spec(
    name: str,
    producer: str | None,
    consumers: tuple[str, ...],
    small: torch.Tensor,
    large: torch.Tensor,
    rows: tuple[int, int],
) -> TensorSpec:
    alike = len(small.shape) == len(large.shape)
    differ = _differing(small, large)
    if not alike or len(differ) != 1 or (small.shape[differ[0]], large.shape[differ[0]]) != rows:
        raise ModelError(
            f"layers(): {producer} returns shape {tuple(small.shape)} for {rows[0]} samples and "
            f"{tuple(large.shape)} for {rows[1]}; exactly one dimension must be the samples'"
        )
    sizes = tuple(int(size) for index, size in enumerate(small.shape) if index != differ[0])
    return TensorSpec(name, producer, consumers, sizes, differ[0], small.dtype, small.requires_grad)
