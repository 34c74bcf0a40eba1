"""FLOPs: what a rank's forwards compute, and what its device could."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.errors import UsageError
from autopar.formats.profile import Precision
from autopar.hardware.gpus import find

__all__ = ["ForwardFlops", "peak_of"]


class ForwardFlops:
    """Watches layers run forward, and counts the operations of their matrix products, convolutions and attention."""

    def __init__(self) -> None:
        self.total = 0
        """Multiplications and additions so far."""

    def __call__(self, layer: str, run: Callable[[], Sequence[torch.Tensor]], again: bool) -> Sequence[torch.Tensor]:
        """Run a layer forward, and count if it is the first time."""
        if again:
            return run()
        with FlopCounterMode(display=False) as counter:
            outputs = run()
        self.total += counter.get_total_flops()
        return outputs


def peak_of(device: torch.device, precision: Precision) -> float | None:
    """Return the operations per second that a device can do; none where that is not known, as of a CPU."""
    if device.type != "cuda":
        return None
    try:
        return find(torch.cuda.get_device_name(device)).flops_per_s(precision)
    except UsageError:
        return None
