"""JoinedLayer: a layer that a team runs whole, though each of its ranks has a part of the parameters.

In evaluation mode a layer may end elsewhere than in training, and then need whole what training leaves in parts: a head
that is split together with the loss gives whole predictions. All ranks of the team run it together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from autopar.capture.graph import Layer
from autopar.capture.meta import place
from autopar.runtime.stage.team import Team

_INNER = "module"


class JoinedLayer(nn.Module):
    """Joins the parts of a layer's parameters whenever it runs; nothing of that stays, and no gradient passes."""

    def __init__(self, module: nn.Module, names: Mapping[str, str], team: Team) -> None:
        """Take what the layer computes, and the names of the parameters that are cut, by attribute."""
        super().__init__()
        self.module = module
        self._names, self._team = dict(names), team

    def forward(self, *arguments: object) -> Any:  # noqa: ANN401
        """Return what the whole layer does."""
        by_name: dict[str, torch.Tensor] = {}
        for attribute, name in self._names.items():
            if name not in by_name:
                by_name[name] = self._team.whole(name, self.module.get_parameter(attribute).detach())
        return functional_call(self.module, {at: by_name[name] for at, name in self._names.items()}, arguments)


def with_parts(layer: Layer, team: Team) -> Layer:
    """Return a layer after its parameters have got the shapes of this rank's parts; they have no values."""
    for attribute, name in layer.parameters.items():
        if name in team.cuts:
            own = team.take(name, layer.parameter(attribute).detach().to("meta"))
            place(layer.module, attribute, nn.Parameter(own, requires_grad=False))
    return layer


def join_layer(layer: Layer, team: Team) -> Layer:
    """Return a layer that has parts of its parameters as one that runs whole."""
    names = {attribute: name for attribute, name in layer.parameters.items() if name in team.cuts}
    return replace(
        layer,
        module=JoinedLayer(layer.module, names, team),
        parameters={f"{_INNER}.{attribute}": name for attribute, name in layer.parameters.items()},
        buffers={f"{_INNER}.{attribute}": name for attribute, name in layer.buffers.items()},
    )
