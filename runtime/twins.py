"""Twins: what an optimizer steps of a rank whose replicas divide parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Twins", "local"]


class Twins:
    """Stand-ins for whole parameters, of the kind of the divided ones beside them, whose values are theirs.

    Torch's kernels for many parameters at once would refuse some of one kind and some of the other.
    """

    def __init__(self, trained: Mapping[str, torch.nn.Parameter], mesh: DeviceMesh | None) -> None:
        """Make them; without a mesh of replicas that divide parameters, there are none."""
        self._twins: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._mesh = mesh
        self.trained = dict(trained)
        """By the model's own names."""
        if mesh is not None:
            from torch.distributed.tensor import DTensor

            from autopar.runtime.sharded import replicated

            # Complex numbers are not divided: kernels take them by themselves.
            found = [each for each in trained.values() if not each.is_complex()]
            whole = [each for each in found if not isinstance(each, DTensor)]
            self._twins = {each: torch.nn.Parameter(replicated(each.detach(), mesh)) for each in whole}
        self.stepped = {name: self._twins.get(parameter, parameter) for name, parameter in trained.items()}
        """What an optimizer is given, in the order of the trained parameters."""

    def lend(self) -> None:
        """Give the twins the gradients of their parameters, before the optimizer steps."""
        if self._mesh is None:
            return
        from autopar.runtime.sharded import replicated

        for parameter, twin in self._twins.items():
            twin.grad = None if parameter.grad is None else replicated(parameter.grad, self._mesh)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this replica's part of a tensor that replicas divide, and any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
