"""Memory: the most that a rank held while it trained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import torch

__all__ = ["PeakMemory"]


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
