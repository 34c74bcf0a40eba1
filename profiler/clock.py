"""Clock: times calls, on the host or between events of the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Time(NamedTuple):
    """What one call took."""

    seconds: float
    launch_s: float | None = None
    """Seconds in which the host handed the call's work to the device; none where the host computes itself."""


class Clock:
    """Wall-clock times of calls.

    >>> clock = Clock()
    >>> clock.time(lambda: None)
    >>> len(clock.times())
    1
    """

    def __init__(self) -> None:
        self._host_s: list[float] = []

    def time(self, work: Callable[[], None]) -> None:
        """Call ``work`` and note how long it takes."""
        started = time.perf_counter()
        work()
        self._host_s.append(time.perf_counter() - started)

    def times(self) -> list[Time]:
        """Return the times of all calls, in order."""
        return [Time(seconds) for seconds in self._host_s]


class _DeviceClock(Clock):
    """Times between events on the device: one call follows the other, and nobody waits before all are queued."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.cuda.synchronize(device)
        self._device = device
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, work: Callable[[], None]) -> None:
        first, last = _event(), _event()
        first.record()
        super().time(work)
        last.record()
        self._events.append((first, last))

    def times(self) -> list[Time]:
        torch.cuda.synchronize(self._device)
        pairs = zip(self._events, self._host_s, strict=True)
        return [Time(first.elapsed_time(last) / 1e3, host_s) for (first, last), host_s in pairs]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def clock_of(device: torch.device) -> Clock:
    """Return a clock for what runs on a device."""
    return _DeviceClock(device) if device.type == "cuda" else Clock()
