"""Fit: whether a plan is one of the model that is about to be trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest

from autopar.capture.graph import Layer, LayerGraph
from autopar.capture.merged import merged
from autopar.capture.source import UserModel
from autopar.errors import FileError, UsageError
from autopar.formats.plan import Plan
from autopar.runtime.crossings import crossings
from autopar.runtime.precision import crossing_specs

__all__ = ["check_shares", "fitted", "uncovered"]

REPLAN = "run `autopar plan` again, with `stages` for stages of your own"


def uncovered(model: UserModel, plan: Plan) -> list[str]:
    """Say which files of a model the plan, made by an earlier autopar, has no hashes of."""
    if plan.model.imports is not None or not model.imports:
        return []
    first, *others = sorted(model.imports)
    more = f" and {len(others)} more" if others else ""
    return [f"the plan has no hash of {first}{more}, which the model is made of: profile and plan again to have them"]


def fitted(graph: LayerGraph, plan: Plan, model: UserModel) -> LayerGraph:
    """Return a captured model with the layers of a plan, which may be fewer if an earlier autopar made it.

    A tied parameter that an edited plan leaves out would be trained apart by its stages, without any error.

    Raises:
        FileError: the plan's layers, tensors or tied parameters are not the model's; names what differs, and how.
    """
    graph = merged(graph, [name for stage in plan.stages for name in stage.layers])
    _check_layers(graph, plan, model)
    _check_writes(graph, plan)
    stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    found = crossings(crossing_specs(plan, graph), stage_of)
    planned, crossing = (
        {t.name: (t.producer, t.consumers, t.bytes_per_sample, t.dtype, t.gradient) for t in tensors}
        for tensors in (plan.tensors, found)
    )
    _compare("tensor", "producer, consumers, bytes per sample, dtype, gradient", planned, crossing, model)
    held = {}
    for name, layers in graph.tied().items():
        stages = tuple(sorted({stage_of[layer] for layer in layers}))
        parameter = graph.parameter(name)
        if len(stages) > 1 and parameter.requires_grad:
            held[name] = (stages, parameter.nbytes)
    tied = {shared.parameter: (shared.stages, shared.bytes) for shared in plan.tied}
    _compare("tied parameter", "stages, bytes", tied, held, model)
    return graph


def check_shares(layers: Iterable[Layer], plan: Plan, *, synced: bool = False) -> None:
    """Refuse shares of fewer or more samples than a layer takes at once; its operators might go on.

    Args:
        layers: of the model, which the plan has.
        plan: its stages have the shares.
        synced: whether batch normalisation is that of all shares together.

    Raises:
        UsageError: names the layer.
    """
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers}
    for layer in layers:
        index = stage_of[layer.name]
        shares = [plan.micro_batch_size] if synced else plan.stages[index].rows
        few, many = min(shares) < layer.least_rows, layer.most_rows is not None and max(shares) > layer.most_rows
        if few or many:
            limit = f"at least {layer.least_rows}" if few else f"at most {layer.most_rows}"
            count = min(shares) if few else max(shares)
            how = "fewer `micro_batches`, or fewer replicas of" if few else "more `micro_batches`, or more replicas of"
            raise UsageError(
                f"stage {index} gives {count} sample{'s' if count > 1 else ''} of a micro-batch at once to layer "
                f"{layer.name}, which takes {limit}; plan with {how} that stage"
            )


def _check_layers(graph: LayerGraph, plan: Plan, model: UserModel) -> None:
    planned = [name for stage in plan.stages for name in stage.layers]
    found = [layer.name for layer in graph.layers]
    if planned != found:
        pairs = zip_longest(planned, found)
        index, (expected, actual) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        sides = f"{_layer(expected)} in the plan, {_layer(actual)} in the model"
        raise FileError(f"the plan does not fit {model.spec}: layer {index} is {sides}; {REPLAN}")


def _check_writes(graph: LayerGraph, plan: Plan) -> None:
    """Refuse to replicate or to recompute what a forward changes, which an edited plan may ask for."""
    for index, stage in enumerate(plan.stages):
        for layer in map(graph.layer, stage.layers):
            writes = layer.writes
            if writes is None:
                continue
            alike = plan.replicate_state is not None and not writes.once
            if stage.replicas > 1 and writes.single and not alike:
                raise FileError(
                    f"stage {index} has {stage.replicas} replicas of layer {layer.name}, which may have one, since "
                    f"{writes.single}; {REPLAN}"
                )
            if layer.name in stage.recompute and writes.once:
                raise FileError(
                    f"stage {index} recomputes layer {layer.name}, which cannot be, since {writes.once}; {REPLAN}"
                )


def _layer(name: str | None) -> str:
    return "absent" if name is None else repr(name)


def _compare(
    what: str, meaning: str, planned: Mapping[str, object], found: Mapping[str, object], model: UserModel
) -> None:
    for name in sorted(planned.keys() | found.keys()):
        if planned.get(name) != found.get(name):
            sides = f"{planned.get(name, 'absent')} in the plan, {found.get(name, 'absent')} in the model"
            raise FileError(f"the plan does not fit {model.spec}: {what} {name!r} ({meaning}) is {sides}; {REPLAN}")
