"""Layers that are listed, not captured: modules of ``layers(model)``, or of the pipeline plan that a model declares.

    def layers(model):
        return [model.embedding, *model.blocks, model.head]

The first module is called with the model's inputs, each other one with the output before it: a tensor, or a tuple of
tensors, each with the samples as exactly one dimension. The loss gets the last output and the whole batch. All their
parameters must be the model's. Such layers run as they are, checkpointing and own functions included; every rank builds
the model for itself.

A Transformers model may say itself which of its modules form the pipeline (``embed_tokens``, ``layers``, ``norm``,
``lm_head``; its ``base_model_pp_plan``). What its forward does between them (masks, rotary positions, scaling, the
loss) is code of its own, so every layer runs that forward, with what comes before its module passed through, its module
fed with the hidden states that it was sent, and an end at the call of the next module. A note says so; such layers are
used as listed ones.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.capture.graph import Layer, LayerGraph, TensorSpec
from autopar.capture.layers.build import merge_writes, read_statistics, record_writes, running_statistics
from autopar.capture.layers.check import refuse_lasting, stateful_modules
from autopar.capture.model.batch import loss_outputs, model_arguments, named_outputs, named_tensors, rebuild, row_count
from autopar.capture.model.meta import MetaRunner, is_on_meta, meta_runner
from autopar.capture.model.python_state import Path, preserve_state, roots_of, snapshot
from autopar.capture.model.state import preserve_buffers, preserve_parameters
from autopar.errors import ModelError
from autopar.formats.profile import Writes

NOTHING_TO_TRAIN = "the loss depends on no parameter that requires a gradient; there is nothing to train"


class ListedLayer(nn.Module):
    """One module of the list. The first reads the batch, the last computes the loss."""

    def __init__(self, element: nn.Module, template: object, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        super().__init__()
        self.element = element
        self.first = self.last = False
        self.single = True
        """Whether the module before gave one tensor, not a tuple of them."""
        self.loss = [loss]
        self.context: list[Any] = [template, model]
        self.batch_names: tuple[str, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        """Of the model: those of the last layer that have the samples as one dimension."""
        self.loss_names: tuple[str, ...] = ()
        """Of what the last layer gave."""
        self.predicts = False
        """Whether the last layer gives these outputs, and no loss."""
        self.model_outputs: dict[str, torch.Tensor] | None = None
        """Where it is a dict, the last layer puts the model's outputs there."""

    @property
    def model(self) -> nn.Module:
        found: nn.Module = self.context[1]
        return found

    def forward(self, rows: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _tensors_of(self.compute(inputs), self.element)

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
        outputs = loss_outputs(loss(output, batch) if loss else output, loss)
        self.loss_names = tuple(outputs)
        return tuple(outputs.values())

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


def _tensors_of(output: object, element: nn.Module) -> tuple[torch.Tensor, ...]:
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
    others: Sequence[Mapping[str, torch.Tensor]],
    ignored_state: tuple[str, ...],
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
    wrapped = [ListedLayer(element, batch, model, loss) for element in elements]
    for layer in wrapped[:1] if loss is None else (wrapped[0], wrapped[-1]):
        layer.batch_names = tuple(named_tensors(batch))
    return _ListRecorder(model, batch, wrapped, _names(model, elements)).run(others, ignored_state)


def _names(model: nn.Module, elements: Sequence[nn.Module]) -> list[str]:
    known = {id(module): name for name, module in model.named_modules() if name}
    names: list[str] = []
    for index, element in enumerate(elements):
        name = known.get(id(element), f"layers.{index}")
        calls = sum(1 for other in elements[:index] if other is element)
        names.append(f"{name}@{calls + 1}" if calls else name)
    return names


class _Run(NamedTuple):
    """What a forward of the list gave."""

    outputs: list[tuple[torch.Tensor, ...]]
    """By layer."""
    randoms: list[bool]
    """By layer, whether it draws random numbers."""
    predictions: dict[str, torch.Tensor]
    """The model's own outputs."""


class _ListRecorder:
    """Runs the list once for each of two batch sizes, and notes what crosses."""

    def __init__(self, model: nn.Module, batch: object, layers: Sequence[ListedLayer], names: Sequence[str]) -> None:
        self.model, self.tensors, self.layers, self.names = model, named_tensors(batch), layers, names
        layers[0].first = layers[-1].last = True
        parameters = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
        buffers = {id(buffer): name for name, buffer in reversed(list(model.named_buffers()))}
        # Found before anything runs: a forward may replace a buffer.
        self.parameters = [_model_names(layer.named_parameters(remove_duplicate=False), parameters) for layer in layers]
        self.buffers = [_model_names(layer.named_buffers(remove_duplicate=False), buffers) for layer in layers]
        self.writes: list[list[Writes]] = [[] for _ in layers]
        """Of every layer, what its runs changed."""

    def run(
        self,
        others: Sequence[Mapping[str, torch.Tensor]],
        ignored_state: tuple[str, ...],
    ) -> LayerGraph:
        """Return the graph of the list; on ``others`` it shows its Python state."""
        on_meta, least_rows = is_on_meta(self.model), [1] * len(self.layers)
        roots = {path: value for each in self._roots() for path, value in each.items()}
        with (
            preserve_state(roots, ignored_state) as start,
            meta_runner(self.model, self.layers) if on_meta else contextlib.nullcontext() as stand_ins,
        ):
            small = self._forward(self.tensors, stand_ins)
            if not small.outputs[-1][0].requires_grad:
                raise ModelError(NOTHING_TO_TRAIN)
            large = self._forward({name: torch.cat((each, each)) for name, each in self.tensors.items()}, stand_ins)
            calls = [functools.partial(self._forward, tensors, stand_ins) for tensors in others]
            stateful = stateful_modules(self._roots(), roots_of(self.model, None), calls, ignored_state)
            if not on_meta:
                # Stand-ins tell nothing of samples.
                least_rows = self._least_rows(small, large)
        if any(stateful):
            refuse_lasting(start, snapshot(roots), stateful)
        return self._graph(small, large, stateful, least_rows)

    def _graph(
        self, small: _Run, large: _Run, stateful: Sequence[tuple[str, ...]], least_rows: Sequence[int]
    ) -> LayerGraph:
        rows = row_count(self.tensors)
        sizes = (rows, 2 * rows)
        self.layers[-1].outputs = _predictions(small.predictions, large.predictions, sizes)
        layers, specs = [], self._batch_specs()
        previous: tuple[str, ...] = ()
        for index, (name, own, more) in enumerate(zip(self.names, small.outputs, large.outputs, strict=True)):
            readers = tuple(self.names[index + 1 : index + 2])
            outputs = tuple(f"{name}:{place}" for place in range(len(own)))
            if not readers:
                outputs = self.layers[-1].loss_names
            writes = self._writes(index, stateful[index])
            layer = self._layer(index, previous, outputs, small.randoms[index], writes)
            layers.append(replace(layer, least_rows=least_rows[index]))
            if readers:
                specs += [_spec(*each, readers, sizes, name) for each in zip(outputs, own, more, strict=True)]
            previous = outputs
        return LayerGraph(
            layers=tuple(layers),
            tensors=tuple(specs),
            inputs=tuple(self.tensors),
            outputs=previous,
            portable=False,
            on_meta=is_on_meta(self.model),
        )

    def _forward(self, tensors: Mapping[str, torch.Tensor], stand_ins: MetaRunner | None) -> _Run:
        run = _Run([], [], {})
        self.layers[-1].model_outputs = run.predictions
        for position, layer in enumerate(self.layers):
            inputs = tuple(tensors[name].clone() for name in layer.batch_names)
            if not layer.first:
                inputs += tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in run.outputs[-1])
            with record_writes(layer, dict(zip(layer.batch_names, inputs, strict=False))) as changes:
                output, random = stand_ins.run(layer, layer.compute, inputs) if stand_ins else _run(layer, inputs)
            self.writes[position] += changes
            # Where something else reads running statistics than batch normalisation, they are written buffers.
            if statistics := read_statistics(layer, functools.partial(_run_copies, layer, inputs)):
                self.writes[position].append(Writes(buffers=statistics))
            run.randoms.append(random)
            if not layer.last:
                self.layers[position + 1].single = isinstance(output, torch.Tensor)
            run.outputs.append(_tensors_of(output, layer.element))
        self.layers[-1].model_outputs = None
        return run

    def _least_rows(self, small: _Run, large: _Run) -> list[int]:
        """Return how many samples every layer takes at least: two, where it raises for the first of two."""
        found = []
        before: tuple[torch.Tensor, ...] = ()
        for layer, own, more in zip(self.layers, small.outputs, large.outputs, strict=True):
            inputs = tuple(self.tensors[name][:1].clone() for name in layer.batch_names)
            try:
                with preserve_buffers(layer), preserve_parameters(layer):
                    layer.compute(inputs + before)
                found.append(1)
            except Exception:
                found.append(2)
            before = tuple(_first_of(one.detach(), other) for one, other in zip(own, more, strict=True))
        return found

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
            buffers=tuple(dict.fromkeys(buffers[each] for each in found.buffers if each in buffers)),
            parameters=tuple(dict.fromkeys(parameters[each] for each in found.parameters)),
            inputs=found.inputs,
            state=(*stateful, *(f"{self.names[index]}: {each}" for each in found.buffers if each not in buffers)),
        )
        changed = {*writes.buffers, *writes.parameters, *writes.inputs}
        changed |= {buffers[each] for each in running_statistics(module) if each in buffers}
        for other, layer in enumerate(self.layers):
            read = {*self.parameters[other].values(), *self.buffers[other].values(), *layer.batch_names}
            if layer is not module and (both := sorted(changed & read)):
                raise ModelError(
                    f"layers(): {self.names[index]} writes {both[0]}, which {self.names[other]} is given too; list "
                    "them as one module, or write a copy"
                )
        return writes if writes != Writes() else None

    def _batch_specs(self) -> list[TensorSpec]:
        specs = []
        for name, tensor in self.tensors.items():
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


