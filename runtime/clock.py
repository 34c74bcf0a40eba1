"""Clock: times of actions on the device that runs them, in seconds of this host's performance counter."""

from __future__ import annotations

import time
from typing import Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "clock_of"]


class Clock(Protocol):
    """Marks moments without waiting for the device, and tells their times afterwards."""

    def start(self) -> None:
        """Begin a step."""

    def mark(self) -> object:
        """Mark the present moment of the device's work."""

    def resolve(self, marks: list[object]) -> list[float]:
        """Wait for the device once, and return the times of marks."""


class HostClock:
    """For devices whose work is done when the call returns."""

    def start(self) -> None:
        """See :class:`Clock`."""

    def mark(self) -> object:
        """See :class:`Clock`."""
        return time.perf_counter()

    def resolve(self, marks: list[object]) -> list[float]:
        """See :class:`Clock`."""
        return [mark for mark in marks if isinstance(mark, float)]


class CudaClock:
    """Marks are events on the current stream, told in host time by one reference at the start of the step."""

    def __init__(self) -> None:
        self._reference = _event()
        self._reference_s = 0.0

    def start(self) -> None:
        """See :class:`Clock`."""
        self._reference = _event()
        self._reference.record()
        self._reference.synchronize()
        self._reference_s = time.perf_counter()

    def mark(self) -> object:
        """See :class:`Clock`."""
        event = _event()
        event.record()
        return event

    def resolve(self, marks: list[object]) -> list[float]:
        """See :class:`Clock`."""
        events = [mark for mark in marks if isinstance(mark, torch.cuda.Event)]
        if events:
            events[-1].synchronize()
        return [self._reference_s + self._reference.elapsed_time(event) / 1e3 for event in events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def clock_of(device: torch.device) -> Clock:
    """Return the clock for a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
