"""Copies: between a GPU's memory and its host's, beside what the GPU computes.

Both ways go on streams of their own, between events: nothing waits for the whole device. What a copy reads and writes
is kept until it is done, so that no memory is given to others meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch


class HostCopy(Protocol):
    """A copy in the host's memory, under way."""

    @property
    def tensor(self) -> torch.Tensor:
        """The copy, which has its values once it has been waited for."""

    def wait(self) -> None:
        """Return when it is done, in whichever thread."""


class Copies(Protocol):
    """Copies of one device; its calls return before the device has copied."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the device's memory."""

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Begin to copy what the device's work so far makes of a tensor, which must stay untouched until it is done."""

    def buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory for a copy of a contiguous tensor."""

    def moment(self) -> object:
        """Mark the end of the device's work so far."""

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor, since: object) -> None:
        """Begin to fill a tensor that no work after the moment ``since`` uses; work from now on waits for it."""

    def bring(self, host: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to the device, beside its work; that may use it once it is admitted."""

    def admit(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the device's work from now on use what was brought, for which it waits."""

    def prepare_thread(self) -> None:
        """Let the present thread wait for copies."""


class _CudaHostCopy:
    """Keeps the tensor that is copied until the copy is done."""

    def __init__(self, tensor: torch.Tensor, source: torch.Tensor, done: torch.cuda.Event) -> None:
        self.tensor = tensor
        self._source: torch.Tensor | None = source
        self._done = done

    def wait(self) -> None:
        """See :class:`HostCopy`."""
        self._done.synchronize()
        self._source = None


class CudaCopies:
    """Copies through page-locked memory, on a stream for each purpose."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._bringing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def holds(self, tensor: torch.Tensor) -> bool:
        """See :class:`Copies`."""
        return tensor.is_cuda

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """See :class:`Copies`."""
        host = self.buffer(tensor)
        # Whoever waits for it sleeps: computing threads may want the processor.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(tensor, non_blocking=True)
            done.record(self._out)
        return _CudaHostCopy(host, tensor, done)

    def buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :class:`Copies`."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def moment(self) -> object:
        """See :class:`Copies`."""
        return torch.cuda.current_stream(self._device).record_event()

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor, since: object) -> None:
        """See :class:`Copies`."""
        assert isinstance(since, torch.cuda.Event)
        self._in.wait_event(since)
        with torch.cuda.stream(self._in):
            # The allocator of page-locked memory keeps ``host`` from others until the copy is done.
            tensor.copy_(host, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._in)

    def bring(self, host: torch.Tensor) -> torch.Tensor:
        """See :class:`Copies`."""
        with torch.cuda.stream(self._bringing):
            return _through_page_locked(host, self._device)

    def admit(self, tensors: Iterable[torch.Tensor]) -> None:
        """See :class:`Copies`."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._bringing)
        for tensor in tensors:
            # Its memory belongs to the other stream, which must not have it back before this one is done with it.
            tensor.record_stream(current)

    def prepare_thread(self) -> None:
        """See :class:`Copies`."""
        torch.cuda.set_device(self._device)


def copies_of(device: torch.device) -> Copies | None:
    """Return the copies of a device with a memory of its own; None for the CPU."""
    return CudaCopies(device) if device.type == "cuda" else None


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
