"""WeightAverage: the exponential moving average of a rank's trained parameters.

    average = ema_decay * average + (1 - ema_decay) * weights        behind every step; the first step's begin it

In come parameters that an optimizer changes in place; out comes, beside each, its average, divided as it is among
replicas and teams. The rule is torch.optim.swa_utils' own (Polyak and Juditsky, "Acceleration of stochastic
approximation by averaging", 1992, is where averages come from). Buffers have none: they are the newest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from autopar.runtime.stage.parameters import local


class WeightAverage:
    """Of one rank."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], decay: float) -> None:
        """Begin with the parameters as they are, by the model's own names."""
        self._parameters, self._rule = dict(parameters), get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.tensors = {name: each.detach().clone() for name, each in parameters.items()}
        """Averages by name."""
        self.has_begun = False
        """Whether a step has been averaged."""

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights that a step has left."""
        by_type: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for average, newest in self._pairs():
            by_type.setdefault(newest.dtype, []).append((average, newest))
        for pairs in by_type.values():
            averages, newest_ones = map(list, zip(*pairs, strict=True))
            if self.has_begun:
                self._rule(averages, newest_ones, 0)
            else:
                torch._foreach_copy_(averages, newest_ones)
        self.has_begun = True

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the parameters the values of the averages inside the block, and their own again behind it."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, newest in self._pairs():
            kept = newest.clone()
            newest.copy_(average)
            average.copy_(kept)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for name, parameter in self._parameters.items():
            yield local(self.tensors[name]), local(parameter.detach())
