"""Device: what a rank finds that it has, and tells the others: a type, a name and a memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple

import torch


class FoundDevice(NamedTuple):
    """A GPU, or the processors of a host."""

    type: str
    """``cuda`` or ``cpu``."""
    name: str
    """As the driver or the system has it."""
    memory_bytes: int
    """All of the GPU's, or of the host's."""


def found_device(device: torch.device) -> FoundDevice:
    """Return what a device of this host is."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return FoundDevice("cuda", properties.name, int(properties.total_memory))
    return FoundDevice("cpu", _cpu_name(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next((name for name in names if name), platform.processor() or platform.machine() or "cpu")


def gpus_of_rank(context: object, arguments: object) -> list[FoundDevice]:
    """Return :func:`gpus_of_host` of a rank: a job of a :class:`autopar.ranks.pool.RankPool`."""
    return gpus_of_host()


def gpus_of_host() -> list[FoundDevice]:
    """Return what the GPUs are that this process sees, in their order."""
    return [found_device(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
