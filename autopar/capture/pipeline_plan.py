"""The pipeline plan that a Transformers model declares: its modules one after another, where capturing fails.

Such a model says which of its modules form the pipeline (``embed_tokens``, ``layers``, ``norm``, ``lm_head``; its
``base_model_pp_plan``). What its forward does between them (masks, rotary positions, scaling, the loss) is code of its
own, so every layer runs that forward, with what comes before its module passed through, its module fed with the hidden
states that it was sent, and an end at the call of the next module. A note says so; such layers are used as listed ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture.batch import model_arguments, named_tensors, rebuild
from autopar.capture.fallback import ListedLayer, Listing
from autopar.capture.graph import LayerGraph
from autopar.capture.meta import hollow_runner, is_hollow

NOTE = "layers are those of the pipeline plan that the model declares, since it could not be captured"


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
    return Listing(model, batch, layers, [part.name for part in order]).run(others, ignored_state, (NOTE,))


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
        if not is_hollow(model):
            call(tensors)
            return order
        # Larger than memory, it is run for its shapes, or else given values part by part.
        with hollow_runner(model) as stand_ins:
            try:
                stand_ins.observe(call, tensors)
            except Exception:
                order.clear()
                stand_ins.observe_in_turn(lambda: call(tensors), [part.module for part in parts])
    finally:
        for handle in handles:
            handle.remove()
    return order
