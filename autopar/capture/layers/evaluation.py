"""Evaluation: the same layers as they compute in evaluation mode, up to the loss or to the model's own outputs.

The model is exported a second time, in evaluation mode, and cut where the calls of the training layers' modules begin,
so that every stage evaluates with the parameters that it trains. Layers that are listed, and not captured, are modules:
copies of them are in evaluation mode, and hold the same parameters.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import nn
from torch.export import ExportedProgram

from autopar.capture.graph import Layer, LayerGraph, TensorSpec
from autopar.capture.layers.build import SegmentedProgram, build_layers, right_for_one, spec_of, tensor_specs
from autopar.capture.layers.export import convert_user_errors, export_rows, sorted_inputs
from autopar.capture.layers.fallback import ListedLayer
from autopar.capture.layers.segment import batch_dim, segment_like
from autopar.capture.model.batch import StepModule, named_outputs, named_tensors
from autopar.capture.model.changes import names_read
from autopar.capture.model.effects import watch
from autopar.capture.model.meta import fake_parameters, is_on_meta
from autopar.capture.model.python_state import preserve_state, roots_of
from autopar.capture.model.state import preserve_buffers, preserve_modes, preserve_parameters
from autopar.errors import CaptureError, ModelError
from autopar.signals import unwinding_aborts

_NO_OUTPUT = "the model's forward returns no tensor that has the samples as one dimension"


@dataclass(frozen=True, eq=False)
class EvaluationGraph:
    """Layers in evaluation mode, under the names of the training layers that they are cut like."""

    layers: tuple[Layer, ...]
    """Those of which anything is left: a layer of nothing but dropout is not among them."""
    tensors: tuple[TensorSpec, ...]
    """Every tensor that a layer reads, model inputs first."""
    inputs: tuple[str, ...]
    """Names of all tensors of a batch."""
    results: tuple[str, ...]
    """Names of what the last layer gives: the loss outputs, or the model's."""
    specs: tuple[TensorSpec, ...] = ()
    """Of the model's outputs."""
    names_read: frozenset[str] | None = None
    """Names in the code that was run; none where that is not known."""

    @classmethod
    def of(cls, graph: LayerGraph) -> Self:
        """Return what :meth:`as_layer_graph` gave."""
        return cls(graph.layers, graph.tensors, graph.inputs, graph.outputs, names_read=graph.names_read)

    def as_layer_graph(self) -> LayerGraph:
        """Return one that computes a loss as a graph that can be saved; nothing is trained by it."""
        return LayerGraph(self.layers, self.tensors, self.inputs, self.results, names_read=self.names_read)


@unwinding_aborts()
def capture_evaluation(
    model: nn.Module, batch: object, loss: Callable[..., Any] | None, training_graph: LayerGraph
) -> EvaluationGraph:
    """Capture a model with its loss in evaluation mode, cut like ``training_graph``.

    Raises:
        ModelError: the model raises in evaluation mode.
        CaptureError: it cannot be captured in this mode, or not be cut so.
    """
    if not training_graph.portable:
        return _copy_listed_layers(training_graph)
    step = StepModule(model, batch, loss)
    program, names = _export(step, batch)
    return replace(_cut(program, step, batch, training_graph, training_graph.outputs), names_read=names)


@unwinding_aborts()
def capture_prediction(
    model: nn.Module,
    batch: object,
    loss: Callable[..., Any] | None,
    training_graph: LayerGraph,
    *,
    training: bool = False,
) -> EvaluationGraph:
    """Capture a model without its loss in evaluation mode (or as it is trained), cut like ``training_graph``.

    Outputs without the samples as one dimension (a loss among them) are left out.

    Raises:
        ModelError: as :func:`capture_evaluation`; or no output is left.
        CaptureError: as :func:`capture_evaluation`.
    """
    if not training_graph.portable:
        return _predicting(_copy_listed_layers(training_graph, training=training))
    step = _OutputModule(model, batch, loss)
    program, names = _export(step, batch, training=training)
    inputs, _ = sorted_inputs(program, model, step.names)
    end: Any = program.graph.output_node()
    named = zip(step.outputs.value, end.args[0], strict=True)
    kept = {name: node for name, node in named if batch_dim(node.meta.get("val"), inputs.symbol) is not None}
    if not kept:
        raise ModelError(_NO_OUTPUT)
    end.args = (tuple(kept.values()),)
    specs = tuple(spec_of(name, None, (), node.meta["val"], inputs.symbol) for name, node in kept.items())
    output_mask = [name in kept for name in step.outputs.value]
    found = _cut(program, step, batch, training_graph, tuple(kept), output_mask, training=training)
    return replace(found, specs=specs, names_read=names)


