"""Flight: a micro-batch in flight on a stage, from its forward to its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopar.runtime.stage import Stage

__all__ = ["Flight"]


class Flight:
    """What a stage's forward of one micro-batch leaves for its backward."""

    def __init__(
        self, stage: Stage, received: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor], weight: float
    ) -> None:
        """Keep what the backward starts from and ends at.

        Args:
            stage: whose forward it was.
            received: the tensors that it began with; where a gradient goes back, they are leaves.
            outputs: what it made.
            weight: the loss's gradient.
        """
        self._returned = [spec for spec in stage.received if spec.gradient]
        self._leaves = [received[spec.name] for spec in self._returned]
        self.awaited = [spec.name for spec in stage.sent if spec.gradient and outputs[spec.name].requires_grad]
        """Names of the tensors whose gradients the backward needs."""
        self._roots = [outputs[name] for name in self.awaited]
        self._loss = outputs[stage.loss[0]] if stage.loss else None
        self._weight = weight

    def backward(self, gradients: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run backward from the gradients of ``awaited``; return those of the received tensors by name."""
        roots, starts = list(self._roots), list(gradients)
        if self._loss is not None:
            roots.append(self._loss)
            starts.append(torch.full_like(self._loss, self._weight))
        if roots:
            torch.autograd.backward(roots, starts)
        return {spec.name: _gradient(leaf) for spec, leaf in zip(self._returned, self._leaves, strict=True)}


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    """Return a leaf's gradient, zeros where the stage did not make use of it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
