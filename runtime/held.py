"""Held: the parameters and buffers that a rank holds, by the model's own names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from autopar.capture.graph import Layer
from autopar.capture.place import materialize
from autopar.errors import FileError
from autopar.formats.plan import Plan

__all__ = ["Held", "Weights", "divided", "hold"]

Weights = Callable[[Iterable[str]], Mapping[str, torch.Tensor]]
"""Reads initial parameters and buffers by name."""


class Held:
    """Parameters, in the order in which layers read them, and buffers."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        """Begin with whole ones."""
        self.parameters, self.buffers = dict(parameters), dict(buffers)

    def state(self) -> dict[str, torch.Tensor]:
        """Return both together."""
        return {**self.parameters, **self.buffers}

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that have gradients."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @contextmanager
    def dividing(self, names: Iterable[str], layers: Sequence[Layer]) -> Iterator[None]:
        """Return the context in which replicas divide the named parameters of a stage's layers.

        Nothing is held of them meanwhile: as soon as a layer's are divided, they must be nowhere as a whole. After it,
        what is held of the layers' parameters is what the layers have by then.
        """
        order = list(self.parameters)
        for name in names:
            del self.parameters[name]
        yield
        left = {name: layer.parameter(attribute) for layer in layers for attribute, name in layer.parameters.items()}
        self.parameters = {name: left[name] if name in left else self.parameters[name] for name in order}


def hold(plan: Plan, stages: Mapping[int, Sequence[Layer]], weights: Weights, device: torch.device) -> Held:
    """Put the parameters and buffers of a rank's layers in place, and return them.

    Args:
        plan: says what replicas divide.
        stages: the layers, by stage; their modules are given what they lack.
        weights: reads the values.
        device: where they go, but for what replicas divide: that waits in the host's memory until it is.

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
    missing = [name for name in wanted if name not in values]
    if missing:
        raise FileError(f"the initial weights lack {missing[0]!r} and {len(missing) - 1} more; check `weights`")
    parts = {name for index, each in stages.items() for name in divided(plan, index, each)}
    parameters = {
        # What is divided need not fit the device as a whole.
        name: torch.nn.Parameter(values[name].to("cpu" if name in parts else device), requires_grad=needed)
        for name, needed in trainable.items()
    }
    held = Held(parameters, {name: values[name].to(device) for name in wanted if name not in trainable})
    for layer in layers:
        materialize(layer, held.state(), device)
    return held


def divided(plan: Plan, stage: int, layers: Iterable[Layer]) -> set[str]:
    """Return the names of the parameters of a stage's layers of which every replica is to keep a part.

    Those that other stages hold, too, stay whole, and so does what has no rows or cannot be reduced in parts: scalars,
    empty tensors, complex numbers.
    """
    if plan.stages[stage].shard == "none":
        return set()
    found = {name: layer.parameter(attribute) for layer in layers for attribute, name in layer.parameters.items()}
    parts = {name for name, each in found.items() if each.dim() and each.numel() and not each.is_complex()}
    return parts - {tied.parameter for tied in plan.tied}
