"""Layers' times, held against a clock that counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.autograd.function import FunctionCtx

from autopar.formats.program import Action, RankProgram
from autopar.runtime.clocks import LayerTimes


class CountingClock:
    """A clock that only layers move."""

    def __init__(self) -> None:
        self.now = 0.0

    def start(self) -> None:
        """Begin a step."""

    def mark(self) -> object:
        return self.now

    def resolve(self, marks: list[object]) -> list[float]:
        return [float(str(mark)) for mark in marks]


class Slow(torch.autograd.Function):
    """Moves a clock forward and backward, and nothing else."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, value: torch.Tensor, clock: CountingClock, times: tuple[float, float]
    ) -> torch.Tensor:
        ctx.clock, ctx.backward_s = clock, times[1]
        clock.now += times[0]
        return value * 1.0

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.clock.now += ctx.backward_s
        return gradient * 1.0, None, None


def _layer(clock: CountingClock, forward_s: float, backward_s: float, value: torch.Tensor) -> Sequence[torch.Tensor]:
    return (Slow.apply(value, clock, (forward_s, backward_s)),)


def _forward(times: LayerTimes, clock: CountingClock, seconds: dict[str, tuple[float, float]]) -> torch.Tensor:
    value = torch.ones(2, requires_grad=True)
    for name, (forward_s, backward_s) in seconds.items():
        run: Callable[[], Sequence[torch.Tensor]] = partial(_layer, clock, forward_s, backward_s, value)
        (value,) = times(name, run, False)
    return value


def _program(text: str) -> RankProgram:
    return RankProgram.of(map(Action.parse, text.split()))


def test_a_layers_backward_lasts_from_its_outputs_gradients_to_the_next_ones() -> None:
    clock, seconds = CountingClock(), {"a": (1.0, 2.0), "b": (3.0, 7.0), "c": (4.0, 5.0)}
    times = LayerTimes(_program("F0@0 F1@0 B0@0 B1@0 U@0"), {0: list(seconds)}, clock)
    for step in range(2):
        times.begin_step()
        spans, ends = [], []
        for _ in range(2):
            start = clock.now
            ends.append(_forward(times, clock, seconds))
            spans.append((start, clock.now))
        for value in ends:
            start = clock.now
            value.sum().backward()
            spans.append((start, clock.now))
        times.end_step([*spans, (clock.now, clock.now + step)])
    assert times.medians() == seconds
    # Of layers whose gradients seem to come in another order, or behind the end, the later ones take no time.
    times = LayerTimes(_program("F0@0 B0@0"), {0: list(seconds)}, clock)
    times._part(0, {"a": 9.0, "b": 3.0, "c": 5.0}, (1.0, 8.0))
    assert [times._seconds[layer][1] for layer in seconds] == [[0.0], [3.0], [0.0]]


def test_a_recomputed_layers_backward_begins_with_its_recomputation_and_halves_have_no_time() -> None:
    clock = CountingClock()
    times = LayerTimes(_program("F0@0 F1@0 B1@0 B0@0"), {0: ["a", "b"]}, clock)
    times.begin_step()
    spans, made, given = [], [], torch.ones(2, requires_grad=True)
    for _ in range(2):
        start = clock.now
        with torch.no_grad():
            times("a", partial(_layer, clock, 1.0, 0.0, given), False)
        made += times("b", partial(_layer, clock, 4.0, 7.0, given), False)
        spans.append((start, clock.now))
    for last in reversed(made):
        start = clock.now
        last.sum().backward()
        (again,) = times("a", partial(_layer, clock, 1.0, 2.0, given), True)
        again.sum().backward()
        spans.append((start, clock.now))
    times.end_step(spans)
    assert times.medians() == {"a": (1.0, 3.0), "b": (4.0, 7.0)}
    # Layers whose backward goes in halves have forwards only.
    clock = CountingClock()
    times = LayerTimes(_program("F0@0 I0@0 W0@0 U@0"), {0: ["a"]}, clock)
    times.begin_step()
    _forward(times, clock, {"a": (3.0, 1.0)}).sum().backward()
    times.end_step([(0.0, 3.0), (3.0, 4.0), (4.0, 4.0), (4.0, 4.0)])
    assert times.medians() == {"a": (3.0, 0.0)}
