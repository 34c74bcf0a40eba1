"""The two halves of a split backward, as a zero-bubble pipeline runs them: inputs' gradients first, parameters' later.

Torch's own pipelining does the splitting: the first half stops at the last operators before the parameters and keeps
the gradients that arrive there, the second begins with those. Both together do the work of a whole backward and no
operator twice, which two calls of ``torch.autograd.grad`` would; what they add is the walk through the tape that finds
where to stop, and a second entry into autograd. Gradients equal those of a whole backward bit for bit.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from autopar.profiler.passes import LayerPass

__all__ = ["Halves"]


class Halves:
    """The backward of a pass, in two halves; its inputs' gradients are added up as in a whole one.

    A layer none of whose inputs carries a gradient has no first half, one without trained parameters no second: the
    other half is the whole backward.
    """

    def __init__(self, work: LayerPass) -> None:
        self._work = work
        self._inputs = [tensor for tensor in work.inputs.values() if tensor.requires_grad]
        self._parameters = [parameter for parameter in work.layer.module.parameters() if parameter.requires_grad]
        self._groups: list[dict[str, Any]] = []

    @staticmethod
    def own_outputs(work: LayerPass) -> None:
        """Make outputs that are views tensors of their own, for the first half detaches them in place.

        Called after the forward; their gradients pass through as they are.
        """
        work.outputs = {
            name: tensor.clone() if tensor._is_view() and tensor.requires_grad else tensor
            for name, tensor in work.outputs.items()
        }

    def input(self) -> None:
        """Compute the gradients of the inputs."""
        if not (self._inputs and self._work.roots):
            return
        if not self._parameters:
            self._work.backward()
            return
        roots, gradients = list(self._work.roots.values()), list(self._work.gradients.values())
        _, self._groups = stage_backward_input(roots, gradients, self._inputs, iter(self._parameters))

    def weight(self) -> None:
        """Compute the gradients of the parameters."""
        if not self._parameters:
            return
        if not self._inputs:
            self._work.backward()
        elif self._groups:
            stage_backward_weight(iter(self._parameters), self._groups)
            self._groups = []
