"""Memory: what a rank has held of its device's, and what is said where that was not enough."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from autopar.errors import OutOfMemoryError
from autopar.formats.plan import Plan

_ON_THE_HOST = "can't allocate memory"
"""In what torch raises where the host has none, which is no error of a kind of its own."""
_MIB = 2**20


class PeakMemory:
    """Watches from its creation on; create it before the stage is built."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kind: Literal["resident", "allocated"] = "allocated" if device.type == "cuda" else "resident"
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError):
                # Linux forgets the process's high-water mark.
                Path("/proc/self/clear_refs").write_text("5")
            self._before_bytes = _status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """Return the most bytes held since creation, beyond those held then; 0 where the system does not tell."""
        return held_bytes(self._device) if self._device.type == "cuda" else max(0, _most_bytes() - self._before_bytes)


def held_bytes(device: torch.device) -> int:
    """Return the most bytes that were held: on a GPU by tensors, else by this process; 0 where nobody tells."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else _most_bytes()


def _most_bytes() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(key: str) -> int:
    try:
        match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the host, had no memory left.

    >>> [is_out_of_memory(each) for each in (MemoryError(), RuntimeError("can't allocate memory"), ValueError())]
    [True, True, False]
    """
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and _ON_THE_HOST in str(error)
    )


def out_of_memory(
    place: str, error: BaseException, plan: Plan, stages: Collection[int], device: torch.device
) -> OutOfMemoryError:
    """Return what is said where there is no memory left: what was asked for, what was held and what was planned.

    Args:
        place: where it was, in words.
        error: what was raised.
        plan: what is carried out.
        stages: those of the rank.
        device: the rank's.
    """
    # What was asked for and what there is; then follows advice on settings of torch's.
    said = ". ".join(str(error).split(". ")[:3]).removesuffix(".") or "out of memory"
    held = held_bytes(device)
    planned = max(plan.predicted.peak_bytes[stage] for stage in stages)
    limits = plan.predicted.limit_bytes
    limit = max((limits[stage] for stage in stages if limits), default=planned)
    holder = "tensors" if device.type == "cuda" else "the process"
    numbers = f"{holder} held at most {_mib(held)}, {_mib(planned)} of {_mib(limit)} were planned"
    return OutOfMemoryError(f"{place}: {said}; {numbers}", memory_to_plan_with(held, planned, limit))


def check_capacity(plan: Plan, rank: int, stages: Collection[int], device: torch.device) -> None:
    """Refuse a GPU with less memory than the rank is planned to hold, before anything is put there.

    Raises:
        OutOfMemoryError: it has less.
    """
    if device.type != "cuda":
        return
    properties = torch.cuda.get_device_properties(device)
    planned, there = max(plan.predicted.peak_bytes[stage] for stage in stages), properties.total_memory
    if planned > there:
        numbers = f"{properties.name} has {_mib(there)}, {_mib(planned)} were planned"
        raise OutOfMemoryError(f"rank {rank} (setting up): {numbers}", memory_to_plan_with(there, planned, there))


def memory_to_plan_with(peak_bytes: int, predicted_bytes: int, limit_bytes: int) -> int:
    """Return the limit of a device, in bytes, under which a plan that is off as much fits; below what was planned.

    Where more was held than planned, plans are off by that share; where less was, the device has less than was thought.

    >>> memory_to_plan_with(12 << 20, 10 << 20, 16 << 20) >> 20, memory_to_plan_with(6 << 20, 10 << 20, 16 << 20) >> 20
    (9, 6)
    """
    fits = limit_bytes * predicted_bytes // peak_bytes if peak_bytes > predicted_bytes else peak_bytes
    return max(1, min(fits, predicted_bytes - _MIB) // _MIB) * _MIB


def _mib(count: int) -> str:
    return f"{count / _MIB:,.0f} MiB"
