"""Flight: a micro-batch in flight on a stage, from its forward to its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopar.runtime.passes import Pass, taken
from autopar.runtime.stage import Stage

__all__ = ["Flight"]


class Flight:
    """What a stage's forward of one micro-batch leaves for its backward."""

    def __init__(
        self,
        stage: Stage,
        passes: Sequence[Pass],
        received: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        weight: float,
    ) -> None:
        """Keep what the backward starts from and ends at.

        Args:
            stage: whose forward it was.
            passes: its segments'.
            received: the tensors that it began with; where a gradient goes back, they are leaves.
            outputs: what it made.
            weight: the loss's gradient.
        """
        self._ahead, self._behind = list(passes), list[Pass]()
        self._leaves = {spec.name: received[spec.name] for spec in stage.received if spec.gradient}
        self.awaited = [spec.name for spec in stage.sent if spec.gradient and outputs[spec.name].requires_grad]
        """Names of the tensors whose gradients the backward needs."""
        self._loss = {name: outputs[name] for name in stage.loss[:1]}
        self._weight = weight

    def recompute(self) -> None:
        """Run the last segment forward again, if it is to be: while the gradients are awaited, it costs no time."""
        self._ahead[-1].recompute()

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """Run backward from the gradients of ``awaited``; return those of the received tensors by name, if any."""
        given = self._given(gradients)
        while self._ahead:
            self._ahead.pop().backward(given)
        return self._returned()

    def backward_input(self, gradients: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """Run the half of the backward that others wait for; return the gradients of the received tensors by name."""
        given = self._given(gradients)
        while self._ahead:
            self._behind.append(self._ahead.pop())
            self._behind[-1].backward_input(given)
        return self._returned()

    def backward_weight(self) -> None:
        """Run the other half, which makes the parameters' gradients."""
        for each in self._behind:
            each.backward_weight()

    def _given(self, gradients: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Return the gradients that the backward starts from by name: of what was sent, and of the loss."""
        loss = {name: torch.full_like(each, self._weight) for name, each in self._loss.items()}
        sent = zip(self.awaited, gradients, strict=True)
        return {**{name: each for name, each in sent if each is not None}, **loss}

    def _returned(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients of the received tensors, None where the backward did not come to one."""
        leaves, self._leaves = self._leaves, {}
        return {name: taken(leaf) for name, leaf in leaves.items()}