@contextlib.contextmanager
def _in_mode(step: StepModule, *, training: bool) -> Iterator[None]:
    """Put a model into evaluation mode, or one that is there as a whole into training mode, inside the block."""
    with preserve_modes(step.model.modules()):
        if not training:
            step.eval()
        elif not step.model.training:
            step.train()
        yield


def _export(
    step: StepModule, batch: object, *, training: bool = False
) -> tuple[ExportedProgram, frozenset[str] | None]:
    """Return a module in one mode, exported, and the names in the code that it ran, if that is known."""
    model, tensors = step.model, named_tensors(batch)
    on_meta = is_on_meta(model)
    # Export leaves copies of containers that are attributes in their place.
    with (
        _in_mode(step, training=training),
        preserve_buffers(model),
        preserve_state(roots_of(model, None), ()),
        fake_parameters(model) if on_meta else contextlib.nullcontext(),
    ):
        if not on_meta:
            # An ordinary forward meets the user's mistakes.
            mistakes = convert_user_errors(f"the model's forward in {'training' if training else 'evaluation'} mode")
            with preserve_parameters(model), mistakes, torch.no_grad(), watch() as codes:
                step(*(tensor.clone() for tensor in tensors.values()))
        return export_rows(step, tensors), None if on_meta else names_read(codes)


def _cut(
    program: ExportedProgram,
    step: StepModule,
    batch: object,
    training_graph: LayerGraph,
    results: tuple[str, ...],
    output_mask: Sequence[bool] | None = None,
    *,
    training: bool = False,
) -> EvaluationGraph:
    """Cut a program; its layers are given two samples at least where the model does something else with one."""
    model = step.model
    inputs, values = sorted_inputs(program, model, step.names)
    segments = segment_like(
        program.graph, inputs, model, [(layer.name, *layer.modules) for layer in training_graph.layers]
    )
    if not segments:
        mode = "training" if training else "evaluation"
        raise CaptureError(f"nothing that the model computes in {mode} mode depends on its parameters and inputs")
    exported = SegmentedProgram(program, inputs, segments, training_graph.outputs)
    layers = build_layers(exported, values, results)
    tensors = tensor_specs(exported, layers)
    # What is trained is given as many samples as ever.
    if not training and not is_on_meta(model) and layers[0].least_rows == 1:
        with _in_mode(step, training=False):
            if not right_for_one(step, layers, named_tensors(batch), output_mask):
                layers = [replace(layer, least_rows=2) for layer in layers]
    return EvaluationGraph(tuple(layers), tuple(tensors), step.names, results)


def _copy_listed_layers(training_graph: LayerGraph, *, training: bool = False) -> EvaluationGraph:
    """Copy listed layers with all that they are made of, parameters and buffers apart, into evaluation mode."""
    for layer in training_graph.layers:
        if layer.stateful:
            raise CaptureError(
                f"layers(): {layer.stateful[0]} changes with every forward, and a copy of {layer.name} in evaluation "
                "mode would not have it as training left it; keep it in a buffer"
            )
    modules = [layer.module for layer in training_graph.layers]
    models = [part for layer in modules for part in (layer, cast(ListedLayer, layer).model)]
    shared = {id(tensor): tensor for part in models for tensor in (*part.parameters(), *part.buffers())}
    copies = copy.deepcopy(modules, shared)
    for module in () if training else copies:
        module.eval()
        cast(ListedLayer, module).model.eval()
    # What a module takes at least in training, for batch normalisation, says nothing of evaluation.
    pairs = zip(training_graph.layers, copies, strict=True)
    layers = [replace(layer, module=module, least_rows=1) for layer, module in pairs]
    return EvaluationGraph(tuple(layers), training_graph.tensors, training_graph.inputs, training_graph.outputs)


def _predicting(graph: EvaluationGraph) -> EvaluationGraph:
    """Have the last listed layer give the model's outputs in place of the loss."""
    last = graph.layers[-1]
    module = cast(ListedLayer, last.module)
    if not module.outputs:
        raise ModelError(_NO_OUTPUT)
    before = module.batch_names
    module.predict()
    unread = set(before).difference(module.batch_names)
    names = tuple(spec.name for spec in module.outputs)
    inputs = tuple(name for name in last.inputs if name not in unread)
    layers = (*graph.layers[:-1], replace(last, inputs=inputs, outputs=names))
    return replace(graph, layers=layers, results=names, specs=module.outputs)


class _OutputModule(StepModule):
    """A model without its loss: from the tensors of a batch, in order, to the tensors that its forward returns."""

    def results(self, output: object, batch: object) -> dict[str, torch.Tensor]:
        return named_outputs(output)
