"""Workspace: what one process per host prepares for its ranks: the captured graph and the initial weights.

In come a model and its plan, which must be of that model; out comes a folder that every rank reads its own part from.
Weights are those of ``model()``, those of a folder, or, where the model is larger than memory, made module by module.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from autopar.capture.cache.recall import build_and_capture, recall
from autopar.capture.cache.store import load_graph, merge_layers, save_graph
from autopar.capture.graph import LayerGraph
from autopar.capture.layers.evaluation import EvaluationGraph, capture_evaluation
from autopar.capture.model.batch import seed_data
from autopar.capture.model.optimizer import Settings
from autopar.capture.model.source import UserModel
from autopar.code import check_code
from autopar.errors import CaptureError, FileError, ModelError, UsageError
from autopar.formats.plan import Plan
from autopar.runtime.checkpoint import weights
from autopar.runtime.checkpoint.saving import state_keys
from autopar.runtime.stage.layers import crossing_specs, crossings
from autopar.runtime.stage.parameters import first_stages
from autopar.runtime.update import check_together, whole_settings

_METHODS = ("reset_parameters", "_reset_parameters")


def host_memory_bytes() -> int:
    """Return the memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def given_names(module: nn.Module, folder: Path) -> dict[str, str]:
    """Return, for every parameter of a model and for buffers that are there, the name of its tensor in a folder.

    A parameter that the model has under several names may be there under any of them. Nothing is read but headers.

    Raises:
        FileError: a parameter is missing, or another shape or type is there.
    """
    held = weights.shapes(folder)
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {name: name for name, _ in module.named_buffers() if name in held}
    for name, parameter in module.named_parameters():
        known = [each for each in names[id(parameter)] if each in held]
        if not known:
            raise FileError(f"{folder}: holds no parameter {name!r} of the model")
        if held[known[0]] != (wanted := weights.shape_of(parameter)):
            raise FileError(f"{folder}: parameter {name!r} is {_text(held[known[0]])}, the model's is {_text(wanted)}")
        found[name] = known[0]
    return found


def _text(shape: tuple[tuple[int, ...], str]) -> str:
    return f"{shape[0]} {shape[1]}"


def made_by_module(module: nn.Module, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Give the parameters of a model that has none values, one module after the other, and take them away again.

    A module makes its own by ``reset_parameters``, and by the model's ``_init_weights`` where it has one, as models of
    the Transformers library do; the generator is seeded with the module's name (docs/howto/verify.md).

    Raises:
        UsageError: a module has parameters, but nothing that makes their values.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    seen: set[int] = set()
    for path, part in module.named_modules():
        shapes = {name: value for name, value in part._parameters.items() if value is not None}
        new = {name: value for name, value in shapes.items() if id(value) not in seen}
        seen |= {id(value) for value in new.values()}
        if new:
            made = _initial_values(module, path, part, shapes, seed)
            yield {names[id(value)]: made[name] for name, value in new.items()}
            del made


def _initial_values(
    model: nn.Module, path: str, part: nn.Module, shapes: Mapping[str, nn.Parameter], seed: int
) -> dict[str, torch.Tensor]:
    """Return values for the parameters of one module."""
    makers = [getattr(part, name) for name in _METHODS if callable(getattr(part, name, None))]
    shared = getattr(model, "_init_weights", None)
    seed_data(seed, "initial", path)
    try:
        for name, shape in shapes.items():
            # What nobody makes is found by what it is filled with.
            filled = torch.full(shape.shape, float("nan"), dtype=shape.dtype)
            part._parameters[name] = nn.Parameter(filled, requires_grad=shape.requires_grad)
        with torch.no_grad():
            for make in makers:
                make()
            if callable(shared):
                shared(part)
        made = {name: part._parameters[name].detach() for name in shapes}  # type: ignore[union-attr]
    finally:
        part._parameters.update(shapes)
    left = [name for name, value in made.items() if value.isnan().any()]
    if left:
        where = f"{path}.{left[0]}" if path else left[0]
        raise UsageError(
            f"the model is larger than this host's memory, and nothing makes its parameter {where} by itself; give "
            f"{type(part).__name__} a reset_parameters(), or pass `weights`"
        )
    return made


_REPLAN = "run `autopar plan` again, with `stages` for stages of your own"


def _missing_hash_notes(model: UserModel, plan: Plan) -> list[str]:
    """Say which files of a model the plan, made by an earlier autopar, has no hashes of."""
    if plan.model.imports is not None or not model.imports:
        return []
    first, *others = sorted(model.imports)
    more = f" and {len(others)} more" if others else ""
    return [f"the plan has no hash of {first}{more}, which the model is made of: profile and plan again to have them"]


def fit_to_plan(graph: LayerGraph, plan: Plan, model: UserModel) -> LayerGraph:
    """Return a captured model with the layers of a plan, which may be fewer if an earlier autopar made it.

    A tied parameter that an edited plan leaves out would be trained apart by its stages, without any error.

    Raises:
        FileError: the plan's layers, tensors or tied parameters are not the model's; names what differs, and how.
    """
    graph = merge_layers(graph, [name for stage in plan.separate[0].stages for name in stage.layers])
    for each in plan.separate:
        _check_fit(graph, each, model)
    return graph


def _check_fit(graph: LayerGraph, plan: Plan, model: UserModel) -> None:
    """Refuse a pipeline that is not of a captured model."""
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
    for name, layers in graph.tied_parameters().items():
        stages = tuple(sorted({stage_of[layer] for layer in layers}))
        parameter = graph.parameter(name)
        if len(stages) > 1 and parameter.requires_grad:
            held[name] = (stages, parameter.nbytes)
    tied = {shared.parameter: (shared.stages, shared.bytes) for shared in plan.tied}
    _compare("tied parameter", "stages, bytes", tied, held, model)


def _check_layers(graph: LayerGraph, plan: Plan, model: UserModel) -> None:
    planned = [name for stage in plan.stages for name in stage.layers]
    found = [layer.name for layer in graph.layers]
    if planned != found:
        pairs = zip_longest(planned, found)
        index, (expected, actual) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        sides = f"{_layer(expected)} in the plan, {_layer(actual)} in the model"
        raise FileError(f"the plan does not fit {model.spec}: layer {index} is {sides}; {_REPLAN}")


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
                    f"{writes.single}; {_REPLAN}"
                )
            if layer.name in stage.recompute and writes.once:
                raise FileError(
                    f"stage {index} recomputes layer {layer.name}, which cannot be, since {writes.once}; {_REPLAN}"
                )


