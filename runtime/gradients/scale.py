"""Finite: whether gradients are finite numbers, at the cost of a norm.

LossScale: keeps the small gradients of float16 from vanishing.

The rule and its numbers are those of torch.amp.GradScaler (Micikevicius et al., "Mixed Precision Training", 2018,
section 3.2): losses are multiplied by a scale before the backward, gradients divided by it before the update. A step
whose gradients overflow changes nothing but the scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether every element is finite; a device is waited for once.

    >>> all_finite([torch.tensor([1.0, 2.0]), torch.tensor([1e30, 3e38])]), all_finite([torch.tensor([math.nan])])
    (True, False)
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    return all(map(_finite, by_device.values()))


def first_not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return the name of the first tensor that has an element that is not finite; None where all are."""
    return next((name for name, tensor in named if not bool(torch.isfinite(tensor).all())), None)


def _finite(tensors: list[torch.Tensor]) -> bool:
    norms = torch._foreach_norm(tensors)
    if math.isfinite(float(torch.stack(norms).sum())):
        return True
    # Squares of finite numbers may overflow.
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


class LossScale:
    """The scale of a run's losses; every rank keeps the same one, for all see the same overflows.

    >>> scale = LossScale(growth_interval=2)
    >>> [scale.settle(overflow) or scale.value for overflow in (True, False, False)]
    [32768.0, 32768.0, 65536.0]
    """

    def __init__(
        self,
        value: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.value = value
        self._growth, self._backoff, self._interval = growth, backoff, growth_interval
        self._sound = 0

    def settle(self, overflow: bool) -> None:
        """Take note of a step: shrink after an overflow, grow after enough steps without one."""
        self._sound = 0 if overflow else self._sound + 1
        if overflow:
            self.value *= self._backoff
        elif self._sound == self._interval:
            self.value *= self._growth
            self._sound = 0
