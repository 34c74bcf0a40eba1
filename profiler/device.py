"""The device that is measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from autopar.errors import UsageError
from autopar.formats.profile import DeviceKind

COMMUNICATOR_BYTES = 600_000_000
"""Of one NCCL communicator (544 to 688 MB: nccl#964)."""
COMMUNICATORS = 2
"""Of a rank: one with all ranks, one with its stage's replicas."""
COMMUNICATORS_BYTES = COMMUNICATORS * COMMUNICATOR_BYTES


def choose(name: str) -> torch.device:
    """Return the device for ``auto``, ``cpu`` or ``cuda``.

    Raises:
        UsageError: another name, or ``cuda`` where there is none.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"`device` must be auto, cpu or cuda, found {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "`device='cuda'`: this machine, or this build of torch, has no CUDA device; use `device='cpu'`"
        )
    return torch.device("cuda", 0) if name != "cpu" and torch.cuda.is_available() else torch.device("cpu")


def count(device: torch.device) -> int:
    """Return how many such devices this machine has: GPUs, or cores that this process may use."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(device: torch.device, threads: int) -> DeviceKind:
    """Return what the profile records; a CPU rank's memory is its equal share of the machine's.

    Of a GPU's memory the context that is there is reserved, and what a rank's communicators take, which are not.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceKind(
            type="cuda",
            name=properties.name,
            memory_bytes=properties.total_memory,
            threads=threads,
            reserved_bytes=_context_bytes(device) + COMMUNICATORS_BYTES,
        )
    return DeviceKind(type="cpu", name=_cpu_name(), memory_bytes=memory_bytes(device) // count(device), threads=threads)


def _context_bytes(device: torch.device) -> int:
    """Return what is gone from a GPU's memory besides torch's tensors: this process's context, if no other runs."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total - free) - int(torch.cuda.memory_reserved(device)))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next((name for name in names if name), platform.processor() or platform.machine() or "cpu")


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a GPU, or of this machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