def _layer(name: str | None) -> str:
    return "absent" if name is None else repr(name)


def _compare(
    what: str, meaning: str, plan_entries: Mapping[str, object], model_entries: Mapping[str, object], model: UserModel
) -> None:
    for name in sorted(plan_entries.keys() | model_entries.keys()):
        if plan_entries.get(name) != model_entries.get(name):
            sides = f"{plan_entries.get(name, 'absent')} in the plan, {model_entries.get(name, 'absent')} in the model"
            raise FileError(f"the plan does not fit {model.spec}: {what} {name!r} ({meaning}) is {sides}; {_REPLAN}")


GRAPH, _EVALUATION, _WEIGHTS, _FACTS = "graph", "evaluation", "weights", "facts.json"
_GIVEN = "given"
"""A link to the folder of given weights."""


def evaluation_samples(model: UserModel, seed: int) -> Dataset[Any]:
    """Return what a model is evaluated on between the steps of a run with a seed.

    Raises:
        ModelError: there is none, or fewer than two samples.
    """
    seed_data(seed, "evaluation")
    found = model.dataset("evaluation_dataset")
    if model.sample_count(found) < 2:
        raise ModelError(f"{model.path}: evaluation_dataset() needs at least 2 samples")
    return found


class _WorkspaceFacts(NamedTuple):
    """What ranks know of the model beside its graph and its weights; plain data."""

    notes: list[str]
    """What a reader of the report must know of the model, and of how it was captured."""
    names_read: list[str]
    """The names in the code of forward and loss; none of listed modules, which run as they are."""
    settings: Settings | None
    """What the optimizer gives every parameter of the whole model; None where that is not known."""
    keys: dict[str, str]
    """The keys of the model's ``state_dict``, each with the parameter or buffer that it names."""
    given_names: dict[str, str]
    """The names that parameters and buffers have in the folder of given weights."""