def _model_names(tensors: Iterable[tuple[str, torch.Tensor]], names: Mapping[int, str]) -> dict[str, str]:
    return {attribute: names[id(tensor)] for attribute, tensor in tensors if id(tensor) in names}


def _run(layer: ListedLayer, inputs: tuple[torch.Tensor, ...]) -> tuple[object, bool]:
    state = torch.get_rng_state()
    output = layer.compute(inputs)
    return output, not torch.equal(state, torch.get_rng_state())


def _run_copies(layer: ListedLayer, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return _tensors_of(layer.compute(tuple(tensor.detach().clone() for tensor in inputs)), layer.element)


def _predictions(
    small: Mapping[str, torch.Tensor], large: Mapping[str, torch.Tensor], rows: tuple[int, int]
) -> tuple[TensorSpec, ...]:
    """Return the model's outputs that have the samples as one dimension."""
    found = []
    for name in small:
        if name in large:
            with contextlib.suppress(ModelError):
                found.append(_spec(name, small[name], large[name], (), rows))
    return tuple(found)


def _spec(
    name: str,
    small: torch.Tensor,
    large: torch.Tensor,
    consumers: tuple[str, ...],
    rows: tuple[int, int],
    producer: str | None = None,
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


_NOTE = "layers are those of the pipeline plan that the model declares, since it could not be captured"


@dataclass
class _PlanModule:
    """A module of the plan, and what its call looked like."""

    name: str
    module: nn.Module
    results: int = 0
    """Length of the tuple that it returns; 0 for a tensor."""


class _NextLayer(BaseException):
    """The next layer's module was called: what it was given is this layer's output."""

    def __init__(self, hidden_states: torch.Tensor) -> None:
        super().__init__()
        self.hidden_states = hidden_states


class _DeclaredLayer(ListedLayer):
    """One module of the plan, run by the model's own forward."""

    def __init__(
        self,
        parts: list[_PlanModule],
        index: int,
        template: object,
        model: nn.Module,
        loss: Callable[..., Any] | None,
    ) -> None:
        super().__init__(parts[index].module, template, model, loss)
        self.parts = (parts, index)
        self.batch_names = tuple(named_tensors(template))

    def compute(self, inputs: tuple[torch.Tensor, ...]) -> object:
        template, model = self.context
        count = len(self.batch_names)
        batch = rebuild(template, dict(zip(self.batch_names, inputs[:count], strict=True)))
        positional, named = model_arguments(model, batch, self.loss[0] is not None)
        with self._only(None if self.first else inputs[count]):
            try:
                output = model(*positional, **named)
            except _NextLayer as reached:
                return reached.hidden_states
        return self.end(output, batch)

    def predict(self) -> None:
        # The model's forward reads the batch, whichever module computes.
        self.predicts = True

    @contextlib.contextmanager
    def _only(self, hidden_states: torch.Tensor | None) -> Iterator[None]:
        """Let only this layer's module compute, from the given hidden states."""
        parts, index = self.parts
        replaced = {}
        if hidden_states is not None:
            replaced = {part.module: _passing(part, hidden_states) for part in parts[:index]}
            own = parts[index].module
            replaced[own] = _with_hidden_states(own.forward, hidden_states)
        if index + 1 < len(parts):
            replaced[parts[index + 1].module] = _raise_next_layer
        for module, forward in replaced.items():
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module in replaced:
                del module.__dict__["forward"]


def _passing(part: _PlanModule, hidden_states: torch.Tensor) -> Callable[..., Any]:
    return lambda *_, **__: (hidden_states, *[None] * (part.results - 1)) if part.results else hidden_states


def _with_hidden_states(forward: Callable[..., Any], hidden_states: torch.Tensor) -> Callable[..., Any]:
    def call(*arguments: object, **kwargs: object) -> object:
        if arguments:
            return forward(hidden_states, *arguments[1:], **kwargs)
        return forward(**{**kwargs, "hidden_states": hidden_states})

    return call


def _raise_next_layer(*arguments: torch.Tensor, **kwargs: torch.Tensor) -> None:
    raise _NextLayer(arguments[0] if arguments else kwargs["hidden_states"])


def declared_layers(
    model: nn.Module,
    batch: object,
    loss: Callable[..., Any] | None,
    others: Sequence[Mapping[str, torch.Tensor]],
    ignored_state: tuple[str, ...],
) -> LayerGraph | None:
    """Make a layer graph of the pipeline plan that a model declares.

    None if there is none, a module of it is not called exactly once, or trained parameters are not theirs.
    """
    parts = _parts(model)
    if len(parts) < 2 or any("forward" in part.module.__dict__ for part in parts):
        return None
    order = _observe(model, batch, loss, parts)
    covered = {id(value) for part in parts for value in part.module.parameters()}
    trained = {id(value) for value in model.parameters() if value.requires_grad}
    if sorted(map(id, order)) != sorted(map(id, parts)) or not trained <= covered:
        return None
    layers = [_DeclaredLayer(order, index, batch, model, loss) for index in range(len(order))]
    found = _ListRecorder(model, batch, layers, [part.name for part in order]).run(others, ignored_state)
    return replace(found, notes=(_NOTE,))


def _parts(model: nn.Module) -> list[_PlanModule]:
    parts: list[_PlanModule] = []
    for name in _declared_paths(model):
        try:
            found = model.get_submodule(name)
        except AttributeError:
            continue
        inner = found.named_children() if isinstance(found, nn.ModuleList) else [("", found)]
        parts += [_PlanModule(f"{name}.{key}" if key else name, module) for key, module in inner]
    return parts


def _declared_paths(model: nn.Module) -> list[str]:
    """Return the paths of the modules that a model's class and its configuration declare."""
    own: Mapping[str, Any] = getattr(model, "_pp_plan", None) or {}
    of_base: Mapping[str, Any] = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    return list(dict.fromkeys((*own, *(f"{prefix}.{name}" for name in of_base))))


def _observe(
    model: nn.Module, batch: object, loss: Callable[..., Any] | None, parts: list[_PlanModule]
) -> list[_PlanModule]:
    """Run the model once; return its parts in the order in which they are called."""
    order: list[_PlanModule] = []

    def note(part: _PlanModule, module: nn.Module, arguments: object, output: object) -> None:
        part.results = len(output) if isinstance(output, tuple) else 0
        order.append(part)

    def call(tensors: Sequence[torch.Tensor]) -> None:
        whole = rebuild(batch, dict(zip(named_tensors(batch), tensors, strict=True)))
        positional, named = model_arguments(model, whole, loss is not None)
        model(*positional, **named)

    handles = [part.module.register_forward_hook(functools.partial(note, part)) for part in parts]
    tensors = list(named_tensors(batch).values())
    try:
        if not is_on_meta(model):
            call(tensors)
            return order
        # Larger than memory, it is run for its shapes, or else given values part by part.
        with meta_runner(model) as stand_ins:
            try:
                stand_ins.observe(call, tensors)
            except Exception:
                order.clear()
                stand_ins.observe_in_turn(lambda: call(tensors), [part.module for part in parts])
    finally:
        for handle in handles:
            handle.remove()
    return order
