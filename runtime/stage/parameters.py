"""The parameters and buffers of one rank, by the model's own names, and what its optimizer is given of them.

Where replicas divide parameters, those that stay whole are given to the optimizer as tensors of the divided kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from autopar.capture.graph import Layer, LayerGraph
from autopar.capture.meta import materialize
from autopar.errors import FileError
from autopar.formats.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autopar.runtime.stage.team import Team


Weights = Callable[[Iterable[str]], Mapping[str, torch.Tensor]]
"""Reads initial parameters and buffers by name."""


class LocalParameters:
    """Parameters, in the order in which layers read them, and buffers."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        """Begin with whole ones."""
        self.parameters, self.buffers = dict(parameters), dict(buffers)

    def state(self) -> dict[str, torch.Tensor]:
        """Return both together."""
        return {**self.parameters, **self.buffers}

    def trainable_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that have gradients."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @contextmanager
    def dividing(self, names: set[str], layers: Sequence[Layer]) -> Iterator[frozenset[torch.nn.Parameter]]:
        """Return the context in which replicas divide the named parameters of a stage's layers; it gives their others.

        Nothing is held of them meanwhile: as soon as a layer's are divided, they must be nowhere as a whole. After it,
        what is held of the layers' parameters is what the layers have by then.
        """
        order = list(self.parameters)
        whole = {name for layer in layers for name in layer.parameters.values()} - names
        for name in names:
            del self.parameters[name]
        yield frozenset(self.parameters[name] for name in whole)
        left = {name: layer.parameter(attribute) for layer in layers for attribute, name in layer.parameters.items()}
        self.parameters = {name: left[name] if name in left else self.parameters[name] for name in order}


def hold(
    plan: Plan, stages: Mapping[int, Sequence[Layer]], weights: Weights, device: torch.device, team: Team | None = None
) -> LocalParameters:
    """Put the parameters and buffers of a rank's layers in place, and return them.

    Args:
        plan: says what replicas divide.
        stages: the layers, by stage; their modules are given what they lack.
        weights: reads the values.
        device: where they go, but for what replicas divide: that waits in the host's memory until it is.
        team: says what the rank has of parameters that are cut.

    Raises:
        FileError: the initial weights lack some.
    """
    layers = [layer for each in stages.values() for layer in each]
    trainable: dict[str, bool] = {}
    wanted: dict[str, None] = {}
    for layer in layers:
        for attribute, name in layer.parameters.items():
            trainable[name] = layer.parameter(attribute).requires_grad
        wanted.update(dict.fromkeys([*layer.parameters.values(), *layer.buffers.values()]))
    values = weights(wanted)
    if team is not None and team.cuts:
        values = {name: team.take(name, value) for name, value in values.items()}
    missing = [name for name in wanted if name not in values]
    if missing:
        raise FileError(f"the initial weights lack {missing[0]!r} and {len(missing) - 1} more; check `weights`")
    parts = {name for index, each in stages.items() for name in sharded_parameter_names(plan, index, each)}
    parameters = {
        # What is divided need not fit the device as a whole.
        name: torch.nn.Parameter(values[name].to("cpu" if name in parts else device), requires_grad=needed)
        for name, needed in trainable.items()
    }
    held = LocalParameters(parameters, {name: values[name].to(device) for name in wanted if name not in trainable})
    for layer in layers:
        materialize(layer, held.state(), device)
    return held


def sharded_parameter_names(plan: Plan, stage: int, layers: Iterable[Layer]) -> set[str]:
    """Return the names of the parameters of a stage's layers of which every replica is to keep a part.

    Those that other stages hold, too, stay whole, and so does what has no rows or cannot be reduced in parts: scalars,
    empty tensors, complex numbers.
    """
    if plan.stages[stage].shard == "none":
        return set()
    found = {name: layer.parameter(attribute) for layer in layers for attribute, name in layer.parameters.items()}
    parts = {name for name, each in found.items() if each.dim() and each.numel() and not each.is_complex()}
    return parts - {tied.parameter for tied in plan.tied}


def stages_of_parameters(graph: LayerGraph, plan: Plan) -> dict[str, int]:
    """Return the first stage that reads each parameter of a model."""
    stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    found: dict[str, int] = {}
    for layer in graph.layers:
        for name in layer.parameters.values():
            found[name] = min(stage_of[layer.name], found.get(name, len(plan.stages)))
    return found


class OptimizerParameters:
    """Stand-ins for whole parameters, of the kind of the divided ones beside them, whose values are theirs.

    Torch's kernels for many parameters at once would refuse some of one kind and some of the other.
    """

    def __init__(self, trainable_parameters: Mapping[str, torch.nn.Parameter], mesh: DeviceMesh | None) -> None:
        """Make them; without a mesh of replicas that divide parameters, there are none."""
        self._twins: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._mesh = mesh
        self.trainable_parameters = dict(trainable_parameters)
        """By the model's own names."""
        if mesh is not None:
            from torch.distributed.tensor import DTensor

            from autopar.runtime.stage.sharded import replicated_dtensor

            # Complex numbers are not divided: kernels take them by themselves.
            found = [each for each in trainable_parameters.values() if not each.is_complex()]
            whole = [each for each in found if not isinstance(each, DTensor)]
            self._twins = {each: torch.nn.Parameter(replicated_dtensor(each.detach(), mesh)) for each in whole}
        self.optimizer_parameters = {
            name: self._twins.get(parameter, parameter) for name, parameter in trainable_parameters.items()
        }
        """What an optimizer is given, in the order of the trained parameters."""

    def set_gradients(self) -> None:
        """Give the twins the gradients of their parameters, before the optimizer steps."""
        if self._mesh is None:
            return
        from autopar.runtime.stage.sharded import replicated_dtensor

        for parameter, twin in self._twins.items():
            twin.grad = None if parameter.grad is None else replicated_dtensor(parameter.grad, self._mesh)


def sharded_ranges(tensor: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (dimension, start, stop) of what is here of a tensor that replicas divide, where it is not all."""
    if not hasattr(tensor, "to_local"):
        return []
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placed: Any = tensor
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, placed.device_mesh, placed.placements)
    sides = enumerate(zip(sizes, starts, tensor.shape, strict=True))
    return [(dim, start, start + size) for dim, (size, start, whole) in sides if size != whole]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this replica's part of a tensor that replicas divide, and any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
