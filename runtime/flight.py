"""Flight: a micro-batch in flight on a stage, from its forward to its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopar.capture.halves import Halves
from autopar.runtime.stage import Stage

__all__ = ["Flight"]


class Flight:
    """What a stage's forward of one micro-batch leaves for its backward."""

    def __init__(
        self,
        stage: Stage,
        received: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        weight: float,
        halves: Halves | None = None,
    ) -> None:
        """Keep what the backward starts from and ends at.

        Args:
            stage: whose forward it was.
            received: the tensors that it began with; where a gradient goes back, they are leaves.
            outputs: what it made.
            weight: the loss's gradient.
            halves: what recorded the forward, where its backward is split.
        """
        self._halves = halves
        self._returned = [spec for spec in stage.received if spec.gradient]
        self._leaves = [received[spec.name] for spec in self._returned]
        self.awaited = [spec.name for spec in stage.sent if spec.gradient and outputs[spec.name].requires_grad]
        """Names of the tensors whose gradients the backward needs."""
        self._roots = [outputs[name] for name in self.awaited]
        self._loss = outputs[stage.loss[0]] if stage.loss else None
        self._weight = weight

    def backward(self, gradients: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run backward from the gradients of ``awaited``; return those of the received tensors by name."""
        roots, starts = self._begin(gradients)
        if roots:
            torch.autograd.backward(roots, starts)
        return self._named([leaf.grad for leaf in self._leaves])

    def backward_input(self, gradients: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the half of the backward that others wait for; return the gradients of the received tensors by name."""
        assert self._halves is not None
        found = self._halves.input(*self._begin(gradients), self._leaves)
        self._roots, self._loss = [], None
        return self._named(found)

    def backward_weight(self) -> None:
        """Run the other half, which makes the parameters' gradients."""
        assert self._halves is not None
        self._halves.weight()

    def _begin(self, gradients: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return what the backward starts from, and the gradients there."""
        roots, starts = list(self._roots), list(gradients)
        if self._loss is not None:
            roots.append(self._loss)
            starts.append(torch.full_like(self._loss, self._weight))
        return roots, starts

    def _named(self, gradients: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Return the gradients of the received tensors, zeros where the stage did not make use of one."""
        found = zip(self._returned, self._leaves, gradients, strict=True)
        return {spec.name: torch.zeros_like(leaf) if each is None else each for spec, leaf, each in found}
