"""What a rank's device is to the host that drives it: copies beside its work, and its memory.

Copies between a GPU's memory and its host's go both ways on streams of their own, between events: nothing waits for the
whole device. What a copy reads and writes is kept until it is done, so that no memory is given to others meanwhile.

Of memory the most is known that was held, and what is said where there was not enough.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from autopar.errors import OutOfMemoryError, text_of
from autopar.formats.plan import Plan


class HostCopy:
    """A copy in the host's memory, under way; the tensor that is copied is kept until it is done."""

    def __init__(self, tensor: torch.Tensor, source: torch.Tensor, done: torch.cuda.Event) -> None:
        self.tensor = tensor
        """The copy, which has its values once it has been waited for."""
        self._source: torch.Tensor | None = source
        self._done = done

    def wait(self) -> None:
        """Return when it is done, in whichever thread."""
        self._done.synchronize()
        self._source = None


class Copies:
    """Copies of one GPU, through page-locked memory, on a stream for each purpose; calls return before it is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._bringing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the device's memory."""
        return tensor.is_cuda

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Begin to copy what the device's work so far makes of a tensor, which must stay untouched until it is done."""
        host = self.buffer(tensor)
        # Whoever waits for it sleeps: computing threads may want the processor.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(tensor, non_blocking=True)
            done.record(self._out)
        return HostCopy(host, tensor, done)

    def buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory for a copy of a contiguous tensor."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def moment(self) -> object:
        """Mark the end of the device's work so far."""
        return torch.cuda.current_stream(self._device).record_event()

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor, since: object) -> None:
        """Begin to fill a tensor that no work after the moment ``since`` uses; work from now on waits for it."""
        assert isinstance(since, torch.cuda.Event)
        self._in.wait_event(since)
        with torch.cuda.stream(self._in):
            # The allocator of page-locked memory keeps ``host`` from others until the copy is done.
            tensor.copy_(host, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._in)

    def bring(self, host: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to the device, beside its work; that may use it once it is admitted."""
        with torch.cuda.stream(self._bringing):
            return _through_page_locked(host, self._device)

    def admit(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the device's work from now on use what was brought, for which it waits."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._bringing)
        for tensor in tensors:
            # Its memory belongs to the other stream, which must not have it back before this one is done with it.
            tensor.record_stream(current)

    def prepare_thread(self) -> None:
        """Let the present thread wait for copies."""
        torch.cuda.set_device(self._device)


def copies_of(device: torch.device) -> Copies | None:
    """Return the copies of a device with a memory of its own; None for the CPU."""
    return Copies(device) if device.type == "cuda" else None


def move_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device; the host waits for no work of a GPU, on whose current stream the copy goes."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return _through_page_locked(tensor, device)
    return tensor.to(device)


def value_of(scalar: torch.Tensor) -> float:
    """Return a number that a device makes; the host sleeps until it is there, whatever is behind it."""
    if not scalar.is_cuda:
        return float(scalar)
    host = torch.empty(scalar.shape, dtype=scalar.dtype, pin_memory=True).copy_(scalar, non_blocking=True)
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(scalar.device))
    done.synchronize()
    return float(host)


def _through_page_locked(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host.pin_memory().to(device, non_blocking=True)


_ON_THE_HOST = "can't allocate memory"
"""In what torch raises where the host has none, which is no error of a kind of its own."""
_MIB = 2**20


class PeakMemory:
    """Watches from its creation on; create it before the stage is built."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kind: Literal["resident", "allocated"] = "allocated" if device.type == "cuda" else "resident"
        self._before_bytes = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError):
                # Linux forgets the process's high-water mark.
                Path("/proc/self/clear_refs").write_text("5")
            self._before_bytes = _status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """Return the most bytes held since creation, beyond those held then; 0 where the system does not tell."""
        return max(0, held_bytes(self._device) - self._before_bytes)


def held_bytes(device: torch.device) -> int:
    """Return the most bytes that were held: on a GPU by tensors, else by this process; 0 where nobody tells."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else _status_bytes("VmHWM")


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
        isinstance(error, RuntimeError) and _ON_THE_HOST in text_of(error)
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
    said = ". ".join(text_of(error).split(". ")[:3]).removesuffix(".")
    held = held_bytes(device)
    planned = max(plan.predicted.peak_bytes[stage] for stage in stages)
    limits = plan.predicted.limit_bytes
    limit = max((limits[stage] for stage in stages if limits), default=planned)
    holder = "tensors" if device.type == "cuda" else "the process"
    numbers = f"{holder} held at most {_mib(held)}, {_mib(planned)} of {_mib(limit)} were planned"
    return OutOfMemoryError(f"{place}: {said}; {numbers}", _memory_to_plan_with(held, planned, limit))


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
        raise OutOfMemoryError(f"rank {rank} (setting up): {numbers}", _memory_to_plan_with(there, planned, there))


def _memory_to_plan_with(peak_bytes: int, predicted_bytes: int, limit_bytes: int) -> int:
    """Return the limit of a device, in bytes, under which a plan that is off as much fits; below what was planned.

    Where more was held than planned, plans are off by that share; where less was, the device has less than was thought.

    >>> [_memory_to_plan_with(held << 20, 10 << 20, 16 << 20) >> 20 for held in (12, 6)]
    [9, 6]
    """
    fits = limit_bytes * predicted_bytes // peak_bytes if peak_bytes > predicted_bytes else peak_bytes
    return max(1, min(fits, predicted_bytes - _MIB) // _MIB) * _MIB


def _mib(count: int) -> str:
    return f"{count / _MIB:,.0f} MiB"
