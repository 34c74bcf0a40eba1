"""LossScale: keeps the small gradients of float16 from vanishing.

The rule and its numbers are those of torch.amp.GradScaler (Micikevicius et al., "Mixed Precision Training", 2018,
section 3.2): losses are multiplied by a scale before the backward, gradients divided by it before the update. A step
whose gradients overflow changes nothing but the scale.
"""

from __future__ import annotations

__all__ = ["LossScale"]


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
