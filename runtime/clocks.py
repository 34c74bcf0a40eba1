"""Clocks: when a rank's actions run, and its layers, by the host's time, a device's, or one that only prices make pass.

A clock marks moments on the device that runs the actions, and resolves marks to seconds of this host's performance
counter, or to those of virtual time. Layer times collect, of marks around the layers of a stage, how long each runs
forward and backward.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple, cast

import torch

from autopar.formats.program import BACKWARD, FORWARD, RankProgram

_ANCHOR_S = 10.0
"""After how many seconds the clocks of host and GPU are compared anew: they may drift apart by some millionths, and a
GPU tells times in milliseconds of 24 bits."""


class Clock:
    """Marks moments without waiting for the device, and tells their times afterwards; the host's, whose work is done
    when the call returns."""

    lags = False
    """Whether the device may be behind the host, so that telling times waits for it."""

    def start(self) -> None:
        """Begin a step."""

    def mark(self) -> object:
        """Mark the present moment of the device's work."""
        return time.perf_counter()

    def resolve(self, marks: list[object]) -> list[float]:
        """Wait for the last of the marks, and return the times of all."""
        return cast(list[float], marks)


class _Anchor(NamedTuple):
    """An event of which the host's time is known."""

    event: torch.cuda.Event
    host_s: float


class CudaClock(Clock):
    """Marks are events on the current stream, told in host time by one that the host has waited for."""

    lags = True

    def __init__(self) -> None:
        self._anchor: _Anchor | None = None

    def start(self) -> None:
        """See :class:`Clock`; waits for the device once every few seconds, and not in between."""
        if self._anchor is None or time.perf_counter() - self._anchor.host_s > _ANCHOR_S:
            event = _event()
            event.record()
            event.synchronize()
            self._anchor = _Anchor(event, time.perf_counter())

    def mark(self) -> object:
        """See :class:`Clock`."""
        assert self._anchor is not None
        event = _event()
        event.record()
        return self._anchor, event

    def resolve(self, marks: list[object]) -> list[float]:
        """See :class:`Clock`."""
        known = cast(list[tuple[_Anchor, torch.cuda.Event]], marks)
        if known:
            known[-1][1].synchronize()
        return [anchor.host_s + anchor.event.elapsed_time(event) / 1e3 for anchor, event in known]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def clock_of(device: torch.device) -> Clock:
    """Return the clock for a device."""
    return CudaClock() if device.type == "cuda" else Clock()


class VirtualClock(Clock):
    """Time is a number, which begins at 0 whenever the pipeline is filled.

    The actions of its rank take no time of their own: their prices pass in it.
    """

    def __init__(self, overhead_s: float) -> None:
        """Begin; ``overhead_s`` is what a fill takes before its first action."""
        self._overhead_s, self._now_s = overhead_s, 0.0

    @property
    def now_s(self) -> float:
        """The present moment; ranks that tell each other moments have it of the same origin."""
        return self._now_s

    def start(self) -> None:
        """See :class:`Clock`: time goes on from one repetition to the next."""

    def refill(self) -> None:
        """Begin anew."""
        self._now_s = self._overhead_s

    def mark(self) -> object:
        """See :class:`Clock`."""
        return self.now_s

    def spend(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds

    def wait_until(self, moment_s: float) -> None:
        """Let time pass until a moment, if that is to come."""
        self._now_s = max(self._now_s, moment_s)


class SleepingClock(VirtualClock):
    """Time is this host's: a rank sleeps as long as its actions take."""

    @property
    def now_s(self) -> float:
        """See :class:`VirtualClock`."""
        return time.perf_counter()

    def refill(self) -> None:
        """See :class:`VirtualClock`."""
        self.spend(self._overhead_s)

    def spend(self, seconds: float) -> None:
        """See :class:`VirtualClock`."""
        time.sleep(max(0.0, seconds))

    def wait_until(self, moment_s: float) -> None:
        """See :class:`VirtualClock`."""
        self.spend(moment_s - self.now_s)


class LayerTimes:
    """Watches a rank's layers for a few steps.

    A forward is timed around the layer. A layer's backward begins when the gradients of its outputs are complete, or
    with its recomputation, and ends when the next one's begins, or the stage's backward is over.
    """

    def __init__(self, actions: RankProgram, stages: Mapping[int, Sequence[str]], clock: Clock) -> None:
        """Prepare to watch.

        Args:
            actions: the rank's program.
            stages: names of the layers of its stages, in order.
            clock: marks moments.
        """
        self._clock, self._stages = clock, stages
        self._actions = list(actions)
        self._marks: dict[tuple[str, str, int], object] = {}
        """Moments of a layer's forwards (``start``, ``end``) and backwards (``again``: it was begun once more), in
        order; and when, of a forward's outputs, the latest gradient was complete (``reached``)."""
        self._runs: dict[tuple[str, bool], int] = defaultdict(int)
        self._seconds: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))

    def __call__(self, layer: str, run: Callable[[], Sequence[torch.Tensor]], again: bool) -> Sequence[torch.Tensor]:
        """Run a layer forward, timed; once more is part of its backward."""
        start = self._clock.mark()
        outputs = run()
        number = self._runs[layer, again]
        self._runs[layer, again] += 1
        if again:
            self._marks["again", layer, number] = start
            return outputs
        self._marks["start", layer, number], self._marks["end", layer, number] = start, self._clock.mark()
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._reach(layer, number))  # type: ignore[no-untyped-call]
        return outputs

    def begin_step(self) -> None:
        """Forget the marks of the step before."""
        self._clock.start()
        self._marks.clear()
        self._runs.clear()

    def end_step(self, times_s: Sequence[tuple[float, float]]) -> None:
        """Take in a step, given when its actions ran."""
        at_s = dict(zip(self._marks, self._clock.resolve(list(self._marks.values())), strict=True))
        for (what, layer, number), end_s in at_s.items():
            if what == "end":
                self._seconds[layer][0].append(end_s - at_s["start", layer, number])
        turns: dict[tuple[int, str], list[int]] = defaultdict(list)
        for action, span in zip(self._actions, times_s, strict=True):
            turns[action.stage, action.kind].append(action.micro_batch)
            if action.kind == BACKWARD:
                first = turns[action.stage, FORWARD].index(action.micro_batch)
                last = len(turns[action.stage, BACKWARD]) - 1
                begun = {
                    layer: at_s.get(("again", layer, last), at_s.get(("reached", layer, first)))
                    for layer in self._stages[action.stage]
                }
                self._part(action.stage, begun, span)

    def medians(self) -> dict[str, tuple[float, float]]:
        """Return the median seconds of every layer, forward and backward; 0 backward where none was seen whole."""
        return {
            layer: (median(forward), median(backward) if backward else 0.0)
            for layer, (forward, backward) in self._seconds.items()
        }

    def _reach(self, layer: str, number: int) -> None:
        self._marks["reached", layer, number] = self._clock.mark()

    def _part(self, stage: int, starts_s: Mapping[str, float | None], span: tuple[float, float]) -> None:
        """Divide a stage's backward among its layers, given when that of each began."""
        layers = list(reversed(self._stages[stage]))
        moments, latest = [], span[0]
        for layer in layers:
            moment = starts_s[layer]
            latest = latest if moment is None else min(max(moment, latest), span[1])
            moments.append(latest)
        for layer, (start_s, end_s) in zip(layers, pairwise([*moments, span[1]]), strict=True):
            self._seconds[layer][1].append(end_s - start_s)
