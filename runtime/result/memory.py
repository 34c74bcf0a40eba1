"""Memory: the most that a rank held while it trained.

FLOPs: what a rank's forwards compute, and what its device could.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.errors import UsageError
from autopar.formats.profile import Precision
from autopar.hardware.gpus import find


class PeakMemory:
    """Watches from its creation on; create it before the stage is built."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kind: Literal["resident", "allocated"] = "allocated" if device.type == "cuda" else "resident"
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _forget_peak()
            self._before_bytes = _status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """Return the most bytes held since creation, beyond those held then; 0 where the system does not tell."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return max(0, _status_bytes("VmHWM") - self._before_bytes)


def _forget_peak() -> None:
    """Let Linux forget the process's high-water mark."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _status_bytes(key: str) -> int:
    try:
        match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


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
