"""LossTally: a rank's losses of one step, kept on the device until the step closes."""

from __future__ import annotations

import math

import torch

from autopar.errors import TrainingError

__all__ = ["LossTally"]


class LossTally:
    """Adds up the loss outputs of a rank's micro-batches."""

    def __init__(self, rows: int, batch: int) -> None:
        """Begin with nothing; every micro-batch has ``rows`` of the mini-batch's ``batch`` samples."""
        self._share = rows / batch
        self._parts: list[torch.Tensor] = []

    def begin_step(self) -> None:
        """Forget the step before."""
        self._parts.clear()

    def add(self, outputs: list[torch.Tensor]) -> None:
        """Note one micro-batch's loss outputs: its mean, or its sum and count."""
        self._parts.append(torch.stack([output.detach().double() for output in outputs]))

    def settle(self, *, finite: bool = True) -> tuple[float, float]:
        """Return this rank's part of the mini-batch's mean and 0, or its sum and count; zeros without any loss.

        Raises:
            TrainingError: a loss is not a finite number, and has to be.
        """
        if not self._parts:
            return 0.0, 0.0
        total = torch.stack(self._parts).sum(0).tolist()
        if len(total) == 1:
            total = [total[0] * self._share, 0.0]
        if finite and not all(map(math.isfinite, total)):
            bad = [index for index, loss in enumerate(self._parts) if not bool(torch.isfinite(loss).all())]
            raise TrainingError(f"the loss is not finite in micro-batch {bad[0]}; nothing was updated on this rank")
        return total[0], total[1]
