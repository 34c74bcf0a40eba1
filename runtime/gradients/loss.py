"""LossTally: a rank's losses of one step, kept on the device until the step closes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from autopar.errors import TrainingError
from autopar.runtime.messages.copies import Copies, HostCopy


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
        self._parts.append(_part(outputs))

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


class BroughtLossTally(LossTally):
    """Adds up losses of a device that is behind the host: each is brought to the host as soon as it is made.

    Whoever settles them waits for the last forward, not for the backward behind it.
    """

    def __init__(self, rows: int, batch: int, copies: Copies, meanwhile: Callable[[], None]) -> None:
        """Begin as :class:`LossTally`; ``meanwhile`` is done before the device is waited for."""
        super().__init__(rows, batch)
        self._copies, self._meanwhile = copies, meanwhile
        self._coming: list[HostCopy] = []

    def begin_step(self) -> None:
        """See :class:`LossTally`."""
        super().begin_step()
        self._coming.clear()

    def add(self, outputs: list[torch.Tensor]) -> None:
        """See :class:`LossTally`."""
        self._coming.append(self._copies.to_host(_part(outputs)))

    def settle(self, *, finite: bool = True) -> tuple[float, float]:
        """See :class:`LossTally`."""
        self._meanwhile()
        for copy in self._coming:
            copy.wait()
            self._parts.append(copy.tensor)
        return super().settle(finite=finite)


def _part(outputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([output.detach().double() for output in outputs])
