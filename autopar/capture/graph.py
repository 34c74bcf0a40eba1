"""LayerGraph: the model as a chain of layers, and the tensors between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from autopar.formats.profile import Writes


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is made in one layer and read in later ones; or a model input that some layer reads."""

    name: str
    producer: str | None
    """Name of the layer that makes it; none for a model input."""
    consumers: tuple[str, ...]
    sizes: tuple[int, ...]
    """The shape of one sample: without the batch dimension."""
    batch_dim: int
    """Where the batch dimension is in the whole tensor: rows are sliced along it."""
    dtype: torch.dtype
    gradient: bool
    """Whether a gradient flows back over it."""

    @property
    def bytes_per_sample(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the whole tensor's shape for that many samples."""
        return (*self.sizes[: self.batch_dim], rows, *self.sizes[self.batch_dim :])

    def slice(self, dim: int, count: int) -> TensorSpec:
        """Return one of so many even slices of a dimension of the whole tensor, which is not that of rows."""
        at, sizes = dim - (dim > self.batch_dim), list(self.sizes)
        sizes[at] //= count
        return replace(self, sizes=tuple(sizes))


@dataclass(frozen=True, eq=False)
class Layer:
    """A legal segment of the captured graph: the smallest unit the planner moves."""

    name: str
    """The path of its first module; a later call of the same module is ``path@2``."""
    modules: tuple[str, ...]
    """Named modules whose calls make up the layer, in call order."""
    inputs: tuple[str, ...]
    """Names of tensors, in the order ``module`` takes them after ``rows``."""
    outputs: tuple[str, ...]
    """Names of crossing tensors, then (in the last layer) of the loss outputs, in the order ``module`` returns them."""
    parameters: Mapping[str, str]
    """From an attribute path in ``module`` to the parameter's name in the model (a tied one has a single name)."""
    buffers: Mapping[str, str]
    """From an attribute path in ``module`` to the buffer's name in the model."""
    random: bool
    """Whether it draws random numbers."""
    fingerprint: str
    """Equal for layers that compute the same up to the identity of parameters."""
    module: nn.Module
    """Called ``module(rows, *inputs)``, gives a tuple of ``outputs``."""
    writes: Writes | None = None
    """What a forward changes besides; by the model's names."""
    least_rows: int = 1
    """The fewest samples that it can be given at once."""
    most_rows: int | None = None
    """The most; none: any number."""

    @property
    def stateful(self) -> tuple[str, ...]:
        """Paths of Python state (attributes, generators) that a forward of the listed module changes."""
        return () if self.writes is None else self.writes.state

    def parameter(self, attribute: str) -> nn.Parameter:
        """Return the parameter that ``module`` holds at an attribute path."""
        return self.module.get_parameter(attribute)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return its parameters, each once, with their names in the model."""
        return list({name: self.parameter(attribute) for attribute, name in self.parameters.items()}.items())


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """Layers in execution order. The loss is inside the last layer."""

    layers: tuple[Layer, ...]
    tensors: tuple[TensorSpec, ...]
    """Every tensor that a layer reads, model inputs first, each once."""
    inputs: tuple[str, ...]
    """Names of all tensors of a batch, in order (see ``batch.named_tensors``), also those that no layer reads."""
    outputs: tuple[str, ...]
    """Names of the loss outputs: ``("loss",)``, ``("loss_sum", "loss_count")``, or those of terms with names."""
    portable: bool = True
    """Whether it can be saved; a graph made of ``layers(model)`` cannot, each rank captures for itself."""
    on_meta: bool = False
    """Whether its parameters have shapes but no values (``place.materialize`` gives a layer values)."""
    notes: tuple[str, ...] = ()
    """What a reader of a profile must know of how the layers were found."""
    names_read: frozenset[str] | None = None
    """Names in the code that forward and loss ran; none where that is not known."""
    files_run: frozenset[str] = frozenset()
    """Source files, but torch's, of the code that forward and loss ran."""
    short: Any = None
    """A ``shortening.Shortening``, with the same layers for short samples; none where checks on those save nothing."""
    segmented_program: Any = None
    """The ``torch.export.ExportedProgram`` that the layers were cut from, with what is needed to cut it again."""

    @property
    def written_inputs(self) -> frozenset[str]:
        """Names of the model's inputs that a forward writes."""
        writes = (layer.writes for layer in self.layers if layer.writes is not None)
        return frozenset(name for each in writes for name in each.inputs)

    @property
    def loss(self) -> Literal["mean", "sum_count", "terms"]:
        """What its outputs are: a mean over the samples, a sum and what to divide it by, or several of either kind."""
        if any(":" in name for name in self.outputs):
            return "terms"
        return "mean" if len(self.outputs) == 1 else "sum_count"

    def layer(self, name: str) -> Layer:
        return next(layer for layer in self.layers if layer.name == name)

    def tensor(self, name: str) -> TensorSpec:
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def parameter(self, name: str) -> nn.Parameter:
        """Return a parameter by its name in the model."""
        found = (layer.parameter(at) for layer in self.layers for at, full in layer.parameters.items() if full == name)
        return next(found)

    def tied_parameters(self) -> dict[str, tuple[str, ...]]:
        """Return, for every parameter that several layers use, their names in order."""
        users: dict[str, list[str]] = {}
        for layer in self.layers:
            for name in dict.fromkeys(layer.parameters.values()):
                users.setdefault(name, []).append(layer.name)
        return {name: tuple(layers) for name, layers in users.items() if len(layers) > 1}