@dataclass(frozen=True)
class Workspace:
    """A folder of this host, there for the length of a run."""

    folder: Path

    def prepare(self, model: UserModel, plan: Plan, weights_folder: Path | None, *, evaluates: bool = False) -> str:
        """Capture the model, and write its graph and initial weights, or where ranks find them.

        The model is built with values only if its own are asked for, and the host's memory holds them.

        Args:
            model: the user's file.
            plan: what the graph must fit.
            weights_folder: has weights that replace those of ``model()``.
            evaluates: whether the model is evaluated, too, on its file's ``evaluation_dataset()``.

        Returns:
            Where the initial weights are from.

        Raises:
            ModelError: there is nothing to evaluate it on.
            FileError: the model has changed since it was planned for, or the weights do not fit it.
            UsageError: a model larger than memory has parameters that nothing but ``model()`` makes.
        """
        check_code(model.path, model.sha256, model.imports, plan.model)
        (self.folder / _WEIGHTS).mkdir()
        module, graph, given, source = self._capture(model, plan, weights_folder)
        graph = fit_to_plan(graph, plan, model)
        check_together(model, module, graph, plan)
        facts = _WorkspaceFacts(
            [*graph.notes, *_missing_hash_notes(model, plan)],
            sorted(graph.names_read or ()),
            whole_settings(model, module, graph, plan),
            state_keys(module),
            given,
        )
        (self.folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
        if graph.portable:
            save_graph(graph, self.folder / GRAPH)
        if evaluates:
            batch = model.load_batch(evaluation_samples(model, plan.seed), range(2))
            found = capture_evaluation(module, batch, model.loss, graph)
            if graph.portable:
                save_graph(found.as_layer_graph(), self.folder / _EVALUATION)
        return source

    def _capture(
        self, model: UserModel, plan: Plan, weights_folder: Path | None
    ) -> tuple[nn.Module, LayerGraph, dict[str, str], str]:
        """Return the model, its graph, names of given weights, and where initial ones are from, having written them."""
        seed, layers = plan.seed, [name for stage in plan.stages for name in stage.layers]
        if weights_folder is None and not _too_large(model, seed):
            module = model.build(seed)
            graph = recall(model, module, seed, layers, shapes=_splits(plan))
            self._write(dict(module.named_parameters()) | dict(module.named_buffers()))
            return module, graph, {}, f"model(), seed {seed}"
        module, graph = build_and_capture(model, seed, layers, shapes=_splits(plan))
        if weights_folder is not None:
            given = given_names(module, weights_folder)
            (self.folder / _GIVEN).symlink_to(weights_folder.resolve(), target_is_directory=True)
            self._write({name: buffer for name, buffer in module.named_buffers() if name not in given})
            return module, graph, given, f"files in {weights_folder}"
        # A file a module: never are two modules' held.
        parts = enumerate(chain([dict(module.named_buffers())], made_by_module(module, seed)))
        names = ((self.folder / _WEIGHTS / f"module-{index:05d}.safetensors", part) for index, part in parts)
        weights.publish(self.folder / _WEIGHTS, [weights.write(file, part, durable=False) for file, part in names])
        source = f"made module by module, seed {seed}: model() is larger than the host's memory"
        return module, graph, {}, source

    @cached_property
    def facts(self) -> _WorkspaceFacts:
        """What is known of the model."""
        return _WorkspaceFacts(*json.loads((self.folder / _FACTS).read_text(encoding="utf-8")))

    def graph(self, model: UserModel, plan: Plan, rank: int | None = None) -> LayerGraph:
        """Return the graph for one rank, or for all, without weights; of others' layers there is nothing that runs."""
        if not (self.folder / GRAPH).exists():
            return build_and_capture(model, plan.seed)[1]
        if rank is None or _splits(plan):
            return load_graph(self.folder / GRAPH)
        own = {name for index in plan.ownership.ranks[rank].stages for name in plan.stages[index].layers}
        return load_graph(self.folder / GRAPH, only=own, shapes=False)

    def evaluation(self, model: UserModel, graph: LayerGraph) -> EvaluationGraph:
        """Return the model with its loss in evaluation mode, without weights, given its graph as it is trained."""
        if graph.portable:
            return EvaluationGraph.of(load_graph(self.folder / _EVALUATION))
        return capture_evaluation(nn.Module(), None, model.loss, graph)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return initial parameters and buffers by name."""
        wanted, known = set(names), self.facts.given_names
        there = {known[name]: name for name in wanted & known.keys()}
        found = weights.read(self.folder / _WEIGHTS, wanted - known.keys())
        if there:
            given = weights.read(self.folder / _GIVEN, there)
            found |= {there[name]: tensor for name, tensor in given.items()}
        return found

    def names(self) -> set[str]:
        """Return the names of all parameters and buffers of the model."""
        return weights.shapes(self.folder / _WEIGHTS).keys() | self.facts.given_names.keys()

    def unread(self, plan: Plan, graph: LayerGraph) -> dict[str, torch.Tensor]:
        """Return the initial parameters and buffers that no layer reads."""
        return self.read(self.names().difference(first_stages(plan, graph)))

    def _write(self, state: dict[str, torch.Tensor]) -> None:
        values = {name: value.detach() for name, value in state.items()}
        weights.write(self.folder / _WEIGHTS / weights.SINGLE, values, durable=False, hashed=False)


def _splits(plan: Plan) -> bool:
    """Tell whether layers are split, each by the shapes in its graph."""
    return any(stage.tensor_parallel > 1 for stage in plan.stages)


def _too_large(model: UserModel, seed: int) -> bool:
    """Tell whether the host's memory cannot hold the model's parameters."""
    try:
        shapes = model.build(seed, on_meta=True)
    except (CaptureError, ModelError):
        # It is built with them, or what is wrong with it is said where it is.
        return False
    return sum(parameter.nbytes for parameter in shapes.parameters()) > host_memory_bytes()
