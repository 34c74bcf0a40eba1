"""Most bytes alive at once while something runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.capture.storages import StorageTracker


def peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """Return the most bytes that ``work`` had allocated at once, beyond what there was before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return max(0, int(torch.cuda.max_memory_allocated(device)) - before)
    with StorageTracker() as tracker:
        work()
    return int(tracker.peak_bytes)
