"""Workspace: what one process per host prepares for its ranks: the captured graph and the initial weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel
from autopar.capture.store import load_graph, save_graph
from autopar.errors import FileError
from autopar.formats.plan import Plan
from autopar.runtime import weights
from autopar.runtime.fit import check_fit, check_source

__all__ = ["Workspace"]

GRAPH, WEIGHTS = "graph", "weights"


@dataclass(frozen=True)
class Workspace:
    """A folder of this host, there for the length of a run."""

    folder: Path

    def prepare(self, model: UserModel, plan: Plan, given: Path | None) -> None:
        """Build the model once, capture it, and write its graph and initial weights.

        Args:
            model: the user's file.
            plan: what the graph must fit.
            given: a folder of weights that replace those of ``model()``.

        Raises:
            FileError: the model has changed since it was planned for, or the weights do not fit it.
        """
        check_source(model, plan)
        module = model.build(plan.seed)
        graph = capture(model, module)
        check_fit(graph, plan, model)
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        if given is not None:
            state |= _fitting(weights.read(given, state), dict(module.named_parameters()), given)
        (self.folder / WEIGHTS).mkdir()
        weights.write(self.folder / WEIGHTS / weights.SINGLE, {name: value.detach() for name, value in state.items()})
        if graph.portable:
            save_graph(graph, self.folder / GRAPH)

    def graph(self, model: UserModel, plan: Plan) -> LayerGraph:
        """Return the graph for one rank, without weights."""
        if (self.folder / GRAPH).exists():
            return load_graph(self.folder / GRAPH)
        return capture(model, model.build(plan.seed))

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return initial parameters and buffers by name."""
        return weights.read(self.folder / WEIGHTS, names)

    def names(self) -> set[str]:
        """Return the names of all parameters and buffers of the model."""
        return weights.names(self.folder / WEIGHTS)


def _fitting(
    given: dict[str, torch.Tensor], parameters: dict[str, torch.nn.Parameter], folder: Path
) -> dict[str, torch.Tensor]:
    for name, parameter in parameters.items():
        if name not in given:
            raise FileError(f"{folder}: holds no parameter {name!r} of the model")
        if given[name].shape != parameter.shape or given[name].dtype != parameter.dtype:
            found = f"{tuple(given[name].shape)} {given[name].dtype}"
            wanted = f"{tuple(parameter.shape)} {parameter.dtype}"
            raise FileError(f"{folder}: parameter {name!r} is {found}, the model's is {wanted}")
    return given
