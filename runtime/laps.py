"""Laps: when the steps of a rank began and ended."""

from __future__ import annotations

import time

from autopar.runtime.execute import StepRecord

__all__ = ["Laps"]


class Laps:
    """Begins and ends of steps, in seconds from a moment that all ranks agree on.

    Where the device is behind the host, a step ends when the device is done with it; the host asks for that when it has
    given the device the next one, so that the device never waits for it.
    """

    def __init__(self, origin_s: float, *, lags: bool) -> None:
        """Begin with none; ``lags`` says whether the device may be behind the host."""
        self.starts_s: list[float] = []
        self.ends_s: list[float] = []
        self._origin_s, self._lags = origin_s, lags
        self._open: StepRecord | None = None

    def begin(self) -> None:
        """Note the beginning of a step."""
        self.starts_s.append(time.perf_counter() - self._origin_s)

    def end(self, record: StepRecord) -> None:
        """Note that a step has been given to the device."""
        if self._lags:
            self.finish()
            self._open = record
        else:
            self.ends_s.append(time.perf_counter() - self._origin_s)

    def finish(self) -> None:
        """Wait for the end of the step before, if that is not known: the one after it does not begin earlier."""
        if self._open is None:
            return
        self.ends_s.append(self._open.times_s[-1][1] - self._origin_s)
        self._open = None
        if len(self.starts_s) > len(self.ends_s):
            self.starts_s[-1] = max(self.starts_s[-1], self.ends_s[-1])
