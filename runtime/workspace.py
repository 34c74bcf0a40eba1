"""Workspace: what one process per host prepares for its ranks: the captured graph and the initial weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.optimizer_settings import Settings
from autopar.capture.outline import outline
from autopar.capture.own_code import check_code
from autopar.capture.source import UserModel
from autopar.capture.store import load_graph, save_graph
from autopar.errors import CaptureError, ModelError
from autopar.formats.plan import Plan
from autopar.runtime import weights
from autopar.runtime.fit import fitted, uncovered
from autopar.runtime.initial import given_names, host_memory_bytes, write_made
from autopar.runtime.stepping import check_together, whole_settings

__all__ = ["Workspace"]

GRAPH, WEIGHTS = "graph", "weights"
GIVEN, NAMES = "given", "given.json"
"""A link to the folder of given weights, and the names that parameters and buffers have there."""
SETTINGS = "optimizer.json"
"""What the optimizer gives every parameter of the whole model."""
NOTES = "notes.json"
"""What a reader of the report must know of how the model was captured."""


@dataclass(frozen=True)
class Workspace:
    """A folder of this host, there for the length of a run."""

    folder: Path

    def prepare(self, model: UserModel, plan: Plan, given: Path | None) -> str:
        """Capture the model, and write its graph and initial weights, or where ranks find them.

        The model is built with values only if its own are asked for, and the host's memory holds them.

        Args:
            model: the user's file.
            plan: what the graph must fit.
            given: a folder of weights that replace those of ``model()``.

        Returns:
            Where the initial weights are from.

        Raises:
            FileError: the model has changed since it was planned for, or the weights do not fit it.
            UsageError: a model larger than memory has parameters that nothing but ``model()`` makes.
        """
        check_code(model.path, model.sha256, model.imports, plan.model)
        (self.folder / WEIGHTS).mkdir()
        if given is not None:
            module, graph = outline(model, plan.seed)
            self._link(module, given)
            source = f"files in {given}"
        elif _too_large(model, plan.seed):
            module, graph = outline(model, plan.seed)
            write_made(module, plan.seed, self.folder / WEIGHTS)
            source = f"made module by module, seed {plan.seed}: model() is larger than the host's memory"
        else:
            module = model.build(plan.seed)
            graph = capture(model, module)
            self._write(dict(module.named_parameters()) | dict(module.named_buffers()))
            source = f"model(), seed {plan.seed}"
        (self.folder / NOTES).write_text(json.dumps([*graph.notes, *uncovered(model, plan)]), encoding="utf-8")
        graph = fitted(graph, plan, model)
        check_together(model, module, graph, plan)
        self._write_settings(whole_settings(model, module))
        if graph.portable:
            save_graph(graph, self.folder / GRAPH)
        return source

    def settings(self) -> Settings | None:
        """Return what the optimizer gives every parameter of the whole model; None where that is not known."""
        path = self.folder / SETTINGS
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def graph(self, model: UserModel, plan: Plan) -> LayerGraph:
        """Return the graph for one rank, without weights."""
        if (self.folder / GRAPH).exists():
            return load_graph(self.folder / GRAPH)
        return outline(model, plan.seed)[1]

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return initial parameters and buffers by name."""
        wanted = set(names)
        there = {self._given[name]: name for name in wanted & self._given.keys()}
        found = weights.read(self.folder / WEIGHTS, wanted - self._given.keys())
        if there:
            given = weights.read(self.folder / GIVEN, there)
            found |= {there[name]: tensor for name, tensor in given.items()}
        return found

    def notes(self) -> list[str]:
        """Return what a reader of the report must know of the model."""
        return list(json.loads((self.folder / NOTES).read_text(encoding="utf-8")))

    def names(self) -> set[str]:
        """Return the names of all parameters and buffers of the model."""
        return weights.names(self.folder / WEIGHTS) | self._given.keys()

    @cached_property
    def _given(self) -> dict[str, str]:
        """Names in the folder of given weights, by the model's own."""
        path = self.folder / NAMES
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _write_settings(self, settings: Settings | None) -> None:
        if settings is not None:
            (self.folder / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")

    def _link(self, module: nn.Module, given: Path) -> None:
        names = given_names(module, given)
        (self.folder / GIVEN).symlink_to(given.resolve(), target_is_directory=True)
        (self.folder / NAMES).write_text(json.dumps(names), encoding="utf-8")
        self._write({name: buffer for name, buffer in module.named_buffers() if name not in names})

    def _write(self, state: dict[str, torch.Tensor]) -> None:
        values = {name: value.detach() for name, value in state.items()}
        weights.write(self.folder / WEIGHTS / weights.SINGLE, values, durable=False)


def _too_large(model: UserModel, seed: int) -> bool:
    """Tell whether the host's memory cannot hold the model's parameters."""
    try:
        shapes = model.build(seed, hollow=True)
    except (CaptureError, ModelError):
        # It is built with them, or what is wrong with it is said where it is.
        return False
    return sum(parameter.nbytes for parameter in shapes.parameters()) > host_memory_bytes()
