"""Clock: times of actions on the device that runs them, in seconds of this host's performance counter."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "clock_of"]

ANCHOR_S = 10.0
"""After how many seconds the clocks of host and GPU are compared anew: they may drift apart by some millionths, and a
GPU tells times in milliseconds of 24 bits."""


class Clock(Protocol):
    """Marks moments without waiting for the device, and tells their times afterwards."""

    lags: bool
    """Whether the device may be behind the host, so that telling times waits for it."""

    def start(self) -> None:
        """Begin a step."""

    def mark(self) -> object:
        """Mark the present moment of the device's work."""

    def resolve(self, marks: list[object]) -> list[float]:
        """Wait for the last of the marks, and return the times of all."""


class HostClock:
    """For devices whose work is done when the call returns."""

    lags = False

    def start(self) -> None:
        """See :class:`Clock`."""

    def mark(self) -> object:
        """See :class:`Clock`."""
        return time.perf_counter()

    def resolve(self, marks: list[object]) -> list[float]:
        """See :class:`Clock`."""
        return [mark for mark in marks if isinstance(mark, float)]


class _Anchor(NamedTuple):
    """An event of which the host's time is known."""

    event: torch.cuda.Event
    host_s: float


class _Mark(NamedTuple):
    anchor: _Anchor
    event: torch.cuda.Event


class CudaClock:
    """Marks are events on the current stream, told in host time by one that the host has waited for."""

    lags = True

    def __init__(self) -> None:
        self._anchor: _Anchor | None = None

    def start(self) -> None:
        """See :class:`Clock`; waits for the device once every few seconds, and not in between."""
        if self._anchor is None or time.perf_counter() - self._anchor.host_s > ANCHOR_S:
            event = _event()
            event.record()
            event.synchronize()
            self._anchor = _Anchor(event, time.perf_counter())

    def mark(self) -> object:
        """See :class:`Clock`."""
        assert self._anchor is not None
        event = _event()
        event.record()
        return _Mark(self._anchor, event)

    def resolve(self, marks: list[object]) -> list[float]:
        """See :class:`Clock`."""
        known = [mark for mark in marks if isinstance(mark, _Mark)]
        if known:
            known[-1].event.synchronize()
        return [anchor.host_s + anchor.event.elapsed_time(event) / 1e3 for anchor, event in known]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def clock_of(device: torch.device) -> Clock:
    """Return the clock for a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
